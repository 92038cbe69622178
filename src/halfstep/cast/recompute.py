"""Recomputation: what a backward pass computes again follows the rules of the region it ran in first.

Activation checkpointing runs a function a second time in the backward pass, when the region is closed. torch's autocast
state it brings back by itself, and bound modules open their region themselves; operators called directly in the
checkpointed function would have no rules. So the mode of a training step's region lies on torch's stack during its
backward pass. Its rules hold where autocast is on (`RuleMode.active`), and there that is in recomputations alone.

On a CUDA device the engine runs the backward pass in a thread of its own, into which torch brings the stack of modes
and in which no region is open; `mode_here` finds the mode there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import _pop_mode, _push_mode

from halfstep.cast.recipe import Recipe, pop_below, push_below
from halfstep.cast.state import STATE

__all__ = ["backward", "recomputing"]


def backward(recipe: Recipe, loss: Tensor, seed: Tensor) -> None:
    """Run ``loss.backward(gradient=seed)``; what is computed again on the way follows `recipe`."""
    if type(loss) is not Tensor or not _needed(recipe):
        loss.backward(gradient=seed)
        return
    with recomputing(recipe):  # Tensor.backward would report itself to the mode, which then sees nothing inside
        _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def recomputing(recipe: Recipe) -> Iterator[None]:
    """Let what a backward pass in this block computes again follow `recipe`."""
    mode, state = recipe.mode, STATE
    if mode is None or not _needed(recipe):
        yield
        return
    above = state.above
    _push_mode(mode) if above is None else push_below(above, mode)
    state.mode = mode
    try:
        yield
    finally:
        state.mode = None
        _pop_mode() if above is None else pop_below(above)
        state.casts.clear()


def _needed(recipe: Recipe) -> bool:
    """Return whether the region has rules, and none is open here: one around a backward pass holds as it is."""
    if recipe.mode is None or STATE.mode is not None or STATE.frames:
        return False
    return not any(torch.is_autocast_enabled(device) for device, _, _ in recipe.devices)
