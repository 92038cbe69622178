"""docs/pains.md and the tests say the same."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.pains.libraries import HALFSTEP, TORCH
from tests.pains.pain import REGISTRY, Pain, pain

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "pains.md"
STATUSES = {"cured", "partly", "later", "not ours"}


def rows() -> dict[int, tuple[str, str, list[str]]]:
    """Return number -> (status, what halfstep does, tests) of the table; fails on a number that comes twice."""
    found: dict[int, tuple[str, str, list[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d+ \|", line):
            number, text, status, cure, tests = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert int(number) not in found and text
            found[int(number)] = (status, cure, re.findall(r"`([^`]+)`", tests))
    return found


def registered() -> dict[int, list[Pain]]:
    """Return number -> tests, of all files of this folder."""
    for file in sorted(HERE.glob("test_*.py")):
        if file.stem != "test_page":
            importlib.import_module(f"tests.pains.{file.stem}")
    found: dict[int, list[Pain]] = {}
    for test in REGISTRY.values():
        found.setdefault(test.number, []).append(test)
    return found


def test_there_is_one_row_for_each_of_the_44_in_order() -> None:
    assert list(rows()) == list(range(1, 45))


def test_each_row_names_the_tests_there_are_and_its_status_follows_from_them() -> None:
    tests = registered()
    for number, (status, cure, named) in rows().items():
        mine = tests.pop(number, [])
        assert named == [test.test for test in mine], number
        assert status in STATUSES and cure, number
        pending = [test.test for test in mine if test.pending]
        proofs = [test.test for test in mine if not test.pending and not test.torch_cured]
        if status == "cured":
            assert proofs and not pending, number
        elif status == "partly":
            assert proofs and "Open:" in cure, number
        else:
            assert not proofs, number
    assert not tests


def test_the_page_counts_its_rows() -> None:
    counts = [status for status, _, _ in rows().values()]
    said = re.search(
        r"Of the 44, (\d+) are cured, (\d+) partly, (\d+) comes? later and (\d+) are not ours",
        PAGE.read_text(encoding="utf-8"),
    )
    assert said is not None
    assert [int(n) for n in said.groups()] == [counts.count(s) for s in ("cured", "partly", "later", "not ours")]
    assert counts.count("cured") >= 25


def test_a_pain_that_torch_does_not_have_is_not_taken_for_one() -> None:
    def body(amp: object) -> None:
        assert amp is HALFSTEP, "the symptom"

    def painless(amp: object) -> None: ...

    known = dict(REGISTRY)
    try:
        right = pain(1, torch_fails_with=AssertionError, saying="the symptom")(body)
        other = pain(1, torch_fails_with=AssertionError, saying="something else")(body)
        absent = pain(1, torch_fails_with=AssertionError, saying="the symptom")(painless)
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)
    right(HALFSTEP), right(TORCH)
    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        other(TORCH)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        absent(TORCH)
    with pytest.raises(ValueError, match="say what the symptom's text is"):
        pain(1, torch_fails_with=AssertionError)
