"""Reference: the fp32 run of the whole model, whose results are kept for the audited run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.formats import LOW_DTYPES
from halfstep.lens.calls import place
from halfstep.lens.tracing import OperatorCall, OperatorSink
from halfstep.trees import tensors

__all__ = ["BELOW_FP32", "Reference", "TwinResult", "floats_of", "integers_key", "is_index", "widened_dtypes"]

BELOW_FP32 = LOW_DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}

Key = tuple[str, str, int]
"""Module, operator, which call of it in that module."""


def is_index(tensor: Tensor) -> bool:
    """Return whether `tensor` holds integers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def floats_of(values: Any) -> list[Tensor]:
    """Return the floating tensors among `values` whose numbers can be read."""
    return [t for t in tensors(values) if t.is_floating_point() and t.layout is torch.strided and not t.is_nested]


def integers_key(sink: OperatorSink, call: OperatorCall) -> Key:
    """Return the key of the next conversion to integers: other conversions come and go with a policy's casts."""
    return call.module, "integers", sink.nth(call.module, "integers")


def widened_dtypes(
    args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which low dtypes are `wide`."""
    return (
        tuple(wide if type(a) is torch.dtype and a in BELOW_FP32 else a for a in args),
        {k: wide if type(v) is torch.dtype and v in BELOW_FP32 else v for k, v in kwargs.items()},
    )


@dataclass(slots=True)
class TwinResult:
    """A result of the fp32 twin: its value, its version when it was made, and its gradient."""

    value: Tensor
    version: int
    gradient: Tensor | None = None


class Reference(OperatorSink):
    """Receives the operators of the fp32 run: low formats in the user's code are fp32 in it, and results are kept.

    Args:
        closed: composites that the policy has a rule for.
        model: the fp32 twin.

    Attributes:
        kept: its results; `integers`: those made of floating numbers; `weights`: gradients by name.
        loss: of the last run.
    """

    def __init__(self, closed: frozenset[str], model: nn.Module) -> None:
        self.model, self.loss = model, 0.0
        super().__init__(closed)

    def begin(self) -> None:
        """Begin a step."""
        super().begin()
        self.kept: dict[Key, TwinResult] = {}
        self.integers: dict[Key, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def line(self) -> str:
        """Return "": results are found by module, operator and number."""
        return ""

    def operator(
        self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Keep the first floating result."""
        if call.in_place:
            self._copy_overwritten({place(t) for t in tensors(args[:1])})
        result = self.other(func, args, kwargs)
        found = floats_of(result)
        if not found and call.op == "to" and isinstance(result, Tensor) and is_index(result):
            self.integers[integers_key(self, call)] = result.clone()
        if found and found[0].numel():
            kept = TwinResult(found[0].detach(), found[0]._version)
            self.kept[call.module, call.op, call.nth] = kept
            if found[0].requires_grad:

                def arrive(gradient: Tensor) -> None:
                    kept.gradient = gradient.detach()

                found[0].register_hook(arrive)
        return result

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it with fp32 in place of low formats."""
        if getattr(func, "__name__", "") in {"half", "bfloat16"} and args:
            return args[0].to(torch.float32)
        if any(type(a) is torch.dtype for a in args) or "dtype" in kwargs:
            args, kwargs = widened_dtypes(args, kwargs, torch.float32)
        return func(*args, **kwargs)

    def _copy_overwritten(self, places: set[int]) -> None:
        """Copy kept results that an operator is about to write into."""
        for kept in self.kept.values():
            if place(kept.value) in places:
                kept.value = kept.value.clone()
                kept.version = kept.value._version
