"""The promise matrix: every field of a policy x every entry point. A cell works or is refused; there is no third state.

*works*: for every value of the field the facts are the promised ones, which differ from value to value, so that the
check fails where the field is ignored. *refused*: a `HalfstepError` that names the field. *fixed*: the entry point has
nothing that the field speaks of; what it does instead is written in the cell and checked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import halfstep as hs
from halfstep.errors import HalfstepError
from tests.promises.entries import ENTRIES
from tests.promises.fields import BF16, Field, Value
from tests.promises.probe import Entry, Facts

__all__ = ["CELLS", "Cell", "Dropping", "cell_of", "check"]


@dataclass(frozen=True)
class Cell:
    """One field at one entry point.

    Attributes:
        refused: values that are refused; None: all but the default.
        says: what the error's text matches; by default ``field=``.
        base: the policy in which refused values are set, where that is not the field's.
        facts: which facts count; None: all that the field promises.
        instead: what is there for every value, where the entry point has nothing that the field speaks of.
        elsewhere: whether it is another field, without which this one means nothing, that is refused.
        mostly: whether the page calls it refused although some values are not; the words name them.
        words: what the page says beside "works" or "refused".
    """

    refused: tuple[Any, ...] | None = ()
    says: str = ""
    base: hs.Policy | None = None
    facts: tuple[str, ...] | None = None
    instead: Facts | None = None
    elsewhere: bool = False
    mostly: bool = False
    words: str = ""

    def refuses(self, field: Field, value: Value) -> bool:
        """Return whether `value` is refused here."""
        if self.refused is None:
            return value is not field.values[0]
        return value.given in self.refused

    def promised(self, value: Value) -> Facts:
        """Return the facts that `value` promises here."""
        if self.instead is not None:
            return self.instead
        return {name: fact for name, fact in value.facts.items() if self.facts is None or name in self.facts}

    def text(self) -> str:
        """Return what the page says of this cell."""
        if self.instead is not None:
            return f"fixed: {self.words}"
        if self.refused is None or self.elsewhere or self.mostly:
            return f"refused: {self.words}"
        return f"works; {self.words}" if self.words else "works"


WORKS = Cell()
NO_MODEL = Cell(refused=None, base=BF16, facts=(), words="a region has no model")
SHARDED = ("shard", "shard, own loop")
ALONE = Cell(instead={"summed": "nothing"}, words="one process sums nothing across processes")
OWN_AVERAGES = "what is not the parameters' own format, in which DistributedDataParallel averages; TrainStep can"
OWN_SCALE = Cell(facts=("scale",), words="the scaler that `prepare` returns")

CELLS: Mapping[tuple[str, str], Cell] = {
    **{(field, "autocast"): NO_MODEL for field in ("params", "norms", "grads", "modules", "inputs", "state")},
    ("master", "autocast"): dataclasses.replace(
        NO_MODEL, refused=("master", "split", "kahan", "stochastic"), mostly=True
    ),
    ("outputs", "autocast"): Cell(instead={"output": "bf16"}, words="a block has no outputs; results stay as computed"),
    ("scale", "autocast"): Cell(
        refused=(4096.0, "megengine"),
        facts=(),
        mostly=True,
        words="a region sees no loss (`auto` and `none` are accepted)",
    ),
    ("scale", "prepare, own loop"): OWN_SCALE,
    ("dtype", "TrainStep, compile"): Cell(
        refused=("fp8_e4m3",), says="fp8_e4m3.*simulated", words="simulated formats are refused"
    ),
    **{
        ("grads", name): Cell(
            refused=("fp32",),
            says="grads='fp32' over low parameters",
            words="`fully_shard` accumulates in the format of the parameter",
        )
        for name in SHARDED
    },
    **{
        ("scale", name): Cell(instead={"scale": 1.0}, words="`prepare` without an optimizer makes no scaler")
        for name in ("prepare, optimizer later", "DDP, own loop", "shard, own loop")
    },
    **{("reduce", entry.name): ALONE for entry in ENTRIES},
    ("reduce", "autocast"): NO_MODEL,
    ("reduce", "DDP"): WORKS,
    **{
        (field, "DDP, own loop"): Cell(refused=refused, mostly=True, words=OWN_AVERAGES)
        for field, refused in (("reduce", ("fp32", "low")), ("grads", ("fp32",)))
    },
}
"""Every cell that does not simply work."""


def cell_of(field: Field, entry: Entry) -> Cell:
    """Return the cell of `field` at `entry`."""
    return CELLS.get((field.name, entry.name), WORKS)


@cache
def _seen(see: Callable[[Entry, hs.Policy], Facts], entry: Entry, policy: hs.Policy) -> Facts:
    """Return what `see` observes; defaults of several fields are one policy."""
    return see(entry, policy)


def check(field: Field, entry: Entry, value: Value) -> None:
    """Train with `value` at `entry`: the facts are those promised, or it is refused by name."""
    cell = cell_of(field, entry)
    policy = field.policy(value)
    with entry.around():
        if cell.refuses(field, value):
            if cell.base is not None:
                policy = cell.base.replace(**{field.name: value.given})
            with pytest.raises(HalfstepError) as caught:
                field.see(entry, policy)
            assert re.search(cell.says or f"{field.name}=", str(caught.value)), str(caught.value)
        else:
            if cell.base is not None:
                policy = cell.base.replace(**{field.name: value.given})
            promised = cell.promised(value)
            facts = _seen(field.see, entry, policy)
            assert {name: facts[name] for name in promised} == promised


class Dropping(Entry):
    """A seeded fault: an entry point that loses one field of the policy on the way in."""

    def __init__(self, entry: Entry, field: str) -> None:
        self.entry, self.field = entry, field
        self.name, self.repeats = entry.name, entry.repeats
        self.around, self.watched = entry.around, entry.watched  # type: ignore[method-assign]

    def __call__(self, policy: hs.Policy, job: Any) -> Any:
        """Train `job` without the field."""
        default = {value.name: value for value in hs.Policy.__dataclass_fields__.values()}[self.field].default
        return self.entry(policy.replace(**{self.field: default}), job)
