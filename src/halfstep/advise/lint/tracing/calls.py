"""Calls: the operators that a model and its loss call in one step, with place, formats and what their numbers show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from halfstep.formats import LOW_DTYPES
from halfstep.lens import OperatorCall, OperatorSink, user_frame
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors

READS = frozenset(
    "item tolist numpy __bool__ __float__ __int__ __index__ is_nonzero nonzero equal allclose masked_select unique "
    "unique_consecutive".split()
)
"""Functions for whose result, or its shape, the host waits."""

MAKES = frozenset(
    "to float double half bfloat16 type type_as contiguous clone detach unsqueeze squeeze view reshape expand "
    "expand_as transpose permute flatten __getitem__ __get__ clamp add sub sqrt max".split()
)
"""Functions whose result stands for their argument where a formula of several operators is looked for."""

MASKED_ROW = "masked row"  # a softmax over values that are all -inf
INFINITE_DERIVATIVE = "infinite derivative"  # an argument where the operator's derivative is infinite or nan
NOT_FINITE = "not finite"  # a result with inf or nan from finite arguments
CAST_OVERFLOW = "cast overflow"  # a cast to a low format that makes inf of finite numbers
ROUNDED_INTEGERS = "rounded integers"  # whole numbers, as positions, of which a low format makes different ones equal

SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
BOUNDARY = {"sqrt": 0.0, "acos": 1.0, "asin": 1.0}
"""Operator -> magnitude at which its derivative is infinite."""
MASKS = frozenset({"masked_fill", "masked_scatter", "where", "pad", "to", "cat", "stack", "full_like"})
OF_POSITIONS = frozenset({"matmul", "mm", "bmm", "mul", "einsum", "outer", "linear", "to"})
MOST_ELEMENTS = 1 << 22
"""Elements up to which values are examined: a reading costs a pass over memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """One call of an operator, with its floating tensors as the user's code gives them."""

    op: str
    module: str
    file: str  # of the innermost frame that is neither torch's nor halfstep's, "" and line 0 if there is none
    line: int
    in_place: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    function: str  # the torch.autograd.Function whose forward calls it
    gradients: bool  # autograd records
    shows: frozenset[str]  # what its numbers show: "masked row", ...


class StepSink(OperatorSink):
    """Records the operators of a forward pass before the policy casts; keeps their tensors, as ids must be unique."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self.reads: list[tuple[str, str, int]] = []  # where the host waits for a value: function, file, line
        self._origins: dict[int, int] = {}
        self._kept: list[Any] = []

    def origin(self, tensor: Tensor) -> int:
        """Return the identity of what `tensor` is a view, a cast or a guarded copy of, or its own."""
        return self._origins.get(id(tensor), id(tensor))

    def line(self) -> str:
        """Return "path:12"."""
        frame = user_frame()
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ":0"

    def operator(
        self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operator and record it."""
        inputs, function = _floating((args, kwargs)), self._function()
        before = _shown(call.op, args, kwargs)
        result = func(*args, **kwargs)
        outputs = _floating(result)
        file, _, line = call.line.rpartition(":")
        shows, gradients = _shown(call.op, args, kwargs, outputs, before), torch.is_grad_enabled()
        traced = TracedCall(
            op=call.op, module=call.module, file=file, line=int(line), in_place=call.in_place, inputs=inputs,
            outputs=outputs, numbers=_numbers(args, kwargs), function=function, gradients=gradients, shows=shows,
        )  # fmt: skip
        self.calls.append(traced)
        self._follow(call.op, func, args, result)
        return result

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no operator; the host may wait for it."""
        result = func(*args, **kwargs)
        self._follow("", func, args, result)
        return result

    def _follow(self, op: str, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(t.dtype in {torch.bool, torch.uint8} for t in tensors(args[1:]))
        if name in READS or op in READS or by_mask:
            file, _, line = self.line().rpartition(":")
            self.reads.append(("x[mask]" if name == "__getitem__" else name or op, file, int(line)))
        if not isinstance(result, Tensor):
            return
        self._kept.append(result)
        if (name in MAKES or op in MAKES) and args and isinstance(args[0], Tensor) and result is not args[0]:
            self._kept.append(args[0])
            self._origins[id(result)] = self.origin(args[0])

    def _function(self) -> str:
        """Return the autograd.Function whose forward runs, by the context that it is given."""
        frame = user_frame()
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                context = frame.f_locals.get(code.co_varnames[0])
                if isinstance(context, FunctionCtx):
                    return type(context).__name__.removesuffix("Backward")
            frame = frame.f_back
        return ""


def _numbers(args: Any, kwargs: Any) -> tuple[float, ...]:
    return tuple(a for a in (*args, *kwargs.values()) if type(a) is float)


def _floating(tree: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors(tree) if t.is_floating_point() and t.layout is torch.strided)


# ------------------------------------------------------------------ what numbers show


def _shown(
    op: str, args: Any, kwargs: Any, outputs: tuple[Tensor, ...] = (), before: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return what the arguments show, or, given the results and what was found `before`, what the call shows."""
    inputs = _floating((args, kwargs))
    if any(t.numel() > MOST_ELEMENTS for t in (*inputs, *outputs)) or any(t.is_meta for t in inputs):
        return frozenset()
    with DisableTorchFunction(), torch.no_grad():
        if not outputs:
            return frozenset(_of_arguments(op, inputs, args, kwargs))
        return frozenset(_of_results(op, outputs, before))


