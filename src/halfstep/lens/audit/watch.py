"""Watch: function modes that see every operator a model calls, before any rule, with its module and its line.

`OperatorWatch` stands above the rules of a region (`STATE.above` keeps it there where regions nest): it receives the
arguments as the user's code has them, and the result that the policy made of them. Composites such as
multi_head_attention_forward are opened, so that their parts are seen. `Reference` watches the fp32 run of the whole
model and keeps its results for the audited run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from halfstep.arguments import MODEL, check
from halfstep.cast.rules.recipe import unreported
from halfstep.cast.state import STATE
from halfstep.errors import AuditError
from halfstep.formats import LOW_DTYPES
from halfstep.lens.calls import line_of, place, user_frame
from halfstep.policy.operators import known, operator_name
from halfstep.trees import tensors

__all__ = [
    "BELOW_FP32",
    "Key",
    "OperatorCall",
    "OperatorWatch",
    "Paths",
    "Reference",
    "TwinResult",
    "floats_of",
    "is_index",
    "widened_dtypes",
]

OPENED = {F.multi_head_attention_forward, F.normalize, F.gumbel_softmax}
"""Python functions of torch that report themselves as one operator and are made of several."""

CONVERSIONS = dict.fromkeys(("to", "type", "half", "bfloat16", "long", "int", "short"), "to")
"""Methods by which user code changes a format: no operators of a policy, but they round."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        module: dotted name of the innermost module that runs.
        op: public short name of the operator.
        nth: which call of this operator in this module it is, from 0.
        line: "file.py:12 source text" of the innermost frame that is neither torch's nor halfstep's.
        in_place: whether it writes into its first argument.
    """

    module: str
    op: str
    nth: int
    line: str
    in_place: bool = False


class Paths:
    """Follows which module of a model runs: hooks on every module keep a stack of dotted names.

    A module that occurs at several places has its first name.
    """

    def __init__(self, model: nn.Module) -> None:
        check("Paths", AuditError, model=(model, MODEL))
        self.stack: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles += self._follow(path, module)

    def _follow(self, path: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack and self.stack[-1] == path:
                self.stack.pop()

        before = module.register_forward_pre_hook(enter, prepend=True)
        return [before, module.register_forward_hook(leave, always_call=True)]

    @property
    def current(self) -> str:
        """The module that runs; "" outside of all of them."""
        return self.stack[-1] if self.stack else ""

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class OperatorWatch(TorchFunctionMode):
    """Calls `seen` for every operator; subclasses define what it does.

    Args:
        paths: gives the module that runs.
        closed: composites that the policy has a rule for, and which are therefore seen whole.

    Examples:
        >>> class Names(hs.lens.OperatorWatch):
        ...     def seen(self, call, func, args, kwargs):
        ...         print(call.module, call.op)
        ...         return func(*args, **kwargs)
        >>> paths = hs.lens.Paths(model)
        >>> with Names(paths).on():
        ...     out = model(x)
        0 linear
        1 relu
        2 linear
        >>> paths.remove()
    """

    def __init__(self, paths: Paths, closed: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.paths = paths
        self.closed = closed
        self.begin()

    def begin(self) -> None:
        """Count calls from zero again."""
        self._counts = Counter[tuple[str, str]]()
        self._busy = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the operators called in a block."""
        before, STATE.above = STATE.above, self
        try:
            with self:
                yield
        finally:
            STATE.above = before

    def integers_of(self, module: str) -> tuple[str, str, int]:
        """Return the name of the next conversion to integers in `module`: others come and go with a policy's casts."""
        nth = self._counts[module, "integers"]
        self._counts[module, "integers"] += 1
        return module, "integers", nth

    def frame(self) -> FrameType | None:
        """Return the innermost running frame that is neither torch's nor halfstep's."""
        return user_frame(sys._getframe(1))[0]

    def line(self) -> str:
        """Return the user's line that calls the operator: "file.py:12 source text", "" if there is none."""
        return line_of(self.frame())

    def seen(self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func(*args, **kwargs)``, measure it, and return its result."""
        raise NotImplementedError

    def unseen(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no operator: views, factories, queries."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        op, in_place = named(func)
        if not op:
            return self.unseen(func, args, kwargs)
        if func in OPENED and op not in self.closed:
            with self:
                return unreported(func)(*args, **kwargs)
        key = (self.paths.current, op)
        call = OperatorCall(*key, self._counts[key], self.line(), in_place)
        self._counts[key] += 1
        self._busy = True
        try:
            return self.seen(call, func, args, kwargs)
        finally:
            self._busy = False


def named(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return the operator that `func` is a spelling of, "" for none, and whether it works in place."""
    op = operator_name(func)
    if op is not None:
        return op, False
    return _other(getattr(func, "__name__", ""))


@cache
def _other(name: str) -> tuple[str, bool]:
    if name in CONVERSIONS:
        return CONVERSIONS[name], False
    stem = name.removeprefix("__i").removesuffix("__") if name.startswith("__i") else name.removesuffix("_")
    stem = {"truediv": "div"}.get(stem, stem)
    return (stem, True) if stem != name and not stem.endswith("_") and stem in known() else ("", False)


def is_index(tensor: Tensor) -> bool:
    """Return whether `tensor` holds integers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def floats_of(values: Any) -> list[Tensor]:
    """Return the floating tensors among `values` whose numbers can be read."""
    return [t for t in tensors(values) if t.is_floating_point() and t.layout is torch.strided and not t.is_nested]


BELOW_FP32 = LOW_DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}

Key = tuple[str, str, int]
"""Module, operator, which call of it in that module."""


@dataclass(slots=True)
class TwinResult:
    """A result of the fp32 twin: its value, its version when it was made, and its gradient."""

    value: Tensor
    version: int
    gradient: Tensor | None = None


class Reference(OperatorWatch):
    """Watches the fp32 twin: low formats in the user's code are fp32 in it, and its results are kept."""

    def __init__(self, paths: Paths, closed: frozenset[str]) -> None:
        super().__init__(paths, closed)
        self.kept: dict[Key, TwinResult] = {}
        self.integers: dict[Key, Tensor] = {}  # that were made of floating numbers
        self.weights: dict[str, Tensor] = {}

    def line(self) -> str:
        """Return "": results are found by module, operator and number."""
        return ""

    def seen(self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the first floating result."""
        if call.in_place:
            self._copy_overwritten(args[:1])
        result = self._wide(func, args, kwargs)
        found = floats_of(result)
        if not found and call.op == "to" and isinstance(result, Tensor) and is_index(result):
            self.integers[self.integers_of(call.module)] = result.clone()
        if found and found[0].numel():
            kept = TwinResult(found[0].detach(), found[0]._version)
            self.kept[call.module, call.op, call.nth] = kept
            if found[0].requires_grad:

                def arrive(gradient: Tensor) -> None:
                    kept.gradient = gradient.detach()

                found[0].register_hook(arrive)
        return result

    def unseen(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it with fp32 in place of low formats."""
        return self._wide(func, args, kwargs)

    def _wide(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in {"half", "bfloat16"} and args:
            return args[0].to(torch.float32)
        if any(type(a) is torch.dtype for a in args) or "dtype" in kwargs:
            args, kwargs = widened_dtypes(args, kwargs, torch.float32)
        return func(*args, **kwargs)

    def _copy_overwritten(self, destinations: tuple[Any, ...]) -> None:
        """Copy kept results that an operator is about to write into."""
        places = {place(t) for t in tensors(destinations)}
        for kept in self.kept.values():
            if place(kept.value) in places:
                kept.value = kept.value.clone()
                kept.version = kept.value._version


def widened_dtypes(
    args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which low dtypes are `wide`."""
    return (
        tuple(wide if type(a) is torch.dtype and a in BELOW_FP32 else a for a in args),
        {k: wide if type(v) is torch.dtype and v in BELOW_FP32 else v for k, v in kwargs.items()},
    )
