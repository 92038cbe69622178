"""fp32 arithmetic on low tensors, rounded once, forward and backward: what emulated operators are made of.

What a tensor core does, on any device. Inputs are saved for backward in the low format and widened again there. The
backward pass does the same with the formulas and operators of torch's own autograd: it can be differentiated again, and
an eager result is bit-equal to running the fp32 operator on widened inputs and rounding once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

Needs = Sequence[bool]
"""Whether the gradient of each input is needed."""

Gradients = tuple[Tensor | None, ...]


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


# ------------------------------------------------------------------ operators, and their gradients in fp32


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def _product_gradients(needs: Needs, grad: Tensor, a: Tensor, b: Tensor) -> Gradients:
    wide_a, wide_b = a.float(), b.float()
    of_a = _mat1_grad(grad, wide_a, wide_b) if needs[0] else None
    return of_a, _mat2_grad(grad, wide_a, wide_b) if needs[1] else None


def _add_product(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    operator = torch.addmm if a.dim() == 2 else torch.baddbmm
    return operator(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)


def _add_product_gradients(
    needs: Needs, grad: Tensor, shape: torch.Size, a: Tensor, b: Tensor, beta: float, alpha: float
) -> Gradients:
    by_bias = grad if beta == 1 else grad * beta
    of_bias = by_bias.sum_to_size(shape) if needs[0] else None
    return of_bias, *_product_gradients(needs[1:], grad if alpha == 1 else grad * alpha, a, b), None, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _linear_gradients(needs: Needs, grad: Tensor, x: Tensor, weight: Tensor, shape: torch.Size | None) -> Gradients:
    rows = grad.flatten(0, -2) if grad.dim() != 1 else grad[None]
    inputs = x.flatten(0, -2) if x.dim() != 1 else x[None]
    of_x = (rows @ weight.float()).reshape(x.shape) if needs[0] else None
    of_weight = rows.t() @ inputs.float() if needs[1] else None
    return of_x, of_weight, rows.sum(0) if needs[2] else None


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
    wide = torch.convolution(x.float(), weight.float(), None if bias is None else bias.float(), *geometry)
    return wide.to(x.dtype)


def _convolution_gradients(
    needs: Needs, grad: Tensor, x: Tensor, weight: Tensor, shape: torch.Size | None, geometry: tuple[Any, ...]
) -> Gradients:
    sizes = None if shape is None else list(shape)
    masks = list(needs[:3])
    wide = torch.ops.aten.convolution_backward(grad, x.float(), weight.float(), sizes, *geometry, masks)
    return *(g if need else None for g, need in zip(wide, masks, strict=True)), None


def _recomputed(compute: Callable[..., Tensor], twice: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return compute(*(t.float() for t in inputs)).to(inputs[0].dtype)


def _recomputed_gradients(needs: Needs, grad: Tensor, compute: Any, twice: Any, *inputs: Tensor) -> Gradients:
    pull = torch.func.vjp(twice if torch.is_grad_enabled() else compute, *(t.float() for t in inputs))[1]
    return None, None, *(g if need else None for g, need in zip(pull(grad), needs[2:], strict=True))


GRADIENTS: Mapping[Callable[..., Tensor], tuple[Callable[..., Gradients], int | None]] = {
    _product: (_product_gradients, None),  # matrices, or stacks of as many
    _add_product: (_add_product_gradients, 0),  # beta * input + alpha * (a @ b): addmm and baddbmm
    _linear: (_linear_gradients, 2),  # x @ weight.T + bias, x of any number of dimensions
    _convolution: (_convolution_gradients, 2),  # in any number of dimensions, plain or transposed
    _recomputed: (_recomputed_gradients, None),  # any `compute`; by `twice` where its gradient is differentiated
}
"""Operator of low inputs -> its gradients, and the input of which these need no more than the shape: a bias."""

SAVED = object()


class _Rounded(Function):
    """An operator of `GRADIENTS`; result and gradients are rounded once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return operator(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operator, *given = inputs
        ctx.gradients, bias = GRADIENTS[operator]
        if bias is not None and given[bias] is not None:
            given[bias] = given[bias].shape
        ctx.save_for_backward(*(one for one in given if isinstance(one, Tensor)))
        ctx.given = [SAVED if isinstance(one, Tensor) else one for one in given]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if one is SAVED else one for one in ctx.given]
        low = grads[0].dtype
        with rules_off(grads[0].device.type):
            found = ctx.gradients(ctx.needs_input_grad[1:], grads[0].float(), *given)
        dtypes = [one.dtype if isinstance(one, Tensor) else low for one in given]  # a norm's weights may be fp32
        return None, *(None if g is None else g.to(dtype) for g, dtype in zip(found, dtypes, strict=True))


def _call(operator: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call an operator of `GRADIENTS`, or, where its Function cannot stand, have autograd record what it does.

    Dynamo traces operators, forward-mode derivatives need that of every operator, and a ragged batch has no shape.
    """
    if torch.compiler.is_compiling() or forward_ad_level() >= 0:
        return operator(*inputs)
    if any(isinstance(value, Tensor) and value.is_nested for value in inputs):
        return operator(*inputs)
    return apply(_Rounded, operator, *inputs)


def recomputed(compute: Callable[..., Tensor], *inputs: Tensor, twice: Callable[..., Tensor] | None = None) -> Tensor:
    """Return `compute` of `inputs`; its backward pass computes once more, by `twice` if that is differentiated too."""
    return _call(_recomputed, compute, twice or compute, *inputs)


def product(input: Tensor, mat2: Tensor) -> Tensor:
    """Return input @ mat2: matrices, or stacks of as many."""
    return _call(_product, input, mat2)


def add_product(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta * input + alpha * (mat1 @ mat2): matrices, or stacks of as many."""
    return _call(_add_product, input, mat1, mat2, beta, alpha)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch.nn.functional.linear of low tensors."""
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return _linear(input, weight, bias)
    return _call(_linear, input, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Return torch.convolution of low tensors, `geometry` its last arguments; `x` may lack the batch dimension."""
    if x.dim() == weight.dim():
        return _call(_convolution, x, weight, bias, geometry)
    return _call(_convolution, x[None], weight, bias, geometry)[0]
