"""Every field of a policy at every entry point: what is promised is there, or is refused by name.

docs/promises.md prints these cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import halfstep as hs
from halfstep.errors import HalfstepError
from tests.promises.entries import ENTRIES
from tests.promises.fields import FIELDS, Field, Value
from tests.promises.matrix import CELLS, PENDING, Dropping, cell_of, check
from tests.promises.probe import Entry

pytestmark = pytest.mark.filterwarnings("ignore:policy .* on cpu. this CPU has .* no fp16 units:UserWarning")

COSTLY = "TrainStep, compile"
"""Each of its trainings is compiled; the default run checks one value of each field that is not the default."""


def cases() -> Iterator[object]:
    for entry in ENTRIES:
        for field in FIELDS:
            for number, value in enumerate(field.values):
                marks: list[object] = []
                if (field.name, entry.name) in PENDING and fails(field, entry, value):
                    marks.append(pytest.mark.xfail(strict=True, reason=PENDING[field.name, entry.name]))
                if entry.name == COSTLY and number != 1:
                    marks.append(pytest.mark.slow)
                yield pytest.param(field, entry, value, marks=marks, id=f"{field.name}={value.given}-{entry.name}")


def fails(field: Field, entry: Entry, value: Value) -> bool:
    """Return whether it is this value that a pending cell does not keep."""
    return cell_of(field, entry).refuses(field, value) if field.name == "reduce" else value.given == "fp32"


@pytest.mark.parametrize(("field", "entry", "value"), list(cases()))
def test_a_field_is_carried_out_or_refused_by_name(field: Field, entry: Entry, value: Value) -> None:
    check(field, entry, value)


def test_every_field_of_a_policy_has_a_row() -> None:
    assert [field.name for field in FIELDS] == [field.name for field in dataclasses.fields(hs.Policy)]


def test_cells_are_of_fields_and_entries_that_exist() -> None:
    known = {(field.name, entry.name) for field in FIELDS for entry in ENTRIES}
    assert CELLS.keys() <= known and PENDING.keys() <= known


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_cell_can_fail(entry: Entry) -> None:
    """A cell whose values promise the same facts, none of them refused, would not notice that the field is ignored."""
    for field in FIELDS:
        cell = cell_of(field, entry)
        outcomes = {
            "refused" if cell.refuses(field, value) else str(sorted(cell.promised(value).items()))
            for value in field.values
        }
        assert len(outcomes) > 1 or cell.instead is not None or outcomes == {"refused"}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.name != COSTLY], ids=lambda entry: entry.name)
def test_a_field_that_is_lost_on_the_way_in_is_noticed(field: Field, entry: Entry) -> None:
    """The twin with a seeded fault."""
    cell = cell_of(field, entry)
    if (field.name, entry.name) in PENDING or cell.instead is not None or cell.elsewhere:
        pytest.skip("what is said here does not depend on this field")
    noticed = 0
    for value in field.values:
        try:
            check(field, Dropping(entry, field.name), value)
        except (AssertionError, HalfstepError, pytest.fail.Exception):
            noticed += 1
    assert noticed


def test_compiled_cells_notice_a_lost_field_too() -> None:
    """One field stands for the others, which take a compilation each."""
    entry = next(entry for entry in ENTRIES if entry.name == COSTLY)
    field = next(field for field in FIELDS if field.name == "ops")
    with pytest.raises(AssertionError):
        check(field, Dropping(entry, "ops"), field.values[1])
    torch._dynamo.reset()