def _of_arguments(op: str, inputs: tuple[Tensor, ...], args: Any, kwargs: Any) -> Iterator[str]:
    if op in OF_POSITIONS:
        for tensor in tensors((args, kwargs)):
            if not tensor.requires_grad and tensor.layout is torch.strided:
                yield from (f"whole {dtype}" for dtype in _merging(tensor))
    first = inputs[0].detach() if inputs else None
    if first is None or not first.numel():
        return
    if op in SOFTMAXES and first.dim():
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
        if isinstance(dim, int) and bool((first == -math.inf).all(dim).any()):
            yield MASKED_ROW
    power = args[1] if op == "pow" and len(args) > 1 else None
    infinite = op in BOUNDARY and bool((first.abs() == BOUNDARY[op]).any())
    if isinstance(power, float) and 0 < power < 1:
        infinite = bool((first == 0).any())
    if infinite and inputs[0].requires_grad:
        yield INFINITE_DERIVATIVE
    numbers = _numbers(args, kwargs)
    if all(bool(torch.isfinite(t.detach()).all()) for t in inputs) and all(map(math.isfinite, numbers)):
        yield "finite"


def _merging(values: Tensor) -> Iterator[torch.dtype]:
    """Yield the low formats in which different ones of `values`, if they are whole numbers, become equal."""
    if values.dtype in LOW_DTYPES or values.dtype is torch.bool or values.is_complex() or values.numel() < 2:
        return
    wide = values.double()
    if bool(torch.isfinite(wide).all()) and bool((wide == wide.round()).all()):
        different = wide.unique()
        yield from (d for d in LOW_DTYPES if different.to(d).unique().numel() < different.numel())


def _of_results(op: str, outputs: tuple[Tensor, ...], before: frozenset[str]) -> Iterator[str]:
    low = outputs[0].dtype in LOW_DTYPES
    yield from before & {MASKED_ROW, INFINITE_DERIVATIVE}
    if "finite" in before and not all(bool(torch.isfinite(t.detach()).all()) for t in outputs):
        if op == "to" and low:
            yield CAST_OVERFLOW
        elif op not in MASKS and any(t.requires_grad for t in outputs):
            yield NOT_FINITE
    if f"whole {outputs[0].dtype}" in before:
        yield ROUNDED_INTEGERS
