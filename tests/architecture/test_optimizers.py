"""A fused update is named in few files: all tables are made from its spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src" / "halfstep"
MOST = 5
ELSEWHERE = frozenset({"advise", "compat", "integrations"})  # advise: lint recognises optimizers in users' scripts


def naming(optimizer: str, source: Path = SOURCE) -> list[str]:
    """Return the files that name an optimizer; those of `ELSEWHERE` name classes of other libraries and of users."""
    files = [file for file in source.rglob("*") if file.suffix in {".py", ".h", ".cpp"}]
    paths = {file.relative_to(source): file.read_text(encoding="utf-8") for file in files}
    word = re.compile(rf"(?<![a-z]){optimizer}(?![a-z])", re.IGNORECASE)
    return [str(p) for p, text in paths.items() if p.parts[0] not in ELSEWHERE and word.search(text)]


@pytest.mark.parametrize("optimizer", ["Lion", "NAdam"])
def test_few_files_name_an_optimizer(optimizer: str) -> None:
    assert 4 <= len(naming(optimizer)) <= MOST, naming(optimizer)


def test_a_file_that_names_it_is_found(tmp_path: Path) -> None:
    tmp_path.joinpath("one.h").write_text("void halfstep_lion();")
    tmp_path.joinpath("two.py").write_text("millions = 1")
    assert naming("Lion", tmp_path) == ["one.h"]
