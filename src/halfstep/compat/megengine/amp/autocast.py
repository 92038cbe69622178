"""megengine.amp.autocast: a context manager and a decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

import halfstep as hs
from halfstep.compat.megengine.amp import state

__all__ = ["autocast"]

P = ParamSpec("P")
R = TypeVar("R")


class autocast:
    """Run operators in mixed precision, by the rules of ``amp.policy``.

    Nests and re-enters, also the same object and recursive functions; ``enabled=False`` inside another one does switch
    it off. The state is the thread's own.

    Args:
        enabled: False: operators in it are not cast.
        low_prec_dtype: format of products: "float16" or "bfloat16" ("float32": nothing is lowered).
        high_prec_dtype: format of sensitive operators: "float32", or the low one.

    Raises:
        RegionError: another dtype, a decorated generator or coroutine, or regions left in the wrong order.
    """

    def __init__(self, enabled: bool = True, low_prec_dtype: str = "float16", high_prec_dtype: str = "float32") -> None:
        self.enabled = bool(enabled)
        self.low_prec_dtype = state.precision(low_prec_dtype, "low_prec_dtype")
        self.high_prec_dtype = state.precision(high_prec_dtype, "high_prec_dtype")
        state.policy_for(state.now().policy, self.low_prec_dtype, self.high_prec_dtype)  # refuses a pair that cannot be

    def __enter__(self) -> None:
        state.push(self, enabled=self.enabled, low=self.low_prec_dtype, high=self.high_prec_dtype)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state.pop(self, failing=exc_type is not None)

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Decorate `func`: each call runs in the region, under torch.compile by the lists in force now."""
        policy = state.policy_for(state.now().policy, self.low_prec_dtype, self.high_prec_dtype)
        traced = hs.autocast(policy=policy, enabled=self.enabled)(func)  # refuses what cannot be decorated

        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return traced(*args, **kwargs)
            with self:
                return func(*args, **kwargs)

        return wrapper

    def __repr__(self) -> str:
        formats: tuple[Any, ...] = (self.enabled, self.low_prec_dtype, self.high_prec_dtype)
        return f"amp.autocast(enabled={formats[0]}, low_prec_dtype={formats[1]!r}, high_prec_dtype={formats[2]!r})"
