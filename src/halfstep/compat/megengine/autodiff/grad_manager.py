"""megengine.autodiff: `GradManager` over torch's autograd.

torch always records; a manager holds the tensors whose gradients are computed, ends recording, and accumulates into
``.grad``. Backward runs with autocast off, so that its result does not depend on where it is called.

Note [visibility]: as in MegEngine, the gradients of a manager are functions to the managers around it (recorded
earlier, and not in one group with it) and constants to the others. torch has one graph for all: it is made if there is
a manager around, and a hook on each gradient stops the others' backward passes there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

import halfstep as hs
from halfstep.compat.shared import listed
from halfstep.errors import StepError
from halfstep.torch_private.modules import NormBase

__all__ = ["GradManager", "GradManagerGroup"]

Self = TypeVar("Self", bound="GradManagerGroup")

Callback = Callable[[Tensor, Any], Tensor | None]
"""(attached tensor, its gradient of this backward) -> the gradient to accumulate; None: nothing is accumulated, and
further callbacks get None."""

SCALED, UNSCALED = "scaled", "unscaled"
MARK = "_halfstep_gradient"
"""Attribute of a gradient, which adding to it keeps and `clear_grad` drops: `SCALED` or `UNSCALED`, and of one that
waits to be unscaled the scaler's copy of its scale."""


def mark(gradient: Tensor | None, what: str, scale: Tensor | None = None) -> None:
    """Note that `gradient` is `SCALED`, by which `scale`, or `UNSCALED`."""
    setattr(gradient, MARK, (what, scale))


def marked(gradient: Tensor | None, what: str) -> bool:
    """Return whether `gradient` is known to be `SCALED` or `UNSCALED`."""
    return bool(getattr(gradient, MARK, ("", None))[0] == what)


_owners = WeakTensorKeyDictionary()
"""Attached tensor -> the managers it is attached to."""


class _Recording(threading.local):
    def __init__(self) -> None:
        self.groups: list[list[GradManager]] = []  # outer ones first; a manager alone is a group of one


_recording = _Recording()


def nested() -> bool:
    """Return whether managers are recording in one another, in this thread."""
    return len(_recording.groups) > 1


class GradManagerGroup:
    """Managers that record, between ``with`` and `backward`, and go backward together: ``gm1 | gm2``, or one alone."""

    _members: list[GradManager]

    def __init__(self, managers: Iterable[GradManager]) -> None:
        self._members = list(managers)

    def attached_tensors(self) -> list[Tensor]:
        """Return the attached tensors that are still alive, in the order of their attachment."""
        return [tensor for manager in self._members for tensor in manager._attached]

    def record(self) -> None:
        """Begin: `backward` is possible from here on, once.

        Raises:
            StepError: it is recording already.
        """
        if any(manager in group for group in _recording.groups for manager in self._members):
            raise StepError("GradManager.record: it is recording already; use one manager for each nested `with`")
        for manager in self._members:
            manager._hook = register_module_forward_pre_hook(manager._save)
        _recording.groups.append(list(self._members))

    def release(self) -> None:
        """End without gradients; also after `backward`. Nothing happens if it is not recording."""
        for manager in self._members:
            if manager._hook is not None:
                manager._hook.remove()
        groups = [[other for other in group if other not in self._members] for group in _recording.groups]
        _recording.groups = [group for group in groups if group]

    def backward(self, y: Any = None, dy: Any = None) -> None:
        """Accumulate the gradients of `y` into ``.grad`` of the attached tensors that it depends on, and end recording.

        Args:
            y: a tensor or several; None: nothing.
            dy: gradient of each; default ones.

        Raises:
            StepError: not recording (also a second backward), `dy` does not fit `y`, or `y` depends on nothing that has
                a gradient.
        """
        if not any(marked(seed, SCALED) for seed in listed(dy)):
            for tensor in self.attached_tensors():
                if marked(tensor.grad, SCALED):
                    raise StepError(
                        f"GradManager.backward: the gradient of an attached tensor of shape {tuple(tensor.shape)} "
                        "waits to be unscaled, and one that is not scaled would be added to it; go backward with "
                        "scaler.backward(gm, y) too, or unscale and clear it first"
                    )
        if not all(any(manager in group for group in _recording.groups) for manager in self._members):
            raise StepError(
                "GradManager.backward: no computation history; call it once, inside `with gm:` or between record() and "
                "release(), and after the forward pass"
            )
        try:
            _differentiate(self._members, _pairs(y, dy))
        finally:
            self.release()

    def __enter__(self: Self) -> Self:
        self.record()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __or__(self, other: GradManagerGroup) -> GradManagerGroup:
        if not isinstance(other, GradManagerGroup):
            raise StepError(f"gm | {other!r}: expected another GradManager")
        return GradManagerGroup([*self._members, *other._members])


