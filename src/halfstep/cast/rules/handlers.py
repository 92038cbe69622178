"""Handlers: what a rule does with one operator.

A handler takes the mode, the operator and its arguments, casts what the rule casts, and calls the operator with
autocast off. `of_...` make handlers, which `recipe` puts into the table of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.cast.arithmetic.emulate import EMULATED, emulation_of, in_blocks, rounded_to, simulated
from halfstep.cast.arithmetic.norms import STATEFUL, STATEFUL_IN_F, wide_statistics
from halfstep.cast.losses.cross_entropy import cross_entropy, pays
from halfstep.cast.losses.linear_loss import Settings, fused_loss, loss_in_parts
from halfstep.cast.rules.dispatch import (
    EXACT_TYPES,
    Handler,
    Lowering,
    RuleMode,
    as_called,
    cast,
    cast_tensor,
    run,
    tensors_of,
)
from halfstep.cast.state import STATE
from halfstep.errors import BannedOperatorError
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES, BlockFormat, Format
from halfstep.kernels.watched import WatchedParameter, written
from halfstep.policy.operators import LINEAR_LOSS
from halfstep.policy.rule_kinds import RULE_KINDS, CastTo, RuleKind
from halfstep.torch_private.autograd import base_of
from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.modes import peek_interpreter_stack
from halfstep.torch_private.modules import BatchNormBase
from halfstep.trees import tensors as every_tensor

MIXED_NORMS = frozenset({"layer_norm", "group_norm"})  # CPU kernels: low inputs, fp32 weights, low outputs
MANY_LOGITS = 1 << 18  # from here the Function may be no slower than torch; below, it would save half a MiB
WITH_STATISTICS = frozenset({"batch_norm", "instance_norm"})  # write into running statistics, which must not be copies
GATHERS = frozenset({"embedding", "embedding_bag"})  # cast the rows gathered, not the whole table


def _handler(target: CastTo, *, gathers: bool = False) -> Handler:
    """Make the handler of a rule from the function that returns the format of its tensors (None: as they are)."""

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of(args, mode.devices)
        if kwargs:
            tensors += tensors_of(kwargs.values(), mode.devices)
        device = mode.active(tensors)
        if not tensors and target is RULE_KINDS["fp32"].cast_to:
            # what makes floats of whole numbers inside; torch would lower its products
            device = mode.active([t for t in every_tensor((args, kwargs)) if t.device.type in mode.devices])
        if device is None or (kwargs and kwargs.get("out") is not None):
            return func(*args, **kwargs)
        for value in (*args, kwargs.get("dtype")) if kwargs else args:
            if type(value) is torch.dtype:
                return run(device, func, args, kwargs)  # an explicit dtype wins
        dtype = target(device, tensors)
        if dtype is None or not [t for t in tensors if t.dtype is not dtype]:
            return run(device, func, args, kwargs)
        if gathers:
            return cast(run(device, func, args, kwargs), dtype, mode)
        args = tuple([cast(a, dtype, mode) for a in args])
        if kwargs:
            kwargs = {k: cast(v, dtype, mode) for k, v in kwargs.items()}
        return run(device, func, args, kwargs)

    return handle


def _low_norm(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a norm low: on a CPU its weights stay fp32, which is more precise and saves two casts in each pass.

    torch's kernels take the formats of weight and bias from the weight: without one in fp32 both are cast.
    """
    values = args[:1] or (kwargs.get("input"),)
    tensors = tensors_of(values, mode.devices)
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    if not tensors or not tensors[0].is_cpu or weight is None or weight.dtype is not torch.float32:
        return _LOW(mode, func, args, kwargs)
    if mode.active(tensors) is None:
        return func(*args, **kwargs)
    low = cast_tensor(tensors[0], torch.get_autocast_dtype("cpu"), mode)
    if args:
        return run("cpu", func, (low, *args[1:]), kwargs)
    return run("cpu", func, args, {**kwargs, "input": low})


_INPUTS: WeakKeyDictionary[Handler, CastTo] = WeakKeyDictionary()
"""Handler of a norm that casts its input alone where its parameters are fp32 -> the format which that gets."""

_NORMS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    BatchNormBase.forward: F.batch_norm,
    nn.LayerNorm.forward: F.layer_norm,
    nn.GroupNorm.forward: F.group_norm,
}


def norm_forward(original: type[nn.Module]) -> Callable[[nn.Module, Any, RuleMode], Tensor | None] | None:
    """Return the forward of a norm that does what the handler of its function does; None for other classes.

    It is called with the mode off, as torch takes several times as long to hand one function to a mode as the handler
    takes; it returns None, and has done nothing, where the handler would do more than cast the input.
    """
    function = _NORMS.get(original.forward)
    if function is None:
        return None

    def forward(module: nn.Module, input: Any, mode: RuleMode) -> Tensor | None:
        handler = mode.handlers.get(function)
        target = None if handler is None else _INPUTS.get(handler)
        if target is None or type(input) is not Tensor or input.dtype not in POLICY_DTYPES or module._modules:
            return None
        device = "cpu" if input.is_cpu else input.device.type
        if device not in mode.devices or not torch.is_autocast_enabled(device) or peek_interpreter_stack():
            return None
        if device != "cpu" and function is not F.batch_norm:  # low weights too
            return None
        own = module._parameters
        for one in (*own.values(), module._buffers.get("running_mean")):
            if one is not None and one.dtype is not torch.float32:
                return None
        if own.get("weight") is None and own.get("bias") is not None:
            return None
        dtype = target(device, [input])
        low = input if dtype is None else cast_tensor(input, dtype, mode)
        found: Tensor = run(device, original.forward, (module, low), {})
        return found

    return forward


