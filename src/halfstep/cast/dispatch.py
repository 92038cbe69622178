"""Operator -> rule -> casts -> operator.

`handlers` compiles a policy's decisions for a set of devices into a table from callable to `Handler`; `RuleMode` is the
`TorchFunctionMode` that looks operators up in it. Only operators that torch.autocast would treat differently on one of
the devices are in the table: everything else passes through to the real autocast region underneath.

Note [composites]: a mode is off inside its own handler, so a Python function of torch.nn.functional that torch reports
as one operator (multi_head_attention_forward, normalize, gumbel_softmax, ...) hides the operators it calls. If such a
function has no rule of its own but calls operators that have one, it is run from a twin of itself that does not report
to modes, with this mode on again, so that its parts get their rules.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from halfstep.cast.emulate import EMULATED, RECURRENT, WIDENED, emulation_of
from halfstep.cast.losses import cross_entropy
from halfstep.cast.simulate import simulated
from halfstep.cast.state import STATE
from halfstep.errors import BannedOperatorError
from halfstep.formats import Format
from halfstep.policy.operators import callables, name_of
from halfstep.policy.optable import table
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import Decision, operator_rules
from halfstep.policy.units import units

__all__ = ["FLOATS", "Lowering", "RuleMode", "cast_tensor", "emulates", "handlers", "run", "target_of"]

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # what rules apply to: never fp64, complex, integer
LOWS = frozenset({torch.float16, torch.bfloat16})
MIXED_NORMS = frozenset({"layer_norm", "group_norm"})  # CPU kernels take low inputs with fp32 weights, and give low
PLAIN = frozenset({Tensor, nn.Parameter})  # tensor subclasses (DTensor, functional wrappers) have their own lives
MANY_LOGITS = 1 << 20  # where a Function of our own begins to be faster on a CPU; below it some MiB are at stake
STATEFUL = frozenset({"batch_norm", "instance_norm"})  # write into running statistics, which must not be copies
GATHERS = frozenset({"embedding", "embedding_bag"})  # cast the rows gathered, not the whole table
INPUT = "input"  # not a rule of the policy: torch has one and the policy has none, so inputs stay as they are


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How a region carries out low operators where a device's own kernels do not serve.

    Attributes:
        emulating: device types without units for the low format: fp16 in, fp32 compute, one rounding.
        simulated: a format that no dtype stores: values rounded to it, kept in fp32.
    """

    emulating: frozenset[str] = frozenset()
    simulated: Format | None = None


NATIVELY = Lowering()

Target = Callable[[str, list[Tensor]], "torch.dtype | None"]
"""(device type, eligible tensors) -> the format they take; None: as they are."""

