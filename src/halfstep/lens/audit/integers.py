"""Integers: numbers that are made of floating ones and choose others: buckets, bins, cells of a grid.

Where the digits of a low format decide which integer comes out, another row of a table is chosen than in fp32. What is
at fault is neither the table nor the conversion, but what the integer was made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.lens.audit.rows import Tally
from halfstep.lens.audit.watch import is_index, tensors_in

__all__ = ["Integers", "place"]


def place(tensor: Tensor) -> int:
    """Return the address of the memory of `tensor`."""
    return tensor.untyped_storage().data_ptr()


class Integers:
    """Follows integers from the conversion that makes them to what they choose, in one step."""

    def __init__(self) -> None:
        self._makers: dict[int, Tally] = {}
        # place -> tensor, kept so that its memory is not given to another; whose numbers it is made of; how many differ
        self._known: dict[int, tuple[Tensor, Tally, int, int]] = {}
        self._counted: set[int] = set()

    def made(self, output: Tensor, tally: Tally) -> None:
        """Note that the numbers of `output` are those of `tally`."""
        self._makers[place(output)] = tally

    def converted(self, source: Any, result: Tensor, wanted: Tensor | None) -> None:
        """Compare integers that have been made of `source` with those of the fp32 run."""
        dense = isinstance(source, Tensor) and source.layout is torch.strided and result.layout is torch.strided
        if not dense or wanted is None or wanted.shape != result.shape or not result.numel():
            return
        tally = self._makers.get(place(source)) if source.is_floating_point() else None
        if tally is not None:
            self._known[place(result)] = result, tally, int((result != wanted).sum()), result.numel()

    def follow(self, values: Any, result: Any) -> None:
        """Follow integers through an operator on integers."""
        if self._known and isinstance(result, Tensor) and result.layout is torch.strided and is_index(result):
            for tensor in tensors_in(values):
                known = self._known.get(place(tensor)) if tensor.layout is torch.strided else None
                if known is not None:
                    self._known.setdefault(place(result), (result, *known[1:]))

    def choose(self, given: Iterable[Tensor]) -> None:
        """Count integers that choose floating numbers, once."""
        for tensor in given if self._known else ():
            known = self._known.get(place(tensor)) if tensor.layout is torch.strided and is_index(tensor) else None
            if known is not None and place(tensor) not in self._counted:
                self._counted.add(place(tensor))
                _, tally, others, count = known
                tally.otherwise, tally.decided = tally.otherwise + others, tally.decided + count
