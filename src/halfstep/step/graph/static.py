"""What one micro-batch of an accumulation window leaves for the next, in tensors that stay where they are.

A CUDA graph knows its gradients and the scale of the window by their addresses. Copied into the same tensors after
every micro-batch, whichever graph or eager call made them, they can be read by whichever comes next.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Pins"]


class Pins:
    """The tensors that stay.

    Attributes:
        scale: that of the window; None before there was one.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def pinned_scale(self, scale: Tensor) -> Tensor:
        """Copy `scale` and return the copy, which is the same tensor every time."""
        if self.scale is None:
            self.scale = scale.clone()
        else:
            self.scale.copy_(scale)
        return self.scale

    def pin_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their copies; the first of each parameter is the tensor that stays."""
        pinned, made = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            known = self._gradients.setdefault(parameter, gradient)
            if known is not gradient:
                pinned.append(known)
                made.append(gradient)
                parameter.grad = known
        if pinned:
            torch._foreach_copy_(pinned, made)
