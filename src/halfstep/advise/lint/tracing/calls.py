"""Calls: the operators that a model and its loss call in one step, with place, formats and what their numbers show.

`StepSink` receives every operator as the user's code calls it, before the policy casts, and what comes back after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from halfstep.advise.lint.tracing.numbers import shown
from halfstep.lens import OperatorCall, OperatorSink, user_frame
from halfstep.trees import tensors

__all__ = ["StepSink", "TracedCall"]

READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "is_nonzero", "nonzero", "equal"}
    | {"allclose", "masked_select", "unique", "unique_consecutive"}
)
"""Functions for whose result, or its shape, the host waits."""

MAKES = frozenset(
    (
        "to float double half bfloat16 type type_as contiguous clone detach unsqueeze squeeze view reshape expand "
        "expand_as transpose permute flatten __getitem__ __get__ clamp add sub sqrt max"
    ).split()
)
"""Functions whose result stands for their argument where a formula of several operators is looked for."""


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
    shows: frozenset[str]  # see `numbers`


class StepSink(OperatorSink):
    """Records the operators of a forward pass. Keeps their tensors, so that no identity comes twice."""

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
        before = shown(call.op, args, kwargs)
        result = func(*args, **kwargs)
        outputs = _floating(result)
        file, _, line = call.line.rpartition(":")
        self.calls.append(
            TracedCall(
                op=call.op,
                module=call.module,
                file=file,
                line=int(line),
                in_place=call.in_place,
                inputs=inputs,
                outputs=outputs,
                numbers=tuple(a for a in (*args, *kwargs.values()) if type(a) is float),
                function=function,
                gradients=torch.is_grad_enabled(),
                shows=frozenset(shown(call.op, args, kwargs, outputs, before)),
            )
        )
        self._follow(call.op, func, args, result)
        return result

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no operator; the host may wait for it."""
        result = func(*args, **kwargs)
        self._follow("", func, args, result)
        return result

    def _follow(self, op: str, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in READS or op in READS or (name == "__getitem__" and _by_mask(args)):
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


def _floating(tree: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors(tree) if t.is_floating_point() and t.layout is torch.strided)


def _by_mask(args: tuple[Any, ...]) -> bool:
    return any(t.dtype in {torch.bool, torch.uint8} for t in tensors(args[1:]))
