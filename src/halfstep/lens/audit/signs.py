"""Signs: what an operator can do wrong that its error alone does not show: one-hot softmaxes, terms that vanish."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.lens.audit.rows import Tally

__all__ = ["note_signs"]

NEAR_ONE = 2.0**-12
"""A number of fp32 this far below 1 is not yet 1: fp16 and bf16 may say it is."""


def note_signs(
    tally: Tally, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, wide: Tensor
) -> None:
    """Look at the result of one call in a low format.

    Args:
        tally: of its activation.
        op: public short name of the operator.
        args: what it was given.
        kwargs: the same by name.
        output: its result.
        wide: that of its shadow.
    """
    if op in {"softmax", "sigmoid", "tanh"}:
        _saturation(tally, op, output.detach(), wide, _dim(args, kwargs))
    elif op in {"add", "sub"} and output.requires_grad and output.numel() > 1:
        _swallowed_addends(tally, output.detach(), args)


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the dimension of a softmax; -1 where it is not said."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if isinstance(dim, int) else -1


def _saturation(tally: Tally, op: str, output: Tensor, wide: Tensor, dim: int) -> None:
    """Count what the format alone makes 1: rows of a softmax, elements of a sigmoid or tanh.

    A softmax is one-hot if a probability is 1 that is not in fp32, or if all others are 0 that are not.
    """
    if op == "softmax" and output.dim():
        found, wanted = output.amax(dim), wide.amax(dim)
        alone = ((output != 0).sum(dim) == 1) & ((wide != 0).sum(dim) > 1)
        hit = ((found == 1) & (wanted < 1 - NEAR_ONE)) | alone
    else:
        found, wanted = output.abs(), wide.abs()
        hit = (found == 1) & (wanted < 1 - NEAR_ONE)
    tally.saturated += int(hit.sum())
    tally.rows += found.numel()


NOTABLE = 0.1
"""Share of a sum's elements below which nobody looks at what is lost."""

MASK = -1e4
"""What is added from here down hides its place on purpose."""


def _swallowed_addends(tally: Tally, output: Tensor, args: tuple[Any, ...]) -> None:
    """Count elements of a sum that are exactly one of its terms although the other is not zero.

    Of the two terms the one counts that loses more of its size. A term that is computed from the other alone, such as
    that of a series, says nothing new, and may be lost.
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
    if lost[2]:
        tally.swallowed_mass, tally.mass = tally.swallowed_mass + lost[0], tally.mass + lost[1]
        tally.swallowed, tally.moved = tally.swallowed + lost[2], tally.moved + lost[3]
    else:
        tally.mass += float(torch.linalg.vector_norm(terms[1].detach().float(), 1))
        tally.moved += output.numel()


def _follows(term: Tensor, other: Tensor) -> bool:
    """Return whether everything that `term` depends on with a gradient goes through `other`."""
    if term.grad_fn is None or other.grad_fn is None:
        return False
    seen, todo = {other.grad_fn}, [term.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            return False
        todo += [following for following, _ in node.next_functions if following is not None]
    return True