Handler = Callable[["RuleMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _tensors(values: Iterable[Any], devices: frozenset[str]) -> list[Tensor]:
    """Return the eligible tensors among `values` and in lists and tuples among them, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in FLOATS and value.device.type in devices:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value, devices)
    return found


def cast_tensor(tensor: Tensor, dtype: torch.dtype, mode: RuleMode) -> Tensor:
    """Return `tensor` in `dtype` if it is eligible; weights from the caches."""
    if tensor.dtype is dtype or tensor.dtype not in FLOATS or tensor.device.type not in mode.devices:
        return tensor
    if dtype not in LOWS or torch.compiler.is_compiling() or type(tensor) not in PLAIN or peek_interpreter_stack():
        return tensor.to(dtype)  # what is made inside a torch.func transform must not be found outside it
    if not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    if tensor.is_leaf:
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return STATE.casts.cast(tensor, dtype)
    elif isinstance(tensor._base, nn.Parameter):
        return STATE.casts.cast_view(tensor, tensor._base, dtype)
    return STATE.casts.cast_latest(tensor, dtype)


def _cast(value: Any, dtype: torch.dtype, mode: RuleMode) -> Any:
    """Cast every eligible tensor in `value` (a tensor, list, tuple or anything else) to `dtype`."""
    if isinstance(value, Tensor):
        return cast_tensor(value, dtype, mode)
    if isinstance(value, (list, tuple)):
        items = [_cast(v, dtype, mode) for v in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


class RuleMode(TorchFunctionMode):
    """Applies a table of handlers to the operators called in one region, as long as that region is the innermost.

    Attributes:
        devices: device types of the region.
        handlers: callable -> handler, as `handlers` makes them.
        how: how low operators are carried out.
        overrides: rules for custom operators.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        handlers: Mapping[Callable[..., Any], Handler],
        how: Lowering = NATIVELY,
        overrides: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__()
        self.devices = frozenset(devices)
        self.handlers = handlers
        self.how = how
        self.overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.handlers.get(func)
        if handler is None or STATE.mode is not self:
            return func(*args, **kwargs) if kwargs else func(*args)  # most calls: keep this path short
        return handler(self, func, args, kwargs or {})

    def active(self, tensors: list[Tensor]) -> str | None:
        """Return the device type whose region decides for `tensors`, or None where autocast is off or none counts."""
        for tensor in tensors:
            device = tensor.device.type
            return device if torch.is_autocast_enabled(device) else None
        return None


def run(device: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` with autocast, and with it every rule, off for this one call."""
    if torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)
    torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)


def _handler(target: Target, *, gathers: bool = False) -> Handler:
    """Make the handler of a rule from the function that says which format its tensors take (None: as they are)."""

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors(args, mode.devices) + (_tensors(kwargs.values(), mode.devices) if kwargs else [])
        device = mode.active(tensors)
        if device is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if isinstance(kwargs.get("dtype"), torch.dtype) or any(isinstance(a, torch.dtype) for a in args):
            return run(device, func, args, kwargs)  # an explicit dtype wins
        dtype = target(device, tensors)
        if dtype is None:
            return run(device, func, args, kwargs)
        if gathers:
            return _cast(run(device, func, args, kwargs), dtype, mode)
        args = tuple([_cast(a, dtype, mode) for a in args])
        if kwargs:
            kwargs = {k: _cast(v, dtype, mode) for k, v in kwargs.items()}
        return run(device, func, args, kwargs)

    return handle


def _low_norm(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Low for a norm: on CPU its weights stay as they are, which is more precise and saves two casts each way."""
    values = args[:1] or (kwargs.get("input"),)
    tensors = _tensors(values, mode.devices)
    if not tensors or tensors[0].device.type != "cpu":
        return _LOW(mode, func, args, kwargs)
    if mode.active(tensors) is None:
        return func(*args, **kwargs)
    low = _cast(tensors[0], torch.get_autocast_dtype("cpu"), mode)
    if args:
        return run("cpu", func, (low, *args[1:]), kwargs)
    return run("cpu", func, args, {**kwargs, "input": low})


def _stateful(target: Target, form: Format | None) -> Handler:
    """Make the handler of a norm with running statistics: the rule is for the input, and statistics are never copied.

    Kernels take a low input with fp32 statistics and compute in fp32, but want weight and bias in the statistics'
    format. `form` is a simulated low format.
    """

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = STATEFUL_F if getattr(func, "__module__", "") == F.__name__ else STATEFUL_TORCH
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = _tensors((values.get("input"),), mode.devices)
        device = mode.active(tensors)
        if device is None:
            return func(*args, **kwargs)
        if form is not None:
            func, input = simulated(func, form, inputs=False), simulated(_same, form, inputs=False)(tensors[0])
        else:
            input = _cast(tensors[0], target(device, tensors) or tensors[0].dtype, mode)
        statistics = values.get("running_mean")
        cast = {"input": input}
        if isinstance(statistics, Tensor) or input.dtype is torch.float32:
            wanted = statistics.dtype if isinstance(statistics, Tensor) else torch.float32
            cast.update({name: _cast(values.get(name), wanted, mode) for name in ("weight", "bias")})
        args = tuple(cast.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        return run(device, func, args, {name: cast.get(name, value) for name, value in kwargs.items()})

    return handle


def _same(x: Tensor) -> Tensor:
    return x


STATEFUL_F = ("input", "running_mean", "running_var", "weight", "bias")
"""First arguments of F.batch_norm and F.instance_norm."""

STATEFUL_TORCH = ("input", "weight", "bias", "running_mean", "running_var")
"""First arguments of torch.batch_norm and torch.instance_norm."""


def _to_low(device: str, tensors: list[Tensor]) -> torch.dtype | None:
    return torch.get_autocast_dtype(device)


_LOW = _handler(_to_low)


def _to_fp32(device: str, tensors: list[Tensor]) -> torch.dtype | None:
    return torch.float32


_FP32 = _handler(_to_fp32)


def _to_first(device: str, tensors: list[Tensor]) -> torch.dtype | None:
    """keep: the first activation decides; a parameter decides only if there is nothing else."""
    if len(tensors) == 1:
        return None
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            return tensor.dtype
    return tensors[0].dtype


def _to_widest(device: str, tensors: list[Tensor]) -> torch.dtype | None:
    first = tensors[0].dtype
    return None if all(t.dtype is first for t in tensors) else torch.float32


def _as_it_is(device: str, tensors: list[Tensor]) -> torch.dtype | None:
    return None


def _banned(name: str) -> Target:
    def target(device: str, tensors: list[Tensor]) -> torch.dtype | None:
        low = [t.dtype for t in tensors if t.dtype in LOWS]
        if low:
            raise BannedOperatorError(
                f"{name} was called with {str(low[0]).removeprefix('torch.')} tensors and this policy bans that; "
                f"use binary_cross_entropy_with_logits for binary_cross_entropy, or give the operator a rule: "
                f"policy.with_ops(fp32=[{name!r}])"
            )
        return None

    return target


def _low_cross_entropy(otherwise: Handler) -> Handler:
    """Make the handler of fp32 for F.cross_entropy: of low logits no fp32 copy is kept for the backward pass.

    Logits too few for that to matter go `otherwise`: a custom Function costs more than it saves there.
    """

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = args[0] if args else kwargs.get("input")
        if not isinstance(logits, Tensor) or logits.dtype not in LOWS or logits.numel() < MANY_LOGITS:
            return otherwise(mode, func, args, kwargs)
        device = mode.active(_tensors((logits,), mode.devices))
        if device is None:
            return func(*args, **kwargs)
        return run(device, cross_entropy, args, kwargs)

    return handle


def _untouched(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _emulated(name: str, emulation: Callable[..., Tensor], emulating: frozenset[str]) -> Handler:
    """Make the handler of a low operator whose format the devices `emulating` have no units for."""
    strict = name in EMULATED  # what torch runs itself on widened tensors says itself what it cannot mix
    masked = name == "scaled_dot_product_attention"  # its fourth argument may be boolean

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _tensors(args, mode.devices) + (_tensors(kwargs.values(), mode.devices) if kwargs else [])
        device = mode.active(tensors)
        if device not in emulating or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if dtype is not torch.float16:  # somebody's inner region asks for a format the device has
            return func(*args, **kwargs)
        args = tuple([_cast(a, dtype, mode) for a in args])
        kwargs = {k: _cast(v, dtype, mode) for k, v in kwargs.items()}
        operands = [*(args[:3] if masked else args), *(v for k, v in kwargs.items() if k != "attn_mask")]
        if strict and _formats(operands) != {torch.float16}:
            return run(device, func, args, kwargs)  # what no rule casts, torch refuses to mix, and says so
        return run(device, emulation, args, kwargs)

    return handle


def _formats(values: Iterable[Any]) -> set[torch.dtype]:
    """Return the dtypes of all tensors in `values` and in lists and tuples among them."""
    found = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found |= _formats(value)
    return found


def _simulated(form: Format, *, gathers: bool) -> Handler:
    """Make the handler of a low operator in a format that no dtype stores."""

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = mode.active(_tensors(args, mode.devices) + _tensors(kwargs.values(), mode.devices))
        if device is None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return run(device, simulated(func, form, inputs=not gathers), args, kwargs)

    return handle


def _composite(twin: Callable[..., Any]) -> Handler:
    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return twin(*args, **kwargs)

    return handle


def _into_destination(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into args[0]: the destination is never cast, what is written takes its format."""
    found = _tensors(args[:1], mode.devices)
    device = mode.active(found)
    if device is None:
        return func(*args, **kwargs)
    (destination,) = found
    dtype = destination.dtype
    args = (destination, *(_cast(a, dtype, mode) for a in args[1:]))
    return run(device, func, args, {k: _cast(v, dtype, mode) for k, v in kwargs.items()})


IN_PLACE = ("index_put_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_", "masked_scatter_",
            "addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_")  # fmt: skip
"""Methods of Tensor that refuse to mix formats."""

_TARGETS = {"low": _to_low, "fp32": _to_fp32, "keep": _to_first, "widest": _to_widest, INPUT: _as_it_is}


def target_of(rule: str, name: str, device: str, tensors: list[Tensor]) -> torch.dtype | None:
    """Return the format that `rule` gives the eligible `tensors` of the operator `name`; None: as they are."""
    return _banned(name)(device, tensors) if rule == "banned" else _TARGETS[rule](device, tensors)


def _rule_handler(name: str, rule: str, func: Callable[..., Any], how: Lowering, *, native: bool) -> Handler:
    if name in STATEFUL and rule in _TARGETS:
        return _stateful(_TARGETS[rule], how.simulated if rule == "low" else None)
    if rule == "low":
        if how.simulated is not None:
            return _simulated(how.simulated, gathers=name in GATHERS)
        emulation = emulation_of(name, func) if how.emulating else None
        if emulation is not None:
            return _emulated(name, emulation, how.emulating)
        if name in MIXED_NORMS:
            return _low_norm
    if rule == "fp32" and func is F.cross_entropy:
        return _low_cross_entropy(_untouched if native else _FP32)
    if native:
        return _untouched
    if rule == "banned":
        return _handler(_banned(name))
    return _handler(_TARGETS[rule], gathers=name in GATHERS)


def _torch_rule(name: str, device: str) -> str | None:
    row = table("torch", device).get(name)
    return None if row is None else row.rule


def _native(name: str, rule: str, devices: tuple[str, ...]) -> bool:
    """Return whether torch.autocast does the same with this operator on every one of `devices`."""
    return rule in {"low", "fp32"} and all(_torch_rule(name, device) == rule for device in devices)


def handlers(
    policy: Policy, devices: tuple[str, ...], how: Lowering = NATIVELY
) -> Mapping[Callable[..., Any], Handler]:
    """Compile `policy` for `devices` into the table callable -> handler.

    Args:
        policy: what is wanted.
        devices: device types of the region, e.g. ("cuda", "cpu"); a rule is handled if torch differs on any of them.
        how: how low operators are carried out.

    Returns:
        The handlers of all operators that torch.autocast alone would treat differently; empty if there are none.
    """
    decisions: dict[str, Decision] = {}
    for device in reversed(devices):
        decisions.update(operator_rules(policy, device))
    rules: dict[str, str] = {}
    for name, decision in decisions.items():
        if decision.rule == "low" and (how.simulated or (how.emulating and (name in EMULATED or name in WIDENED))):
            rules[name] = "low"
        elif policy.table == "torch" and decision.origin == "table":
            continue  # the real autocast region underneath is the table
        elif not _native(name, decision.rule, devices) or (name == "cross_entropy" and decision.rule == "fp32"):
            rules[name] = decision.rule
    if policy.table != "torch":
        listed = {name for device in devices for name in table("torch", device)}
        rules.update(dict.fromkeys(listed - decisions.keys(), INPUT))
    if how.emulating and policy.table == "torch":
        # torch lowers them on CUDA; on the CPU their insides would run in fp16 kernels that are slow or do not exist
        rules.update(dict.fromkeys(RECURRENT - decisions.keys(), "low"))
    compiled: dict[Callable[..., Any], Handler] = {}
    if rules:
        spellings = (getattr(space, name, None) for name in ("__setitem__", *IN_PLACE) for space in (Tensor, torch))
        compiled.update({spelled: _into_destination for spelled in spellings if spelled is not None})
    for name, rule in rules.items():
        for func in callables(name):
            compiled[func] = _rule_handler(name, rule, func, how, native=_native(name, rule, devices))
    if policy.params == "low":
        for func in (F.batch_norm, F.instance_norm):
            compiled.setdefault(func, _stateful(_as_it_is, None))
    for composite in _composites(frozenset(rules)):
        if composite not in compiled and name_of(composite) not in decisions:
            compiled[composite] = _composite(_unreported(composite))
    if "cross_entropy" not in decisions and rules.keys() & {"log_softmax", "nll_loss"}:
        compiled[F.cross_entropy] = _composite(_cross_entropy)
    return compiled


def emulates(emulate: str, device: str, dtype: str) -> bool:
    """Return whether `device` runs operators low in `dtype` emulated, for a policy's field `emulate`."""
    if dtype != "fp16" or emulate == "never":
        return False
    return emulate == "always" or not units(device).fp16


@cache
def _calls(func: types.FunctionType) -> frozenset[str]:
    """Names that a function of torch.nn.functional calls, through helpers of the same module that report nothing."""
    names, todo, seen = set[str](), [func], set[types.FunctionType]()
    while todo:
        current = todo.pop()
        seen.add(current)
        for name in current.__code__.co_names:
            names.add(name)
            helper = current.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and helper not in seen and name.startswith("_"):
                todo.append(helper)
    return frozenset(names)


def _composites(ruled: frozenset[str]) -> list[types.FunctionType]:
    """Return the Python functions of torch.nn.functional that report to modes and call a ruled operator."""
    found = []
    for name, func in vars(F).items():
        if not isinstance(func, types.FunctionType) or "handle_torch_function" not in func.__code__.co_names:
            continue
        if any(called != name and (name_of_called(called) in ruled) for called in _calls(func)):
            found.append(func)
    return found


def name_of_called(name: str) -> str | None:
    """Return the operator a bare name inside torch.nn.functional stands for, or None."""
    for space in (F, torch, Tensor):
        func = getattr(space, name, None)
        if callable(func):
            try:
                return name_of(func)
            except TypeError:  # unhashable
                return None
    return None


@cache
def _unreported(func: types.FunctionType) -> types.FunctionType:
    """Return a twin of `func` that does not report itself to torch-function modes; what it calls still does."""
    names = [n for n in func.__globals__ if n.startswith("has_torch_function")]
    quiet = {**func.__globals__, **dict.fromkeys(names, _reports_nothing)}
    twin = types.FunctionType(func.__code__, quiet, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _reports_nothing(*tensors: Any) -> bool:
    return False


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy from log_softmax and nll_loss, for policies with rules for these and none for the whole."""
    if size_average is not None or reduce is not None or label_smoothing or target.is_floating_point():
        return _unreported(F.cross_entropy)(  # type: ignore[no-any-return]
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    log_probabilities = F.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index, reduction=reduction)
