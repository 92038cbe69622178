"""fp32 arithmetic on low tensors, rounded once, forward and backward: what emulated operators are made of.

What a tensor core does, on any device. Inputs are saved for backward in the low format and widened again there. The
backward pass does the same with the formulas and operators of torch's own autograd: it can be differentiated again, and
an eager result is bit-equal to running the fp32 operator on widened inputs and rounding once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.state import STATE
from halfstep.torch_private.autograd import forward_ad_level
from halfstep.torch_private.modes import (
    are_functorch_transforms_active,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
    unwrap_dead_wrappers,
)


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call ``function.apply`` with all arguments of its forward.

    Outside of torch.func transforms without torch's search for defaults in its signature: some 40 us a call on a CPU.
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


def _mat1_grad(grad: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Return d(mat1 @ mat2)/d(mat1) with the operand order autograd picks for a transposed `mat1`."""
    if grad.dim() == 2 and mat1.stride() == (1, mat1.size(0)):
        return (mat2 @ grad.t()).t()
    return grad @ mat2.mT


def _mat2_grad(grad: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Return d(mat1 @ mat2)/d(mat2) with the operand order autograd picks for a transposed `mat2`."""
    if grad.dim() == 2 and mat2.stride() == (1, mat2.size(0)):
        return (grad.t() @ mat1).t()
    return mat1.mT @ grad


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


class _Product(Function):
    """mm (2-D) and bmm (3-D, equal batch): low x low -> low."""

    generate_vmap_rule = True

    forward = staticmethod(_wide_product)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with rules_off(a.device.type):
            grad, wide_a, wide_b = grads[0].float(), a.float(), b.float()
            need_a, need_b = ctx.needs_input_grad
            return (
                _mat1_grad(grad, wide_a, wide_b).to(a.dtype) if need_a else None,
                _mat2_grad(grad, wide_a, wide_b).to(b.dtype) if need_b else None,
            )


def _wide_add_product(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    operator = torch.addmm if a.dim() == 2 else torch.baddbmm
    return operator(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)


class _AddProduct(Function):
    """beta * input + alpha * (a @ b), 2-D or 3-D: addmm and baddbmm, one rounding."""

    generate_vmap_rule = True

    forward = staticmethod(_wide_add_product)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        bias, a, b, ctx.beta, ctx.alpha = inputs
        ctx.bias_shape = bias.shape
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with rules_off(a.device.type):
            grad, wide_a, wide_b = grads[0].float(), a.float(), b.float()
            need_bias, need_a, need_b = ctx.needs_input_grad[:3]
            alpha = ctx.alpha
            scaled = grad if alpha == 1 else grad * alpha
            by_bias = grad if ctx.beta == 1 else grad * ctx.beta
            return (
                by_bias.sum_to_size(ctx.bias_shape).to(a.dtype) if need_bias else None,
                _mat1_grad(scaled, wide_a, wide_b).to(a.dtype) if need_a else None,
                _mat2_grad(scaled, wide_a, wide_b).to(b.dtype) if need_b else None,
                None,
                None,
            )


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _Linear(Function):
    """x @ weight.T + bias for x of any number of leading dimensions; weight (out, in); bias (out,) or None."""

    generate_vmap_rule = True

    forward = staticmethod(_wide_linear)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with rules_off(x.device.type):
            need_x, need_weight, need_bias = ctx.needs_input_grad
            grad = grads[0].float()
            rows = grad.flatten(0, -2) if grad.dim() != 1 else grad[None]
            inputs = x.flatten(0, -2) if x.dim() != 1 else x[None]
            grad_x = grad_weight = grad_bias = None
            if need_x:
                grad_x = (rows @ weight.float()).reshape(x.shape).to(x.dtype)
            if need_weight:
                grad_weight = (rows.t() @ inputs.float()).to(weight.dtype)
            if need_bias:
                grad_bias = rows.sum(0).to(x.dtype)
            return grad_x, grad_weight, grad_bias


def _wide_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
    wide = torch.convolution(x.float(), weight.float(), None if bias is None else bias.float(), *geometry)
    return wide.to(x.dtype)


class _Convolution(Function):
    """aten::convolution in any number of dimensions, plain or transposed."""

    generate_vmap_rule = True

    forward = staticmethod(_wide_convolution)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias, geometry = inputs
        ctx.geometry = geometry
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        with rules_off(x.device.type):
            wide = torch.ops.aten.convolution_backward(
                grads[0].float(), x.float(), weight.float(), ctx.bias_sizes, *ctx.geometry, needs
            )
            return (*(g.to(x.dtype) if need else None for g, need in zip(wide, needs, strict=True)), None)


def _wide_recomputed(compute: Callable[..., Tensor], twice: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return compute(*(t.float() for t in inputs)).to(inputs[0].dtype)


class _Recomputed(Function):
    """Any differentiable `compute` of low tensors, done again in backward; by `twice` where that is differentiated."""

    generate_vmap_rule = True

    forward = staticmethod(_wide_recomputed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.compute, ctx.twice, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        compute = ctx.twice if torch.is_grad_enabled() else ctx.compute
        with rules_off(tensors[0].device.type):
            pull = torch.func.vjp(compute, *(t.float() for t in tensors))[1]
            wide = pull(grads[0].float())
            needs = ctx.needs_input_grad[2:]
            return (
                None,
                None,
                *(g.to(t.dtype) if need else None for g, t, need in zip(wide, tensors, needs, strict=True)),
            )


def _call(function: type[Function], forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call one of the Functions above, or, where it cannot stand, its `forward`; autograd records its operators.

    Dynamo traces operators, forward-mode derivatives need that of every operator, and a ragged batch has no shape.
    Dynamo breaks its graph at ``function.forward``, so that is an argument.
    """
    if torch.compiler.is_compiling() or forward_ad_level() >= 0:
        return forward(*inputs)
    if any(isinstance(value, Tensor) and value.is_nested for value in inputs):
        return forward(*inputs)
    return apply(function, *inputs)


def recomputed(compute: Callable[..., Tensor], *inputs: Tensor, twice: Callable[..., Tensor] | None = None) -> Tensor:
    """Return `compute` of `inputs`; its backward pass computes once more, by `twice` if that is differentiated too."""
    return _call(_Recomputed, _wide_recomputed, compute, twice or compute, *inputs)


def product(input: Tensor, mat2: Tensor) -> Tensor:
    """Return input @ mat2: matrices, or stacks of as many."""
    return _call(_Product, _wide_product, input, mat2)


def add_product(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * input + alpha * (mat1 @ mat2): matrices, or stacks of as many."""
    return _call(_AddProduct, _wide_add_product, input, mat1, mat2, beta, alpha)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch.nn.functional.linear of low tensors."""
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return _wide_linear(input, weight, bias)
    return _call(_Linear, _wide_linear, input, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Return torch.convolution of low tensors, `geometry` its last arguments; `x` may lack the batch dimension."""
    if x.dim() == weight.dim():
        return _call(_Convolution, _wide_convolution, x, weight, bias, geometry)
    return _call(_Convolution, _wide_convolution, x[None], weight, bias, geometry)[0]
