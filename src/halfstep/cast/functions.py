"""How this package calls its autograd Functions, and what their backward passes run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

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
    """Switch autocast (and with it every operator rule) off: a backward pass may run inside somebody's region."""
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, enabled)
