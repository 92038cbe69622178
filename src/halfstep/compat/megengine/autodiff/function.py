"""megengine.autodiff.Function: an operator with a backward pass of the user's own, over torch.autograd.Function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.compat.megengine.amp.autocast import now, policy_for
from halfstep.compat.megengine.autodiff.grad_manager import nested
from halfstep.compat.shared import listed

__all__ = ["Function"]


class FunctionError(hs.errors.StepError, TypeError):
    """A Function that was called with, or returned, something else than tensors."""


class Function:
    """An operator: define `forward` and `backward`, then call an instance, once for each forward pass.

    What `backward` needs is kept in attributes of the instance. It runs in the `amp.autocast` that `forward` ran in.

    Examples:
        >>> class Scaled(Function):
        ...     def forward(self, x):
        ...         return x * 10
        ...
        ...     def backward(self, dy):
        ...         return dy * 10
        >>> y = Scaled()(x)
    """

    # With **named a type checker lets subclasses name the arguments, all of which are positional.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return a tensor or a tuple of tensors; every subclass defines it. What happens in it is not recorded."""
        raise hs.errors.UnbuiltError(f"{type(self).__name__} has no forward; define forward(self, ...)")

    def backward(self, *output_grads: Any, **named: Any) -> Any:
        """Return the gradient of the only input, or a tuple with that of each; None: it has none.

        Args:
            *output_grads: of each output; None for one that the loss does not depend on.
            **named: nothing.
        """
        raise hs.errors.UnbuiltError(f"{type(self).__name__} has no backward; define backward(self, ...)")

    def __call__(self, *inputs: Tensor) -> Any:
        """Compute the outputs.

        Raises:
            FunctionError: an input or an output is not a tensor; it is a TypeError too.
        """
        name = type(self).__name__
        for value in inputs:
            if not isinstance(value, Tensor):
                raise FunctionError(
                    f"op {name} expect type Tensor as inputs, got {type(value).__name__}; give that to its constructor"
                )
        # A manager around the innermost one differentiates the backward pass, and so what forward keeps for it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and nested()):
            outputs = self.forward(*inputs)
        if not all(isinstance(value, Tensor) for value in listed(outputs)) or outputs is None:
            raise FunctionError(f"{name}.forward returned {outputs!r}; expected a tensor or a tuple of tensors")
        frame = now()
        region: Any = hs.suspended()
        if frame.enabled:
            region = hs.autocast(policy=policy_for(frame.policy, frame.low, frame.high))
        apply: Any = _Applied.apply
        made = apply(self.backward, region, tuple(value.detach() for value in listed(outputs)), *inputs)
        return made[0] if isinstance(outputs, Tensor) else made


class _Applied(torch.autograd.Function):
    """Outputs that were computed already, as results of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], region: Any, outputs: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given, ctx.region, ctx.count = backward, region, len(inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> Any:
        with ctx.region:
            found = ctx.given(*output_grads)
        gradients = (found,) if found is None or isinstance(found, Tensor) else tuple(found)
        if len(gradients) != ctx.count:
            raise FunctionError(
                f"{ctx.given.__qualname__} returned {len(gradients)} gradients for {ctx.count} inputs; return one for "
                "each, None for an input that has none"
            )
        return (None, None, None, *gradients)
