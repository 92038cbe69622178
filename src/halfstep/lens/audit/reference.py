"""Reference: the fp32 run of the whole model, whose results wait for the audited run to come by the same calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.lens.audit.watch import Call, Paths, Watch, floats_of, is_index, tensors_in

__all__ = ["LOWS", "Key", "Kept", "Reference", "widened_dtypes"]

LOWS = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})

Key = tuple[str, str, int]
"""Module, operator, which call of it in that module."""


@dataclass(slots=True)
class Kept:
    """A result of the fp32 twin: its value, its version when it was made, and its gradient."""

    value: Tensor
    version: int
    gradient: Tensor | None = None


class Reference(Watch):
    """Watches the fp32 twin: low formats that the user's code asks for are fp32 in it, and its results are kept."""

    def __init__(self, paths: Paths, closed: frozenset[str]) -> None:
        super().__init__(paths, closed)
        self.kept: dict[Key, Kept] = {}
        self.integers: dict[Key, Tensor] = {}  # that were made of floating numbers
        self.weights: dict[str, Tensor] = {}

    def line(self) -> str:
        """Return "": results are found by module, operator and number."""
        return ""

    def seen(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the first floating result."""
        if call.in_place:
            self._rescue(args[:1])
        result = self._wide(func, args, kwargs)
        found = floats_of(result)
        if not found and call.op == "to" and isinstance(result, Tensor) and is_index(result):
            self.integers[self.integers_of(call.module)] = result.clone()
        if found and found[0].numel():
            kept = Kept(found[0].detach(), found[0]._version)
            self.kept[call.module, call.op, call.nth] = kept
            if found[0].requires_grad:

                def arrive(gradient: Tensor) -> None:
                    kept.gradient = gradient.detach()

                found[0].register_hook(arrive)
        return result

    def unseen(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let no low format come about."""
        return self._wide(func, args, kwargs)

    def _wide(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in {"half", "bfloat16"} and args:
            return args[0].to(torch.float32)
        if any(type(a) is torch.dtype for a in args) or "dtype" in kwargs:
            args, kwargs = widened_dtypes(args, kwargs, torch.float32)
        return func(*args, **kwargs)

    def _rescue(self, destinations: tuple[Any, ...]) -> None:
        """Copy kept results that an operator is about to write into."""
        places = {t.untyped_storage().data_ptr() for t in tensors_in(destinations)}
        for kept in self.kept.values():
            if kept.value.untyped_storage().data_ptr() in places:
                kept.value = kept.value.clone()
                kept.version = kept.value._version


def widened_dtypes(
    args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which low dtypes are `wide`."""
    return (
        tuple(wide if type(a) is torch.dtype and a in LOWS else a for a in args),
        {k: wide if type(v) is torch.dtype and v in LOWS else v for k, v in kwargs.items()},
    )
