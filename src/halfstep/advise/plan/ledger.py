"""Ledger: every block of memory that a traced step allocates and frees, in order.

`Ledger.note` is given each tensor an operator returns; a block's end is noticed when its storage dies. From the list of
events the sums of each part are computed at any point of the step, once it is known what each block was for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_private.devices import storage_key

__all__ = ["Block", "Ledger", "Mark"]


@dataclass(slots=True)
class Block:
    """One block of memory.

    Attributes:
        bytes: as the device's allocator hands it out.
        dtype: of the first tensor in it.
        module: dotted name of the module whose operator made it.
        operator: that operator.
        phase: when it was made: "setup", or one of `memory.PHASES`.
        part: one of `memory.PARTS`; "" until known.
        alive: whether it still is.
    """

    bytes: int
    dtype: torch.dtype
    module: str
    operator: str
    phase: str
    part: str = ""
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a phase of a step.

    Attributes:
        event: how many events came before.
        operators: how many operators.
        step: its number, from 0; -1 before the first.
        phase: "setup", or one of `memory.PHASES`.
    """

    event: int
    operators: int
    step: int
    phase: str


class _Death(weakref.ref[Any]):
    """A reference that calls when its storage dies, and knows the block."""

    __slots__ = ("block", "key")

    block: int
    key: int

    def __new__(cls, storage: Any, call: Callable[[Any], None], block: int, key: int) -> _Death:
        self = super().__new__(cls, storage, call)
        self.block, self.key = block, key
        return self

    def __init__(self, storage: Any, call: Callable[[Any], None], block: int, key: int) -> None:
        super().__init__(storage, call)  # type: ignore[call-arg]


class Ledger:
    """Blocks and events.

    Attributes:
        blocks: in the order of their allocation.
        events: n: block n was allocated; ~n: it was freed.
        times: number of operators run before each event.
        marks: where phases begin.
        operators: number of operators run so far.
        granule: bytes to whose multiples the allocator rounds.
    """

    def __init__(self, granule: int = 1) -> None:
        self.blocks: list[Block] = []
        self.events: list[int] = []
        self.times: list[int] = []
        self.marks: list[Mark] = []
        self.operators = 0
        self.granule = granule
        self._deaths: dict[int, _Death] = {}  # by address of the storage

    def close(self) -> None:
        """Notice no more deaths."""
        self._deaths.clear()

    def mark(self, step: int, phase: str) -> None:
        """Begin a phase."""
        self.marks.append(Mark(len(self.events), self.operators, step, phase))

    def note(self, tensor: Tensor, module: str, operator: str, phase: str) -> Block | None:
        """Note a tensor; return its block if it is new."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._deaths:
            return None
        block = Block(self._rounded(storage.nbytes()), tensor.dtype, module, operator, phase)
        number = len(self.blocks)
        self._deaths[key] = _Death(storage, self._died, number, key)
        self.blocks.append(block)
        self._event(number)
        return block

    def passing(self, bytes: int, dtype: torch.dtype, module: str, operator: str, phase: str) -> None:
        """Note memory that an operator's kernel takes and gives back while it runs."""
        number = len(self.blocks)
        self.blocks.append(Block(self._rounded(bytes), dtype, module, operator, phase, "temporaries", alive=False))
        self._event(number)
        self._event(~number)

    def of(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor; None for one that is not in memory that was noted."""
        death = self._deaths.get(storage_key(tensor.untyped_storage()))
        return None if death is None else self.blocks[death.block]

    def resized(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor may have another size now: as a new block instead of the old one."""
        storage = tensor.untyped_storage()
        death = self._deaths.get(storage_key(storage))
        if death is None or self.blocks[death.block].bytes == self._rounded(storage.nbytes()):
            return
        old = self.blocks[death.block]
        self._end(death.block)
        del self._deaths[storage_key(storage)]
        self.note(tensor, old.module, old.operator, old.phase)

    def _rounded(self, bytes: int) -> int:
        return -(-bytes // self.granule) * self.granule

    def _event(self, number: int) -> None:
        self.events.append(number)
        self.times.append(self.operators)

    def _end(self, number: int) -> None:
        self.blocks[number].alive = False
        self._event(~number)

    def _died(self, death: Any) -> None:
        key: int = death.key
        number: int = death.block
        if self._deaths.get(key) is death:
            del self._deaths[key]
            self._end(number)

    def live(self) -> Iterator[Block]:
        """Yield the blocks that are alive."""
        return (self.blocks[death.block] for death in self._deaths.values())
