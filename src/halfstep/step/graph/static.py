"""Static tensors: the gradients and the scale that one micro-batch of a window leaves for the next.

A CUDA graph reads them at fixed addresses. After every micro-batch, made by a graph or eagerly, they are copied to the
same tensors, so any graph of the next place in the window can follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from halfstep.torch_private.foreach import foreach_copy_

__all__ = ["StaticTensors"]


class StaticTensors:
    """The static tensors of one training step.

    Attributes:
        scale: that of the window; None before there was one.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def static_scale(self, scale: Tensor) -> Tensor:
        """Copy `scale` and return the copy, which is the same tensor every time."""
        if self.scale is None:
            self.scale = scale.clone()
        else:
            self.scale.copy_(scale)
        return self.scale

    def make_gradients_static(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their copies; the first of each parameter is the tensor that is static."""
        static, made = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            known = self._gradients.setdefault(parameter, gradient)
            if known is not gradient:
                static.append(known)
                made.append(gradient)
                parameter.grad = known
        if static:
            foreach_copy_(static, made)
