"""Ledger: every block of memory that a traced step allocates and frees, in order, and the parts that blocks are of.

A block's end is noticed when its storage dies. From the list of events the sums of each part are computed at any point
of the step, once it is known what each block was for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.torch_private.devices import storage_key

PARTS = (
    "parameters", "precise values", "buffers", "optimizer state", "low copies", "gathered parameters", "gradients",
    "saved for backward", "communication", "batch", "temporaries",
)  # fmt: skip
"""What memory is for.

parameters: as the model holds them, low ones under `params="low"`; precise values: what is kept behind low parameters;
buffers: of the model, with the copies that a step makes to restore them; low copies: casts of parameters;
gathered parameters: whole ones, while a sharded model computes with them; communication: buffers of collectives;
gradients: of parameters; saved for backward: made in a forward pass and alive when the backward pass begins, or made
again by checkpointing; batch: the step's inputs; temporaries: the rest.
"""

PHASES = ("forward", "backward", "update")


class PlanError(hs.HalfstepError, RuntimeError):
    """A step that cannot be planned: it needs values, which a plan has none of, or its arguments do not fit."""


@dataclass(slots=True)
class Block:
    """One block of memory."""

    bytes: int  # as the device's allocator hands it out
    dtype: torch.dtype  # of the first tensor in it
    module: str  # dotted name of the module whose operator made it
    operator: str
    phase: str  # when it was made: "setup", or one of `PHASES`
    part: str = ""  # one of `PARTS`; "" until known
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a phase of a step."""

    event: int  # how many events came before
    operators: int  # how many operators came before
    step: int  # its number, from 0; -1 before the first
    phase: str  # "setup", or one of `PHASES`


class Ledger:
    """Blocks and events; `granule` is the bytes to whose multiples the allocator rounds."""

    def __init__(self, granule: int = 1) -> None:
        self.blocks: list[Block] = []  # in the order of their allocation
        self.events: list[int] = []  # n: block n was allocated; ~n: it was freed
        self.times: list[int] = []  # number of operators run before each event
        self.marks: list[Mark] = []  # where phases begin
        self.operators = 0  # number of operators run so far
        self.granule = granule
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address of a storage -> its block, its end

    def mark(self, step: int, phase: str) -> None:
        """Begin a phase."""
        self.marks.append(Mark(len(self.events), self.operators, step, phase))

    def note(self, tensor: Tensor, module: str, operator: str, phase: str) -> Block | None:
        """Note a tensor; return its block if it is new."""
        storage = tensor.untyped_storage()
        key, number = storage_key(storage), len(self.blocks)
        if key in self._living:
            return None
        self._living[key] = number, weakref.ref(storage, lambda _: self._died(key, number))
        self.blocks.append(Block(self._rounded(storage.nbytes()), tensor.dtype, module, operator, phase))
        self._event(number)
        return self.blocks[-1]

    def passing(self, bytes: int, dtype: torch.dtype, module: str, operator: str, phase: str) -> None:
        """Note memory that an operator's kernel takes and gives back while it runs."""
        number = len(self.blocks)
        self.blocks.append(Block(self._rounded(bytes), dtype, module, operator, phase, "temporaries", alive=False))
        self._event(number)
        self._event(~number)

    def of(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor; None for one that is not in memory that was noted."""
        found = self._living.get(storage_key(tensor.untyped_storage()))
        return None if found is None else self.blocks[found[0]]

    def resized(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor may have another size now: as a new block instead of the old one."""
        storage = tensor.untyped_storage()
        key, old = storage_key(storage), self.of(tensor)
        if old is None or old.bytes == self._rounded(storage.nbytes()):
            return
        self._died(key, self._living[key][0])
        self.note(tensor, old.module, old.operator, old.phase)

    def live(self) -> Iterator[Block]:
        """Yield the blocks that are alive."""
        return (self.blocks[number] for number, _ in self._living.values())

    def _rounded(self, bytes: int) -> int:
        return -(-bytes // self.granule) * self.granule

    def _event(self, number: int) -> None:
        self.events.append(number)
        self.times.append(self.operators)

    def _died(self, key: int, number: int) -> None:
        if self._living.get(key, (-1,))[0] == number:
            del self._living[key]
            self.blocks[number].alive = False
            self._event(~number)
