"""docs/compat_apex.md and the code say the same, and each problem of Apex has its test."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from halfstep.compat import apex
from tests.snippets import run_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "compat_apex.md"
STATUSES = {"works", "differs", "absent"}


def rows() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").partition("\n## Every name\n")[2].splitlines():
        if line.startswith("| `"):
            names, status, what = [cell.strip() for cell in line.strip("|").split("|")]
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in found, name
                found[name] = (status, what)
    return found


def resolved(name: str) -> Any:
    """Return what a dotted name below the package stands for; AttributeError if nothing."""
    value: Any = apex
    for word in name.split("."):
        value = getattr(value, word)
    return value


def exists(name: str) -> bool:
    try:
        resolved(name)
    except AttributeError:
        return False
    return True


def test_every_row_has_a_status_and_says_why_if_something_differs() -> None:
    for name, (status, what) in rows().items():
        assert status in STATUSES, name
        assert status == "works" or len(what) > 10, name


def test_names_are_there_unless_the_row_says_absent() -> None:
    for name, (status, _) in rows().items():
        if "(" not in name:
            assert exists(name) == (status != "absent"), name


def test_arguments_are_there_with_the_defaults_of_the_rows() -> None:
    for name in rows():
        if "(" not in name:
            continue
        function, argument = name.rstrip(")").split("(")
        word, _, default = argument.partition("=")
        parameter = inspect.signature(resolved(function)).parameters[word]
        if default:
            assert repr(parameter.default) == default, name
        else:
            assert parameter.default is inspect.Parameter.empty, name


def test_every_public_name_has_a_row() -> None:
    known = rows()
    for module in ("amp", "fp16_utils", "optimizers", "parallel"):
        for name in resolved(module).__all__:
            assert f"{module}.{name}" in known, name
    for function in ("amp.initialize", "amp.scale_loss", "amp.init", "amp.scaler.LossScaler"):
        for word in inspect.signature(resolved(function)).parameters:
            assert any(row.startswith(f"{function}({word}") for row in known), (function, word)
    listed = inspect.signature(apex.parallel.DistributedDataParallel).parameters
    assert all(
        any(row.startswith(f"parallel.DistributedDataParallel({w}") for row in known) for w in listed if w != "module"
    )


def test_every_problem_has_a_row_and_a_test_of_its_number() -> None:
    problems = re.findall(r"^\| P(\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    tests = (Path(__file__).parent / "test_pains.py").read_text(encoding="utf-8")
    assert list(map(int, problems)) == list(range(1, 20))
    assert [number for number in problems if f"def test_p{number}_" not in tests] == []


def test_the_snippets_of_the_page_run_and_keep_their_promise() -> None:
    try:
        assert run_page(PAGE) == 1
    finally:
        importlib.import_module("halfstep.compat.apex.amp.handle").close_casts()
