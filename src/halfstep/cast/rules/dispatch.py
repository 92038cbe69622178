"""Operator -> rule -> casts -> operator: the mode that looks operators up, and the casts of their arguments.

`RuleMode` is the `TorchFunctionMode` of a region. It holds a table from callable to `Handler`: `rules.py` makes it from
a policy, `handlers.py` says what each handler does. Only operators that torch.autocast would treat differently on one
of the devices are in it: everything else passes through to the real autocast region underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from halfstep.cast.regions.recompute import GRADIENTS_SWITCHED, hooks_over_this, remember
from halfstep.cast.state import STATE
from halfstep.formats import Format

__all__ = [
    "FLOATS",
    "LOWS",
    "NATIVELY",
    "Handler",
    "Lowering",
    "RuleMode",
    "Target",
    "cast",
    "cast_tensor",
    "mode_here",
    "run",
    "tensors_of",
]

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # what rules apply to: never fp64, complex, integer
LOWS = frozenset({torch.float16, torch.bfloat16})
PLAIN = frozenset({Tensor, nn.Parameter})  # tensor subclasses (DTensor, functional wrappers) have their own lives


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


def tensors_of(values: Iterable[Any], devices: frozenset[str]) -> list[Tensor]:
    """Return the eligible tensors among `values` and in lists and tuples among them, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in FLOATS and value.device.type in devices:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value, devices)
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
            copies = STATE.copies
            if copies is not None and copies.dtype is dtype and (low := copies.of(tensor)) is not None:
                return low
            return STATE.casts.cast(tensor, dtype)
    elif isinstance(tensor._base, nn.Parameter):
        return STATE.casts.cast_view(tensor, tensor._base, dtype)
    return STATE.casts.cast_latest(tensor, dtype)


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


class RuleMode(TorchFunctionMode):
    """Applies a table of handlers to the operators called in one region, as long as that region is the innermost.

    Attributes:
        devices: device types of the region.
        handlers: callable -> handler, as `handlers` makes them; with them what checkpoints are recognised by.
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
        self.handlers = {GRADIENTS_SWITCHED: _as_called, **handlers}
        self.how = how
        self.overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.handlers.get(func)
        if handler is None:  # most calls: keep this path short
            return func(*args, **kwargs) if kwargs else func(*args)
        if not is_dynamo_compiling() and (hooks_over_this(True) is not None or func is GRADIENTS_SWITCHED):
            remember(func)
        if STATE.mode is not self:
            if _elsewhere():
                return _uncached(handler, self, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def active(self, tensors: list[Tensor]) -> str | None:
        """Return the device type whose region decides for `tensors`, or None where autocast is off or none counts."""
        for tensor in tensors:
            device = tensor.device.type
            return device if torch.is_autocast_enabled(device) else None
        return None


def _as_called(mode: RuleMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _elsewhere() -> bool:
    """Return whether this is a backward pass in a thread of the engine, where modes are and regions are not."""
    if STATE.mode is not None or STATE.frames or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def _uncached(handler: Handler, mode: RuleMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a handler in a thread where no end of a region would ever let go of low copies."""
    enabled = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        return handler(mode, func, args, kwargs)
    finally:
        torch.set_autocast_cache_enabled(enabled)


def mode_here() -> RuleMode | None:
    """Return the mode of the innermost region, or of the one whose operators a backward pass computes again."""
    if not _elsewhere():
        if not is_dynamo_compiling() and hooks_over_this(True) is not None:
            remember()
        return STATE.mode
    stack = torch.overrides._get_current_function_mode_stack()
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
        torch.set_autocast_enabled(device, True)  # should Ctrl-C come before it, the end of the region puts it right
