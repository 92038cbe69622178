"""torch's stack of function modes: how the rules of a region are put on it and removed, in a region and without one.

An instrument that handles operators as they are called (`STATE.above`) stays above the modes of all regions; while it
handles an operator it is off the stack. Regions without such an instrument push and pop by themselves (`opening`).

Note [other recomputation]: what a checkpoint of torch computes again gets its rules from `recompute`. What else
restores autocast's state in a backward pass (`custom_bwd`, checkpointing of other libraries) reports it to no mode.
For these the mode of a training step's region is on torch's stack during its backward pass. Its rules hold where
autocast is on (`RuleMode.active`), and there that is in recomputations alone. On a CUDA device the engine runs the
backward pass in a thread of its own, into which torch copies the stack of modes and in which no region is open;
`mode_here` finds the mode there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, repeat, starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.cast.state import STATE
from halfstep.torch_private.autograd import engine_run_backward
from halfstep.torch_private.modes import (
    current_function_mode_stack,
    get_function_stack_at,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)

if TYPE_CHECKING:
    from halfstep.cast.rules.dispatch import RuleMode
    from halfstep.cast.rules.recipe import Recipe


def push(mode: RuleMode, above: Any) -> None:
    """Put `mode` on top of the stack, but under `above`."""
    modes = [] if above is None else list(current_function_mode_stack())
    if modes and modes[-1] is above:
        restack([*modes[:-1], mode, above])
    else:
        push_on_torch_function_stack(mode)


def remove(mode: RuleMode, others: int = 0) -> None:
    """Remove `mode` from wherever it is now; a second call changes nothing. `others`: regions further out with it."""
    top = len_torch_function_stack() - 1
    if top < 0:
        return
    if not others and get_function_stack_at(top) is mode:
        pop_torch_function_stack()
        return
    modes = list(current_function_mode_stack())
    found = [i for i, other in enumerate(modes) if other is mode]
    if len(found) > others:
        restack([other for i, other in enumerate(modes) if i != found[-1]])


def restack(modes: list[Any]) -> None:
    """Make `modes` the stack, outermost first, in one call of C, which no signal divides."""
    changes = chain(
        starmap(pop_torch_function_stack, repeat((), len_torch_function_stack())),
        map(push_on_torch_function_stack, modes),
    )
    deque(changes, maxlen=0)


# ------------------------------------------------------------------ rules without a region


@contextmanager
def rules_on(mode: RuleMode | None, bound: Any) -> Iterator[None]:
    """Apply the rules of `mode` (None: torch's own lists, or none) in this block; autocast's own state stays."""
    state = STATE
    modes = list(current_function_mode_stack()) if len_torch_function_stack() else []
    outer, above = (state.mode, state.bound), state.above
    pushed = mode if state.mode is not mode or mode not in modes else None
    others = modes.count(mode)
    try:
        state.mode, state.bound = mode, bound
        if pushed is not None:
            push(pushed, above)
        yield
    finally:
        try:
            _end(pushed, others, outer)
        finally:  # again, should Ctrl-C have come in between
            _end(pushed, others, outer)


def _end(pushed: RuleMode | None, others: int, outer: tuple[RuleMode | None, Any]) -> None:
    """Restore the state of the thread; a second call changes nothing."""
    if pushed is not None:
        remove(pushed, others)
    STATE.mode, STATE.bound = outer
    if not STATE.frames:  # as at the end of a region
        STATE.casts.clear()


def backward(recipe: Recipe, loss: Tensor, seed: Tensor, *, keep: bool = False) -> None:
    """Run ``loss.backward(gradient=seed)``; what is computed again on the way follows `recipe`.

    `keep`: the graph stays, for another backward pass.
    """
    if type(loss) is not Tensor or (len_torch_function_stack() and not _needed(recipe)):
        loss.backward(gradient=seed, retain_graph=keep)
        return
    with recomputing(recipe):  # as Tensor.backward, which would report itself to the mode and switch it off
        engine_run_backward((loss,), (seed,), keep, False, (), allow_unreachable=True, accumulate_grad=True)


def recomputing(recipe: Recipe) -> AbstractContextManager[None]:
    """Let what a backward pass in this block computes again follow `recipe`."""
    return rules_on(recipe.mode, STATE.bound) if _needed(recipe) else nullcontext()


def _needed(recipe: Recipe) -> bool:
    """Return whether `recipe` has rules, and no region is open here: one around a backward pass holds as it is."""
    if recipe.mode is None or STATE.mode is not None or STATE.frames:
        return False
    return not any(torch.is_autocast_enabled(device) for device, _, _ in recipe.devices)
