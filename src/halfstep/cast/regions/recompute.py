"""Recomputation: what is computed again in a backward pass follows the rules of the region it ran in first.

Activation checkpointing runs a function a second time in the backward pass, when the region is closed. torch restores
autocast's own state for it; the region's mode, and `STATE.bound`, are restored here. So here are the functions that put
the rules of a region on torch's stack of function modes and remove them, in a region and without one. An instrument
that handles operators as they are called (`STATE.above`) stays above the modes of all regions; while it handles an
operator it is off the stack. Regions without such an instrument push and pop by themselves (`opening`).

Note [checkpoints]: torch.utils.checkpoint keeps the function it will run again where the forward pass can find it, and
there it is replaced by one that runs it in the region of the time (`_Again`); no function of torch is. Without re-entry
torch pushes hooks for saved tensors around the function, and the closure of the hooks holds the checkpoint's frame with
its `recompute_fn`. Hooks nest, so all are examined when the topmost is new. With re-entry the function is kept by the
node of the graph, `CheckpointFunction`'s `ctx`, which is found when that switches gradients off: torch reports this to
modes. Both are looked for where the region begins to matter: at the first operator with a rule, and before a region is
opened inside the function.

Note [simulated formats]: a region that simulates a format has autocast on with fp32. For the recomputation torch makes
a `torch.autocast` of that state, which on a CPU warns and is off. So the checkpoint is made to keep "off", and the
function that runs inside that object switches autocast on (`_switched_on`).

Note [other recomputation]: what else restores autocast's state in a backward pass (`custom_bwd`, checkpointing of other
libraries) reports it to no mode. For these the mode of a training step's region is on torch's stack during its backward
pass. Its rules hold where autocast is on (`RuleMode.active`), and there that is in recomputations alone. On a CUDA
device the engine runs the backward pass in a thread of its own, into which torch copies the stack of modes and in which
no region is open; `mode_here` finds the mode there.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, repeat, starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.cast.state import STATE
from halfstep.errors import RegionError
from halfstep.torch_private.autograd import (
    RECOMPUTATION_HOOK,
    engine_run_backward,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    set_grad_enabled,
    top_saved_tensors_default_hooks,
)
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

SET_GRAD_ENABLED: Callable[..., Any] = set_grad_enabled
"""What `CheckpointFunction` calls, by way of `torch.no_grad`, just before it runs its function."""

CHECKPOINTS = "torch.utils.checkpoint"
NEAR = 16  # frames between that call and CheckpointFunction's: no_grad's two, and two or three for each mode above
KEPT = ("device_type", "device_autocast_kwargs", "cpu_autocast_kwargs")  # variables of `recompute_fn`
ONCE = ((),)

saved_tensor_hooks: Callable[[bool], Any] = top_saved_tensors_default_hooks
"""Return the topmost (pack, unpack) hooks for saved tensors, or None; its argument: whether also while tracing."""


class _Again:
    """A checkpointed function that runs in the region it ran in first; torch brings autocast's own state back."""

    __slots__ = ("bound", "function", "mode")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.mode, self.bound = function, STATE.mode, STATE.bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with rules_on(self.mode, self.bound):
            return self.function(*args, **kwargs)


again_in_region = _Again.__call__


def _switched_on(function: Callable[..., Any], *kept: tuple[str, dict[str, Any] | None]) -> Callable[..., Any]:
    """Return what a checkpoint is to run again: `function`, with autocast on if the region simulates a format."""
    if STATE.mode is None or STATE.mode.how.simulated is None:
        return function
    devices = []
    for device, state in kept:
        if state is not None and state["enabled"]:
            state["enabled"] = False
            devices.append(device)

    def again(*args: Any, **kwargs: Any) -> Any:
        before = [(device, torch.is_autocast_enabled(device)) for device in devices]
        try:
            for device in devices:  # torch has entered a region in fp32, which is off
                torch.set_autocast_enabled(device, True)
            return function(*args, **kwargs)
        finally:
            for device, on in before:
                torch.set_autocast_enabled(device, on)

    return again


def mark_checkpoints(func: Callable[..., Any] | None = None) -> None:
    """Make the checkpoints whose functions run now run them again in the region that is open; note [checkpoints]."""
    if func is SET_GRAD_ENABLED:
        _mark_entered()
    hooks = saved_tensor_hooks(True)
    if hooks is not None and (STATE.marked is None or STATE.marked() is not hooks[0]):
        with no_saved_tensor_hooks() as found:
            pass
        for pack, _ in found:
            _mark_frame(pack)
        STATE.marked = weakref.ref(hooks[0])


@contextmanager
def no_saved_tensor_hooks() -> Iterator[list[Any]]:
    """Take all hooks for saved tensors, (pack, unpack), off in a block, which gets them, the topmost first."""
    found: list[Any] = []
    taken: list[None] = []  # counted by the call that pops, which no signal divides
    try:
        while (hooks := saved_tensor_hooks(True)) is not None:
            found.append(hooks)
            taken.extend(starmap(pop_saved_tensors_default_hooks, ONCE))
        yield found
    finally:
        while taken:
            push_saved_tensors_default_hooks(*found[len(taken) - 1])
            taken.pop()


def _mark_frame(pack: Callable[..., Any]) -> None:
    """Set the region of the checkpoint without re-entry whose hook is `pack`, if it has none."""
    if getattr(pack, "__module__", "") != CHECKPOINTS or RECOMPUTATION_HOOK in getattr(pack, "__qualname__", ""):
        return  # hooks of others, or of a recomputation
    for cell in getattr(pack, "__closure__", None) or ():
        frame = cell.cell_contents
        if callable(getattr(frame, "recompute_fn", None)):
            if not isinstance(frame.recompute_fn, _Again):
                again = frame.recompute_fn
                if STATE.mode is not None and STATE.mode.how.simulated is not None:
                    cells = dict(zip(again.__code__.co_freevars, again.__closure__, strict=True))
                    if not cells.keys() >= {"fn", *KEPT}:
                        break
                    fn, (device, of_device, of_cpu) = cells["fn"], (cells[name].cell_contents for name in KEPT)
                    fn.cell_contents = _switched_on(fn.cell_contents, (device, of_device), ("cpu", of_cpu))
                frame.recompute_fn = _Again(again)
            return
    raise RegionError(
        f"torch {torch.__version__} keeps the function of a checkpoint elsewhere than the versions this release "
        "supports, so its recomputation could not follow the policy; checkpoint modules of a model under hs.prepare "
        "instead, or use use_reentrant=True"
    )


def _mark_entered() -> None:
    """Set the region of the checkpoint with re-entry that is about to run its function."""
    frame: Any = sys._getframe(2)
    for _ in range(NEAR):
        if frame is None:
            return
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == CHECKPOINTS:
            node = frame.f_locals.get("ctx")
            function = getattr(node, "run_function", None)
            if function is None:
                raise RegionError(
                    f"torch {torch.__version__} keeps the function of a reentrant checkpoint elsewhere than the "
                    "versions this release supports, so its recomputation could not follow the policy; use "
                    "use_reentrant=False"
                )
            if not isinstance(function, _Again):
                of_device = node.device_type, node.device_autocast_kwargs
                node.run_function = _Again(_switched_on(function, of_device, ("cpu", node.cpu_autocast_kwargs)))
            return
        frame = frame.f_back


# ------------------------------------------------------------------ torch's stack of function modes


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