class GradManager(GradManagerGroup):
    """Compute gradients of what happens between `record` (or ``with gm:``) and `backward`.

    Managers nest for higher derivatives: what the inner one puts into ``.grad`` can be differentiated by the outer one.

    Examples:
        >>> gm = GradManager().attach(net.parameters())
        >>> with gm:
        ...     gm.backward(loss_of(net))
    """

    def __init__(self) -> None:
        self._attached = WeakTensorKeyDictionary()  # tensor -> its callbacks
        self._going = False  # whether its backward pass runs
        self._norms: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
        self._hook: RemovableHandle | None = None

    @property
    def _members(self) -> list[GradManager]:  # type: ignore[override]  # no attribute: it would be a circle
        return [self]

    def attach(
        self, tensors: Tensor | Iterable[Tensor], callbacks: Callback | Sequence[Callback] | None = None
    ) -> GradManager:
        """Attach `tensors`, whose gradients `backward` computes; they are not kept alive.

        Args:
            tensors: a floating tensor or several; a parameter, an input or an intermediate result.
            callbacks: called in order as ``gradient = callback(tensor, gradient)`` with the (scaled) gradient of each
                backward, before it is accumulated.

        Returns:
            This manager.

        Raises:
            StepError: something is not a floating tensor; nothing is attached then.
        """
        if not isinstance(tensors, (Tensor, Iterable)):
            raise StepError(f"GradManager.attach: got {tensors!r}; expected a tensor or several, as net.parameters()")
        if not (callbacks is None or callable(callbacks) or isinstance(callbacks, Iterable)):
            raise StepError(f"GradManager.attach(callbacks={callbacks!r}): expected a function or several")
        found = listed(tensors)
        for tensor in found:
            if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
                what = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
                raise StepError(f"GradManager.attach: got {what}; only floating tensors have gradients")
        calls = [callbacks] if callable(callbacks) else list(callbacks or ())
        for tensor in found:
            if not tensor.requires_grad:
                tensor.requires_grad_()
            elif not tensor.is_leaf:
                tensor.retain_grad()  # without it, reading .grad of an intermediate result warns
            self._attached.setdefault(tensor, []).extend(calls)
            _owners.setdefault(tensor, weakref.WeakSet()).add(self)
        return self

    def _save(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass in training, save the norm's buffers, unless they are since the last `_settle`.

        A forward pass with an inf in it turns running mean and variance to NaN for good, even where the update is
        skipped. torch calls this in every thread.
        """
        if isinstance(module, NormBase) and module.training and module.track_running_stats:
            if module not in self._norms and any(self in group for group in _recording.groups):
                self._norms[module] = {name: b.clone() for name, b in module.named_buffers(recurse=False)}

    @torch.no_grad()
    def _settle(self, *, bad: bool) -> None:
        """Forget the buffers of norms; after bad steps restore them first, in place."""
        for norm, buffers in self._norms.items() if bad else ():
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
        self._norms.clear()

    def _take(self, tensor: Tensor, gradient: Tensor | None, taken: set[int], stop: Callable[..., Any]) -> None:
        """Send a gradient through the callbacks and accumulate it; `taken`: addresses of memory that is in use."""
        for callback in self._attached[tensor] if gradient is not None else ():
            gradient = callback(tensor, gradient)
        if gradient is None:
            return
        if not isinstance(gradient, Tensor) or gradient.shape != tensor.shape:
            what = f"a tensor of shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else repr(gradient)
            raise StepError(
                f"GradManager.backward: a callback returned {what} for a tensor of shape {tuple(tensor.shape)}; "
                "expected its gradient, or None to drop it"
            )
        if gradient.requires_grad:  # an outer manager will differentiate it
            gradient.register_hook(stop)
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        elif tensor.grad is not None:
            tensor.grad += gradient
        elif gradient.layout is not torch.strided:
            tensor.grad = gradient.clone()
        else:  # in memory of its own, laid out as `tensor`: it will be changed in place
            if gradient.stride() != tensor.stride() or gradient.untyped_storage().data_ptr() in taken:
                gradient = torch.empty_like(tensor, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            taken.add(gradient.untyped_storage().data_ptr())
            tensor.grad = gradient


def managers_of(tensors: Iterable[Tensor]) -> list[GradManager]:
    """Return the managers that any of `tensors` is attached to."""
    return list(dict.fromkeys(manager for tensor in tensors for manager in _owners.get(tensor, ())))


def _pairs(y: Any, dy: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs that have a gradient, each with what it starts from."""
    ys = listed(y)
    dys = [torch.ones_like(one) for one in ys] if dy is None else listed(dy)
    if len(ys) != len(dys):
        raise StepError(f"GradManager.backward: {len(ys)} outputs and {len(dys)} gradients dy; give one for each")
    for one, its in zip(ys, dys, strict=True):
        if its.shape != one.shape:
            shapes = f"dy has shape {tuple(its.shape)} and y {tuple(one.shape)}"
            raise StepError(f"GradManager.backward: {shapes}; they must be equal")
    if ys and not any(one.requires_grad for one in ys):
        raise StepError(
            "GradManager.backward: y depends on no attached tensor; attach before the forward pass, and look for "
            "no_grad() or detach() in it. A gradient made by one manager is a constant to those inside it or beside it"
        )
    return [(one, its.to(one)) for one, its in zip(ys, dys, strict=True) if one.requires_grad]


def _differentiate(managers: Sequence[GradManager], pairs: list[tuple[Tensor, Tensor]]) -> None:
    wanted = [(manager, tensor) for manager in managers for tensor in manager.attached_tensors()]
    if not wanted or not pairs:
        return
    ys, dys = zip(*pairs, strict=True)
    inputs = [tensor for _, tensor in wanted]
    groups = _recording.groups
    first = next(place for place, group in enumerate(groups) if any(one in managers for one in group))
    around = weakref.WeakSet(other for group in groups[:first] for other in group)
    others = any(manager not in managers for group in groups for manager in group)
    taken = {one.untyped_storage().data_ptr() for one in dys}
    intermediate = [(tensor, tensor.grad) for tensor in inputs if not tensor.is_leaf]

    def stop(gradient: Tensor) -> Tensor | None:
        return None if any(manager._going for manager in around) else torch.zeros_like(gradient)

    for manager in managers:
        manager._going = True
    try:
        with hs.autocast(policy="O0"):
            options: dict[str, Any] = {"allow_unused": True, "retain_graph": others, "create_graph": bool(around)}
            gradients = torch.autograd.grad(ys, inputs, dys, **options)
            for tensor, gradient in intermediate:  # torch has put something there, because they retain
                tensor.grad = gradient
            for (manager, tensor), gradient in zip(wanted, gradients, strict=True):
                manager._take(tensor, gradient, taken, stop)
    finally:
        for manager in managers:
            manager._going = False
