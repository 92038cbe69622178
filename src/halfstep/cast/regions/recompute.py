"""Recomputation: what a checkpoint computes again in the backward pass follows the rules of the region it ran in first.

Activation checkpointing runs a function a second time in the backward pass, when the region is closed. torch restores
autocast's own state for it; the region's mode, and `STATE.bound`, are restored here.

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
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import torch

from halfstep.cast.regions.stack import rules_on
from halfstep.cast.state import STATE
from halfstep.errors import RegionError
from halfstep.torch_private.autograd import (
    RECOMPUTATION_HOOK,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    set_grad_enabled,
    top_saved_tensors_default_hooks,
)

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
