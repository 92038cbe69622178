"""Operator -> handler -> casts -> operator: the mode that looks operators up, and the casts of their arguments.

`RuleMode` is the `TorchFunctionMode` of a region. It holds a table from callable to `Handler`, which `recipe.py` makes
from a policy and the handlers in `handlers.py`. Operators that torch.autocast treats the same on all devices are not
in it (except `cross_entropy`): they pass through to the torch.autocast region underneath.

Note [cached casts]: torch's own cache is keyed by the tensor alone, so it returns a stale copy after an in-place update
and the wrong format where regions of two formats nest; and it never keeps a frozen weight, which is cast at every use.
Here (`STATE.casts`) the key is tensor, version, address and format. The cache belongs to one thread and ends with its
outermost region: a write through ``.data``, which is how momentum encoders are updated, leaves no trace, so no copy may
outlive a step. A low copy that was written into is not used again.

Note [cached activation]: beside the weights the one activation cast last is kept, for layers that read it one after the
other: query, key and value, or the two halves of a gated unit. Each reader gets an autograd edge of its own, so that
their gradients are summed in fp32, as after a cast for each. The activation itself is referenced weakly, and only an
output of autograd is cached: user code rarely writes into its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from halfstep.accelerators import copies_behind_events
from halfstep.cast.regions.recompute import SET_GRAD_ENABLED, mark_checkpoints, saved_tensor_hooks
from halfstep.cast.state import STATE
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES, Format
from halfstep.torch_private.autograd import base_of, current_graph_task_id
from halfstep.torch_private.devices import raw_stream_of
from halfstep.torch_private.fake import is_fake
from halfstep.torch_private.modes import current_function_mode_stack, peek_interpreter_stack

EXACT_TYPES = frozenset({Tensor, nn.Parameter})
"""The types whose low copies are cached; other subclasses (DTensor, functional wrappers) have data of their own."""

ACTIVATION = "activation"
"""The key of the activation cast last in `STATE.casts`; the keys of weights are tuples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How a region carries out low operators where a device's own kernels do not serve."""

    emulating: frozenset[str] = frozenset()  # device types without units for fp16: fp32 compute, one rounding
    simulated: Format | None = None  # a format that no dtype stores: values rounded to it, kept in fp32


NATIVELY = Lowering()