def of_stateful(target: CastTo, form: Format | None = None) -> Handler:
    """Make the handler of a norm with running statistics: the rule is for the input, and statistics are never copied.

    Kernels take a low input with fp32 statistics and compute in fp32, but need weight and bias in the statistics'
    format. `form` is a simulated low format.
    """

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = STATEFUL_IN_F if getattr(func, "__module__", "") == F.__name__ else STATEFUL
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = tensors_of((values.get("input"),), mode.devices)
        device = mode.active(tensors)
        if device is None:
            return func(*args, **kwargs)
        if form is not None:
            func, input = simulated(func, form, inputs=False), rounded_to(form, tensors[0])
        else:
            input = cast(tensors[0], target(device, tensors) or tensors[0].dtype, mode)
        statistics = values.get("running_mean")
        if type(statistics) is WatchedParameter:  # statistics that are frozen low parameters
            running = ("running_mean", "running_var")
            with written(*map(values.get, running)) as wide:
                return handle(mode, func, (), {**values, **dict(zip(running, wide, strict=True))})
        given = {"input": input}
        if isinstance(statistics, Tensor) or input.dtype is torch.float32:
            wanted = statistics.dtype if isinstance(statistics, Tensor) else torch.float32
            given.update({name: cast(values.get(name), wanted, mode) for name in ("weight", "bias")})
        args = tuple(given.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        return run(device, func, args, {name: given.get(name, value) for name, value in kwargs.items()})

    if form is None:
        _INPUTS[handle] = target
    return handle


def _to_low(device: str, tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return what the table's function does for rules that lower, without another file between."""
    return torch.get_autocast_dtype(device)


_LOW = _handler(_to_low)
_FP32 = _handler(RULE_KINDS["fp32"].cast_to)
_INPUTS[_low_norm] = _to_low


def _banned(name: str) -> CastTo:
    def target(device: str, tensors: Sequence[Tensor]) -> torch.dtype | None:
        low = [t.dtype for t in tensors if t.dtype in LOW_DTYPES]
        if low:
            raise BannedOperatorError(
                f"{name} was called with {str(low[0]).removeprefix('torch.')} tensors and this policy bans that; "
                f"use binary_cross_entropy_with_logits for binary_cross_entropy, or give the operator a rule: "
                f"policy.with_ops(fp32=[{name!r}])"
            )
        return None

    return target


def _low_cross_entropy(otherwise: Handler) -> Handler:
    """Make the fp32 handler of F.cross_entropy: low logits are saved as they are; a few go `otherwise`, faster."""

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = args[0] if args else kwargs.get("input")
        if not isinstance(logits, Tensor) or logits.numel() < MANY_LOGITS or not pays(logits):
            return otherwise(mode, func, args, kwargs)
        device = mode.active(tensors_of((logits,), mode.devices))
        if device is None:
            return func(*args, **kwargs)
        return run(device, cross_entropy, args, kwargs)

    return handle


def _emulated(name: str, emulation: Callable[..., Tensor], emulating: frozenset[str]) -> Handler:
    strict = name in EMULATED  # the others call torch's operator, which raises its own dtype error
    masked = name == "scaled_dot_product_attention"  # its fourth argument may be boolean

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of(args, mode.devices) + (tensors_of(kwargs.values(), mode.devices) if kwargs else [])
        device = mode.active(tensors)
        if device not in emulating or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if dtype is not torch.float16:  # a region of torch.autocast inside, in a format that the device has units for
            return func(*args, **kwargs)
        args = tuple([cast(a, dtype, mode) for a in args])
        kwargs = {k: cast(v, dtype, mode) for k, v in kwargs.items()}
        operands = [*(args[:3] if masked else args), *(v for k, v in kwargs.items() if k != "attn_mask")]
        if strict and {tensor.dtype for tensor in every_tensor(operands)} != {torch.float16}:
            return run(device, func, args, kwargs)  # torch raises its own dtype error here
        return run(device, emulation, args, kwargs)

    return handle


def _simulated(form: Format, name: str) -> Handler:
    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = mode.active(tensors_of(args, mode.devices) + tensors_of(kwargs.values(), mode.devices))
        if device is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if isinstance(form, BlockFormat):
            return run(device, in_blocks(name, func, form), args, kwargs)
        return run(device, simulated(func, form, inputs=name not in GATHERS), args, kwargs)

    return handle


def of_composite(copy: Callable[..., Any]) -> Handler:
    """Return the handler that runs a composite from its unreported copy; note [composites] in `recipe`."""

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return copy(*args, **kwargs)

    return handle


def of_norm(handler: Handler | None, func: Callable[..., Any]) -> Handler:
    """Return the handler of `func`, one of `norms.NORMS`, that does what `handler` does, if any, in fp32 inside."""
    wide = wide_statistics(func)

    def handle(mode: RuleMode, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wide(*args, **kwargs) if handler is None else handler(mode, wide, args, kwargs)

    return handle


def of_linear_loss(kind: RuleKind, how: Lowering, *, fused: bool) -> Handler:
    """Return the handler of linear_cross_entropy, torch's or ours: `kind` is for the product, the loss is fp32.

    Not `fused`: its parts, linear and cross_entropy, are operators of their own, each under its rule.
    """
    target = cast_to(kind, LINEAR_LOSS)

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, weight, labels, bias, settings = _linear_loss(*args, **kwargs)
        tensors = tensors_of((input, weight, bias), mode.devices)
        device = mode.active(tensors)
        if device is None:
            return func(*args, **kwargs)
        if not fused:
            with mode:
                return loss_in_parts(input, weight, bias, labels, settings)
        dtype = target(device, tensors)
        if dtype is not None:
            input, weight, bias = (cast(t, dtype, mode) for t in (input, weight, bias))
        emulating = kind.format == "low" and device in how.emulating and dtype is torch.float16
        return run(device, fused_loss, (input, weight, bias, labels, settings), {"emulating": emulating})

    return handle


def _linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    options: Any = None,
    chunk: int | None = None,
    recompute: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Settings]:
    """Read the arguments of linear_cross_entropy, torch's with `options` too, without which it differentiates twice."""
    again = options is None if recompute is None else recompute
    rows = chunk if options is None else options.batch_chunk_size
    return input, linear_weight, target, linear_bias, Settings(chunk=rows, recompute=again, **settings)


def into_destination(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into args[0]: the destination is never cast, what is written takes its format."""
    found = tensors_of(args[:1], mode.devices)
    device = mode.active(found)
    if device is None:
        return func(*args, **kwargs)
    (destination,) = found
    dtype = destination.dtype
    args = (destination, *(cast(a, dtype, mode) for a in args[1:]))
    return run(device, func, args, {k: cast(v, dtype, mode) for k, v in kwargs.items()})


def data_read(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``tensor.data``, and mark the step's low copy as stale, since a write through it leaves no trace."""
    if STATE.copies is not None:
        STATE.copies.touched(args[0])
    return func(*args, **kwargs)


IN_PLACE = ("index_put_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_", "masked_scatter_",
            "addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_")  # fmt: skip
"""Methods of Tensor that refuse to mix formats."""


def cast_to(kind: RuleKind, name: str) -> CastTo:
    """Return the function that gives the format to which a rule casts the eligible tensors of the operator `name`."""
    if kind.refuses_low:
        return _banned(name)
    return _to_low if kind.format == "low" else kind.cast_to


PRECISE = WeakSet[nn.Module]()
"""The bound modules under the rule "fp32" that have parameters, but tables of rows."""


def of_low(handler: Handler) -> Handler:
    """Return the handler of a low operator that computes in fp32 with a weight of `PRECISE`, else does as `handler`.

    A loss function that multiplies by ``model.head.weight`` does what the head's forward does, and means its rule.
    """

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        precise = any(map(_is_precise, (*args, *kwargs.values())))
        return (_FP32 if precise else handler)(mode, func, args, kwargs)

    return handle


def _is_precise(value: Any) -> bool:
    """Return whether `value` has the memory of a matrix of `PRECISE`: it is one, or a view or an alias of it."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_precise, value))
    if (
        type(value) not in EXACT_TYPES
        or value.dtype is not torch.float32
        or value.dim() < 2
        or value.grad_fn is not None
    ) and (type(value) is not Tensor or not isinstance(base_of(value), nn.Parameter)):
        return False
    weights = [weight for module in PRECISE for weight in module._parameters.values() if type(weight) is nn.Parameter]
    place = storage_key(value.untyped_storage())
    return any(weight.dim() > 1 and storage_key(weight.untyped_storage()) == place for weight in weights)


def of_rule(name: str, kind: RuleKind, func: Callable[..., Any], how: Lowering, *, native: bool) -> Handler:
    """Return the handler of the operator `name`, called as `func`, under a rule; `native`: torch.autocast does it."""
    if name in WITH_STATISTICS and not kind.refuses_low:
        return of_stateful(cast_to(kind, name), how.simulated if kind.format == "low" else None)
    if kind.format == "low":
        if how.simulated is not None:
            return _simulated(how.simulated, name)
        emulation = emulation_of(name, func) if how.emulating else None
        if emulation is not None:
            return _emulated(name, emulation, how.emulating)
        if name in MIXED_NORMS:
            return _low_norm
    if kind.format == "fp32" and func is F.cross_entropy:
        return _low_cross_entropy(as_called if native else _handler(kind.cast_to))
    if native:
        return as_called
    return _handler(cast_to(kind, name), gathers=name in GATHERS and not kind.refuses_low)
