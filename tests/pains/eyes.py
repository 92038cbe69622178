"""What the tests look at: kernels, casts, and waits for the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Calls", "Casts", "Waits"]

LOWS = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """Call `look(operator, args, result)` for every kernel."""

    def __init__(self, look: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(func, args, result)
        return result


class Casts(Calls):
    """Collect the shapes of fp32 tensors that were copied to a low format, and the copies that are still alive."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.shapes: list[tuple[int, ...]] = []
        self._copies: list[weakref.ref[Tensor]] = []

    @property
    def held(self) -> list[tuple[int, ...]]:
        """The shapes of the copies that are alive."""
        return [tuple(copy.shape) for copy in (ref() for ref in self._copies) if copy is not None]

    def _note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        # inference mode does not take `to` apart
        if func in (aten._to_copy.default, aten.to.dtype) and args[0].dtype is torch.float32 and result.dtype in LOWS:
            self.shapes.append(tuple(args[0].shape))
            self._copies.append(weakref.ref(result))


class Waits(Calls):
    """Count reads of a tensor by the host: each waits for the device."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.count = 0

    def _note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        self.count += func is aten._local_scalar_dense.default
