"""The page of error messages: every public class is raised by its snippet, every quoted text is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from halfstep import errors
from tests.sources import nodes

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
CLASSES = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@cache
def sources() -> tuple[tuple[Path, str], ...]:
    files = sorted((ROOT / "src" / "halfstep").rglob("*.py"))
    return tuple((path, path.read_text(encoding="utf-8")) for path in files)


def sections() -> dict[str, str]:
    parts = re.split(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_public_error_has_a_section_whose_snippet_raises_it() -> None:
    found = sections()
    assert len(CLASSES) > 15
    for name in CLASSES:
        assert name in found, f"{PAGE.name} has no section {name}"
        assert name == "HalfstepError" or f"# raises {name}: " in found[name], name


def test_errors_of_other_modules_are_named() -> None:
    own = [source for path, source in sources() if "compat" not in path.parts]
    defined = {name for source in own for name in re.findall(r"^class (\w+)\(.*Error.*\):", source, re.MULTILINE)}
    public = {name for name in defined if not name.startswith("_")}
    page = PAGE.read_text(encoding="utf-8")
    assert {"PlanError", "TuneError", "NotChosen"} < public
    assert sorted(name for name in public if name not in page) == []


@cache
def texts(source: str) -> str:
    """Return the strings of a file, each on a line, with ``...`` for each value in it."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sd]", "...", node.value))
    return "\n".join(text.replace("\n", " ") for text in found)


def quoted() -> list[str]:
    """Return the messages of the tables of warnings and of the command line."""
    tables = PAGE.read_text(encoding="utf-8").partition("## Warnings and log lines")[2]
    cells = re.findall(r"^\| (`.*?) \|", tables, flags=re.MULTILINE)
    return [text for cell in cells for text in re.findall("`([^`]+)`", cell)]


def is_said(text: str) -> bool:
    parts = [part.strip(" :,") for part in text.split("...") if part.strip(" :,")]
    pattern = ".*?".join(map(re.escape, parts))
    words = " ".join(max(parts, key=len).split()[:2])  # more of them may stand on two lines of the source
    return any(re.search(pattern, texts(source)) for _, source in sources() if words in source)


def test_quoted_messages_are_in_the_code() -> None:
    found = quoted()
    assert len(found) > 20
    assert [text for text in found if not is_said(text)] == []


def test_a_message_that_has_changed_is_noticed() -> None:
    assert is_said("the loss scale is at its floor ... and gradients are still not finite")
    assert not is_said("the loss scale is at its floor ... and gradients are still infinite")
