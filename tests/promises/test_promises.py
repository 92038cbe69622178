"""Every field of a policy at every entry point: what is promised is there, or is refused by name.

docs/promises.md has these cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import halfstep as hs
from halfstep.errors import HalfstepError, PolicyError
from tests.promises.entries import ENTRIES, Compiled
from tests.promises.fields import FIELDS, Field, Value
from tests.promises.fronts import Front
from tests.promises.matrix import CELLS, Dropping, cell_of, check
from tests.promises.options import OPTIONS
from tests.promises.page import entry_points, front_ends
from tests.promises.probe import Entry, Facts

pytestmark = pytest.mark.filterwarnings("ignore:policy .* on cpu. this CPU has .* no fp16 units:UserWarning")

COSTLY = "TrainStep, compile"
"""Each of its trainings is compiled: all values by aot_eager, which `make test-slow` runs, and without a backward graph
by `make test-hours`; of each field of `COMPILED` one value runs too, with its mark."""

COMPILED: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "dtype": (pytest.mark.slow,),
    "modules": (pytest.mark.slow,),
    "ops": (),
}


CELL_WORDS = {"works", "refused", "fixed"}


def cases() -> Iterator[object]:
    """Yield every value of a field at every entry; every other one is slow, another one at the next entry."""
    for i, entry in enumerate(ENTRIES):
        for field in FIELDS:
            for number, value in enumerate(field.values):
                marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.slow,) if (i + number) % 2 else ()
                if entry.name == COSTLY:
                    marks = COMPILED.get(field.name, (pytest.mark.hours,)) if number == 1 else (pytest.mark.hours,)
                yield pytest.param(field, entry, value, marks=marks, id=f"{field.name}={value.given}-{entry.name}")
    autograd = Compiled(COSTLY, "aot_eager")  # forward and backward pass traced, as for inductor
    for field in FIELDS:
        for value in field.values:
            name = f"{field.name}={value.given}-{COSTLY} aot"
            yield pytest.param(field, autograd, value, marks=pytest.mark.slow, id=name)


@pytest.mark.parametrize(("field", "entry", "value"), list(cases()))
def test_a_field_is_carried_out_or_refused_by_name(field: Field, entry: Entry, value: Value) -> None:
    check(field, entry, value)


FRONT_CASES = [
    pytest.param(field, front, facts, id=f"{field.name}-{name}-{number}")
    for name, options in OPTIONS.items()
    for field in FIELDS
    for number, (front, facts) in enumerate(options[field.name].cases)
]


@pytest.mark.parametrize(("field", "front", "facts"), FRONT_CASES)
def test_the_options_of_a_front_end_lead_to_what_they_promise(field: Field, front: Front, facts: Facts) -> None:
    with front.around():
        seen = field.see(front, field.base)
    assert {name: seen[name] for name in facts} == facts


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_front_end_differ_in_what_they_promise(name: str) -> None:
    """So that an option which is ignored fails."""
    assert OPTIONS[name].keys() == {field.name for field in FIELDS}
    for options in OPTIONS[name].values():
        promised = [str(sorted(facts.items())) for _, facts in options.cases]
        assert len(set(promised)) == len(promised) and all(facts for _, facts in options.cases)


def test_every_field_of_a_policy_has_a_row() -> None:
    assert [field.name for field in FIELDS] == [field.name for field in dataclasses.fields(hs.Policy)]


def test_cells_are_of_fields_and_entries_that_exist() -> None:
    known = {(field.name, entry.name) for field in FIELDS for entry in ENTRIES}
    assert CELLS.keys() <= known


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


QUICK = {"autocast", "TrainStep"}
TWINS = [  # every field at two entries, and at a third of the others; all pairs are for `make test-hours`
    pytest.param(
        entry,
        field,
        id=f"{entry.name}-{field.name}",
        marks=() if entry.name in QUICK else pytest.mark.hours if (i + j) % 3 else pytest.mark.slow,
    )
    for i, entry in enumerate(ENTRIES)
    for j, field in enumerate(FIELDS)
    if entry.name != COSTLY
]


@pytest.mark.parametrize(("entry", "field"), TWINS)
def test_a_field_that_is_lost_on_the_way_in_is_noticed(field: Field, entry: Entry) -> None:
    """The twin with a seeded fault."""
    cell = cell_of(field, entry)
    if cell.instead is not None or cell.elsewhere:
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


# ------------------------------------------------------------------ the page


def test_no_cell_of_the_page_is_empty() -> None:
    for block in (entry_points(), front_ends()):
        rows = block.partition("\n\n")[0].splitlines()[2:]
        assert len(rows) == len(FIELDS)
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert all(cell.partition(" (")[0] in CELL_WORDS for cell in cells[1:]), row


# ------------------------------------------------------------------ what the matrix does not reach


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"norms": "low"}, "norms='low' is the format of norms beside low parameters"),
        ({"master": "split"}, "master='split' is what stands behind low parameters"),
        ({"params": "low", "master": "none", "grads": "fp32"}, "grads='fp32' under master='none'"),
        ({"params": "low", "master": "none", "state": "low"}, "state='low' rounds the fp32 states of an optimizer"),
        ({"params": "low", "dtype": "fp16", "master": "split"}, "master='split' keeps the lower halves"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, str], says: str) -> None:
    policy = hs.Policy(dtype="bf16").replace(**fields)
    with pytest.raises(PolicyError, match=says):
        hs.prepare(torch.nn.Linear(2, 2), policy=policy)


def test_a_policy_resolved_to_fp32_can_be_given_again() -> None:
    """Where everything stays fp32, the fields about low parameters are put back too."""
    model = torch.nn.Linear(2, 2)
    policy = hs.resolve(hs.Policy.of("pure", dtype="fp32"), model).policy
    hs.prepare(model, policy=policy)
    assert policy.norms == "fp32" and model.weight.dtype is torch.float32