Handler = Callable[["RuleMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


METHODS = frozenset(method for method in vars(Tensor).values() if isinstance(method, FunctionType))
"""Methods of Tensor that are written in Python (``x ** 2``, ``1 / x``, ``x.norm()``): Dynamo does not find them in a
dict, and the guard that it writes on this fails at once (torch 2.13 and 2.15; docs/upstream.md, dynamo_mode_table)."""


class RuleMode(TorchFunctionMode):
    """Applies a table of handlers to the operators called in one region, as long as that region is the innermost."""

    def __init__(
        self,
        devices: tuple[str, ...],
        handlers: Mapping[Callable[..., Any], Handler],
        how: Lowering = NATIVELY,
        overrides: tuple[tuple[str, str], ...] = (),
        by_hand: Mapping[Callable[..., Any], Handler] | None = None,
    ) -> None:
        super().__init__()
        self.devices = frozenset(devices)
        self.ruled = {SET_GRAD_ENABLED: as_called, **handlers}  # with the call that shows re-entrant checkpoints
        # those that Dynamo finds: it traces into the others, down to operators that have a handler
        self.traceable = {func: handler for func, handler in self.ruled.items() if func not in METHODS}
        self.handlers = {**self.ruled, **(by_hand or {})}
        self.how = how
        self.overrides = overrides  # rules for custom operators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = (self.traceable if is_dynamo_compiling() else self.handlers).get(func)
        if handler is None:  # most calls: keep this path short
            return func(*args, **kwargs) if kwargs else func(*args)
        if not is_dynamo_compiling() and (saved_tensor_hooks(True) is not None or func is SET_GRAD_ENABLED):
            mark_checkpoints(func)
        if STATE.mode is not self:
            if _in_engine_thread():
                return _uncached(handler, self, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def active(self, tensors: list[Tensor]) -> str | None:
        """Return the device type whose region decides for `tensors`; None: autocast is off, or there are no tensors."""
        if not tensors:
            return None
        device = device_type(tensors[0])
        return device if torch.is_autocast_enabled(device) else None


def as_called(mode: RuleMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` as it was called: the handler of an operator that is left alone."""
    return func(*args, **kwargs)


def _in_engine_thread() -> bool:
    """Return whether this is a backward pass in a thread of the engine, which has torch's modes but no open region."""
    if STATE.mode is not None or STATE.frames or torch.compiler.is_compiling():
        return False
    return current_graph_task_id() != -1


def _uncached(handler: Handler, mode: RuleMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a handler in a thread in which no region ends, so that cached copies would never be freed."""
    enabled = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        return handler(mode, func, args, kwargs)
    finally:
        torch.set_autocast_cache_enabled(enabled)


def mode_here() -> RuleMode | None:
    """Return the mode of the innermost region, or of the one whose operators a backward pass computes again."""
    if not _in_engine_thread():
        if not is_dynamo_compiling() and saved_tensor_hooks(True) is not None:
            mark_checkpoints()
        return STATE.mode
    stack = current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, RuleMode)), None)


def run(device: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` with autocast, and with it every rule, off for this one call."""
    if torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)
    try:
        torch.set_autocast_enabled(device, False)
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)  # should Ctrl-C come before it, the end of the region restores it


# ------------------------------------------------------------------ casts of arguments


def device_type(tensor: Tensor) -> str:
    """Return ``tensor.device.type``, which takes torch twice as long to make."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def tensors_of(values: Iterable[Any], devices: frozenset[str]) -> list[Tensor]:
    """Return the eligible tensors among `values` and in lists and tuples among them, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in POLICY_DTYPES and device_type(value) in devices:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value, devices)
    return found


def cast(value: Any, dtype: torch.dtype, mode: RuleMode) -> Any:
    """Cast every eligible tensor in `value` (a tensor, list, tuple or anything else) to `dtype`."""
    if isinstance(value, Tensor):
        return cast_tensor(value, dtype, mode)
    if isinstance(value, (list, tuple)):
        items = [cast(v, dtype, mode) for v in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def cast_tensor(tensor: Tensor, dtype: torch.dtype, mode: RuleMode) -> Tensor:
    """Return `tensor` in `dtype` if it is eligible; weights from the training step's copies or from the cache."""
    if tensor.dtype is dtype or tensor.dtype not in POLICY_DTYPES or device_type(tensor) not in mode.devices:
        return tensor
    if dtype not in LOW_DTYPES or torch.compiler.is_compiling():
        return tensor.to(dtype)
    if type(tensor) not in EXACT_TYPES or peek_interpreter_stack():
        return tensor.to(dtype)  # what is made inside a torch.func transform must not be found outside it
    if not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    if tensor.is_leaf:
        if tensor.requires_grad or type(tensor) is nn.Parameter:
            copies = STATE.copies
            if copies is not None and copies.dtype is dtype and (low := copies.of(tensor)) is not None:
                return low
            return _cast_weight(tensor, tensor, dtype)
    elif (base := base_of(tensor)) is not None and isinstance(base, nn.Parameter):
        return _cast_weight(tensor, base, dtype)
    return cast_activation(tensor, dtype)


def address(tensor: Tensor) -> int:
    """Return where the values of `tensor` are; 0 for a fake or wrapped one, which has none."""
    if type(tensor) in EXACT_TYPES:  # `is_fake` takes ten times as long
        try:
            return tensor.data_ptr()
        except RuntimeError:  # functorch has wrapped it
            return 0
    return 0 if is_fake(tensor) else tensor.data_ptr()


def stream_of(tensor: Tensor) -> int:
    """Return a number for the stream on which operators of `tensor` are queued now; 0 where there is one for all."""
    if tensor.is_cpu:
        return 0
    if tensor.is_cuda:
        return 0 if raw_stream_of is None else int(raw_stream_of(tensor.device.index))
    return torch.accelerator.current_stream(tensor.device).stream_id if copies_behind_events(tensor.device.type) else 0


def _witness(source: Tensor, low: Tensor) -> Hashable:
    """Return what changes when `source` gets another value, its copy is written into, or another stream reads it.

    A reader on another stream than the cast's would have to wait for it: it gets a copy of its own.
    """
    return source._version, address(source), -1 if low.is_inference() else low._version, stream_of(source)


def _cast_weight(value: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value`, a weight or a view of one, in `dtype`, from the cache if this very value was cast before.

    The cast is recorded by autograd even under `torch.no_grad`, so that a later use with gradients finds its edge.
    Casts made in inference mode serve inference mode only. See note [cached casts].
    """
    inference = torch.is_inference_mode_enabled()
    if inference and weight.is_inference():  # it has no version that would show a change
        return value.to(dtype)
    key: Hashable = (id(weight), dtype, inference, value.requires_grad)  # which a GAN's loop changes for its turns
    if value is not weight:
        key = (key, value.storage_offset(), value.shape, value.stride())
    casts = STATE.casts
    known = casts.get(key)
    if known is not None and known[0] is weight and known[1] == _witness(weight, known[2]):
        return known[2]  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        low = value.to(dtype)
    else:
        with torch.enable_grad():
            low = value.to(dtype)
    casts[key] = (weight, _witness(weight, low), low)
    return low


def cast_activation(activation: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `activation` in `dtype`, from the cache if it was the activation cast last; note [cached activation]."""
    if activation.grad_fn is None:
        return activation.to(dtype)
    casts, recording = STATE.casts, torch.is_grad_enabled()
    known = casts.get(ACTIVATION)
    if known is not None and known[0]() is activation and known[3].dtype is dtype and known[2] is recording:
        if known[1] == _witness(activation, known[3]):
            if not recording:
                return known[3]  # type: ignore[no-any-return]
            again: Tensor = _Reader.apply(activation, known[3].detach())  # type: ignore[no-untyped-call]
            return again

    def forget(reference: weakref.ref[Tensor]) -> None:
        if casts.get(ACTIVATION, (None,))[0] is reference:
            del casts[ACTIVATION]

    low = activation.to(dtype)
    casts[ACTIVATION] = (weakref.ref(activation, forget), _witness(activation, low), recording, low)
    return low


class _Reader(torch.autograd.Function):
    """One more edge from a low copy to the activation it was cast from."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = activation.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
