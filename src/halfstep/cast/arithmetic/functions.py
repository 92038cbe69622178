"""How this package calls its autograd Functions, and how their backward passes run without rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from halfstep.cast.state import STATE
from halfstep.torch_private.modes import (
    are_functorch_transforms_active,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
    unwrap_dead_wrappers,
)


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call ``function.apply`` with all arguments of its forward.

    Outside of torch.func transforms this leaves out torch's search for defaults in the signature of `forward`, some
    40 us a call on a CPU; what is left is what torch does there itself.
    """
    if are_functorch_transforms_active():
        return cast(Tensor, function.apply(*inputs))
    bare: Any = super(Function, function)
    return cast(Tensor, bare.apply(*unwrap_dead_wrappers(inputs)))


@contextmanager
def rules_off(device: str) -> Iterator[None]:
    """Switch autocast (and with it every operator rule) off: a backward pass may run inside a region of the user.

    A mode that is alone on the stack has nothing to do then, and each operator costs a microsecond less without it.
    """
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    mode = _taken_off()
    try:
        yield
    finally:
        if mode is not None:
            push_on_torch_function_stack(mode)
        torch.set_autocast_enabled(device, enabled)


def _taken_off() -> Any:
    """Remove the region's mode from torch's stack, if it is there alone, and return it."""
    if STATE.mode is None or STATE.above is not None or len_torch_function_stack() != 1:
        return None
    mode = pop_torch_function_stack()
    if mode is STATE.mode:
        return mode
    push_on_torch_function_stack(mode)  # another mode
    return None
