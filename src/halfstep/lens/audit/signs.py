"""Signs: faults of an operator that its error alone does not show.

Softmaxes that only the format made one-hot, terms that vanish in a sum, and integers made of floating numbers (buckets,
bins, cells of a grid) that come out otherwise than in fp32. Each is counted in the `Tally` of the operator to blame.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.lens.audit.rows import Tally
from halfstep.lens.calls import place, weak_storage
from halfstep.trees import graph_of, tensors

SUMS = frozenset({"add", "sub"})
"""Operators of two terms: one may be too small for the other, or a mask that is written onto it."""

NEAR_ONE = 2.0**-12
"""A number of fp32 this far below 1 is not yet 1; in fp16 and bf16 it may be."""


def is_index(tensor: Tensor) -> bool:
    """Return whether `tensor` holds integers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def note_signs(
    tally: Tally, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, wide: Tensor
) -> None:
    """Count in `tally` the faults in `output`, the result of one call in a low format; `wide` is its shadow's."""
    if op in {"softmax", "sigmoid", "tanh"}:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        _saturation(tally, op, output.detach(), wide, dim if isinstance(dim, int) else -1)
    elif op in SUMS and output.requires_grad and output.numel() > 1:
        _swallowed_addends(tally, output.detach(), args)


def _saturation(tally: Tally, op: str, output: Tensor, wide: Tensor, dim: int) -> None:
    """Count what the format alone makes 1: rows of a softmax, elements of a sigmoid or tanh.

    A softmax is one-hot if a probability is 1 that is not in fp32, or if all others are 0 that are not.
    """
    rows = op == "softmax" and output.dim() > 0
    found, wanted = (output.amax(dim), wide.amax(dim)) if rows else (output.abs(), wide.abs())
    hit = (found == 1) & (wanted < 1 - NEAR_ONE)
    if rows:
        hit |= ((output != 0).sum(dim) == 1) & ((wide != 0).sum(dim) > 1)
    tally.add_share("saturated", int(hit.sum()), found.numel())


NOTABLE = 0.1
"""In a smaller share of a sum's elements a lost term is not counted."""

MASK = -1e4
"""A term from here down is a mask."""


def _swallowed_addends(tally: Tally, output: Tensor, args: tuple[Any, ...]) -> None:
    """Count elements of a sum that are exactly one of its terms although the other is not zero.

    Of the two terms the one counts that loses more of its size. A term that is computed from the other alone, such as
    that of a series, carries no new information and may be lost.
    """
    terms = [a for a in args[:2] if isinstance(a, Tensor) and a.is_floating_point() and a.numel() > 1]
    if len(terms) < 2:
        return
    lost: tuple[float, float, int, int] = (0.0, 1.0, 0, 1)
    size = output.abs()
    for term, other in (terms, terms[::-1]):
        low, rest = term.detach(), other.detach()
        same = size == rest.abs()
        if int(torch.count_nonzero(same)) < NOTABLE * output.numel() or _follows(term, other):
            continue
        counts = ((low != 0) & (rest > MASK) & rest.isfinite()).expand_as(output)
        gone = counts & same
        sizes = low.float().abs().nan_to_num_(0.0, 0.0, 0.0).expand_as(output)
        mass = float((sizes * counts).sum())
        found = float((sizes * gone).sum()), mass, int(gone.sum()), int(counts.sum())
        if mass and found[0] / mass >= lost[0] / lost[1]:
            lost = found
    if not lost[2]:
        lost = (0.0, float(torch.linalg.vector_norm(terms[1].detach().float(), 1)), 0, output.numel())
    tally.add_share("swallowed_mass", lost[0], lost[1])
    tally.add_share("swallowed", lost[2], lost[3])


def _follows(term: Tensor, other: Tensor) -> bool:
    """Return whether everything that `term` depends on with a gradient goes through `other`."""
    known = term.grad_fn is not None and other.grad_fn is not None
    return known and not any(node.name().endswith("AccumulateGrad") for node in graph_of(term, without=other))


class Integers:
    """Follows integers from the conversion that makes them to what they choose, in one step."""

    def __init__(self) -> None:
        self._makers: dict[StorageWeakRef, Tally] = {}
        # place -> tensor, kept so that its memory is not given to another; whose numbers it is made of; how many differ
        self._known: dict[int, tuple[Tensor, Tally, int, int]] = {}
        self._counted: set[int] = set()

    def made(self, output: Tensor, tally: Tally) -> None:
        """Note that the numbers of `output` are those of `tally`."""
        self._makers[weak_storage(output)] = tally

    def converted(self, source: Any, result: Tensor, wanted: Tensor | None) -> None:
        """Compare integers that have been made of `source` with those of the fp32 run."""
        dense = isinstance(source, Tensor) and source.layout is torch.strided and result.layout is torch.strided
        if not dense or wanted is None or wanted.shape != result.shape or not result.numel():
            return
        tally = self._makers.get(weak_storage(source)) if source.is_floating_point() else None
        if tally is not None:
            self._known[place(result)] = result, tally, int((result != wanted).sum()), result.numel()

    def follow(self, values: Any, result: Any) -> None:
        """Follow integers through an operator on integers."""
        if self._known and isinstance(result, Tensor) and result.layout is torch.strided and is_index(result):
            for tensor in tensors(values):
                known = self._known.get(place(tensor)) if tensor.layout is torch.strided else None
                if known is not None:
                    self._known.setdefault(place(result), (result, *known[1:]))

    def choose(self, given: Iterable[Tensor]) -> None:
        """Count integers that choose floating numbers, once."""
        for tensor in given if self._known else ():
            known = self._known.get(place(tensor)) if tensor.layout is torch.strided and is_index(tensor) else None
            if known is not None and place(tensor) not in self._counted:
                self._counted.add(place(tensor))
                known[1].add_share("otherwise", *known[2:])
