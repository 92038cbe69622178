"""How this package calls its autograd Functions, and what their backward passes run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

from halfstep.cast.state import STATE

__all__ = ["apply", "plain"]


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call ``function.apply`` with all arguments of its forward.

    Outside of torch.func transforms this leaves out torch's search for defaults in the signature of `forward`, some
    40 us a call on a CPU; what is left is what torch does there itself.
    """
    if torch._C._are_functorch_transforms_active():
        return cast(Tensor, function.apply(*inputs))
    bare: Any = super(Function, function)
    return cast(Tensor, bare.apply(*unwrap_dead_wrappers(inputs)))


@contextmanager
def plain(device: str) -> Iterator[None]:
    """Switch autocast (and with it every operator rule) off: a backward pass may run inside somebody's region.

    A mode that lies on the stack alone has nothing to do then, and each operator costs a microsecond less without it.
    """
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    mode = _taken_off()
    try:
        yield
    finally:
        if mode is not None:
            _push_on_torch_function_stack(mode)
        torch.set_autocast_enabled(device, enabled)


def _taken_off() -> Any:
    """Take the region's mode off torch's stack, if it lies there alone, and return it."""
    if STATE.mode is None or STATE.above is not None or _len_torch_function_stack() != 1:
        return None
    mode = _pop_torch_function_stack()
    if mode is STATE.mode:
        return mode
    _push_on_torch_function_stack(mode)  # somebody's own
    return None
