"""Low-precision operators on devices without the units for them.

What a tensor core does, on any device: low inputs, fp32 compute, one rounding of the result. Inputs are saved for
backward in the low format and widened again there, so memory is that of the low format; the backward pass does the
same (low gradient in, fp32 compute, one rounding out), with the formulas torch's own autograd uses, so that an eager
result is bit-equal to running the fp32 operator on widened inputs and rounding once.

Backward functions are plain torch operators: they can be differentiated again. Under `torch.compile` the operators are
written as widen, compute, round; the compiler's partitioner decides what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad
from torch.nn import functional as F

from halfstep.cast.state import STATE
from halfstep.trees import map_tensors, tensors

__all__ = ["EMULATED", "RECURRENT", "REFLECTED", "WIDENED", "apply", "emulation_of", "plain", "widened"]

_aten = torch.ops.aten


def _round(wide: Tensor, low: Tensor) -> Tensor:
    """Round fp32 `wide` once to the format of `low`."""
    return wide.to(low.dtype)


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


class _Product(Function):
    """mm (2-D) and bmm (3-D, equal batch): low x low -> low."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _round(a.float() @ b.float(), a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with plain(a.device.type):
            grad, wide_a, wide_b = grads[0].float(), a.float(), b.float()
            need_a, need_b = ctx.needs_input_grad
            return (
                _round(_mat1_grad(grad, wide_a, wide_b), a) if need_a else None,
                _round(_mat2_grad(grad, wide_a, wide_b), b) if need_b else None,
            )


class _AddProduct(Function):
    """beta * input + alpha * (a @ b), 2-D or 3-D: addmm and baddbmm, one rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(bias: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
        operator = torch.addmm if a.dim() == 2 else torch.baddbmm
        return _round(operator(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha), a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        bias, a, b, ctx.beta, ctx.alpha = inputs
        ctx.bias_shape = bias.shape
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with plain(a.device.type):
            grad, wide_a, wide_b = grads[0].float(), a.float(), b.float()
            need_bias, need_a, need_b = ctx.needs_input_grad[:3]
            alpha = ctx.alpha
            scaled = grad if alpha == 1 else grad * alpha
            by_bias = grad if ctx.beta == 1 else grad * ctx.beta
            return (
                _round(by_bias.sum_to_size(ctx.bias_shape), a) if need_bias else None,
                _round(_mat1_grad(scaled, wide_a, wide_b), a) if need_a else None,
                _round(_mat2_grad(scaled, wide_a, wide_b), b) if need_b else None,
                None,
                None,
            )


class _Linear(Function):
    """x @ weight.T + bias for x of any number of leading dimensions; weight (out, in); bias (out,) or None."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _round(F.linear(x.float(), weight.float(), None if bias is None else bias.float()), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with plain(x.device.type):
            need_x, need_weight, need_bias = ctx.needs_input_grad
            grad = grads[0].float()
            rows = grad.flatten(0, -2) if grad.dim() != 1 else grad[None]
            inputs = x.flatten(0, -2) if x.dim() != 1 else x[None]
            grad_x = grad_weight = grad_bias = None
            if need_x:
                grad_x = _round((rows @ weight.float()).reshape(x.shape), x)
            if need_weight:
                grad_weight = _round(rows.t() @ inputs.float(), weight)
            if need_bias:
                grad_bias = _round(rows.sum(0), x)
            return grad_x, grad_weight, grad_bias


class _Convolution(Function):
    """aten::convolution in any number of dimensions, plain or transposed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
        wide = torch.convolution(x.float(), weight.float(), None if bias is None else bias.float(), *geometry)
        return _round(wide, x)

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
        with plain(x.device.type):
            wide = _aten.convolution_backward(
                grads[0].float(), x.float(), weight.float(), ctx.bias_sizes, *ctx.geometry, needs
            )
            return (*(_round(g, x) if need else None for g, need in zip(wide, needs, strict=True)), None)


class _Recomputed(Function):
    """Any differentiable function of low tensors: the backward pass computes the fp32 operator once more.

    `compute` serves forward and backward; `twice` replaces it where the backward itself is to be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(compute: Callable[..., Tensor], twice: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return _round(compute(*(t.float() for t in inputs)), inputs[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.compute, ctx.twice, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        compute = ctx.twice if torch.is_grad_enabled() else ctx.compute
        with plain(tensors[0].device.type):
            pull = torch.func.vjp(compute, *(t.float() for t in tensors))[1]
            wide = pull(grads[0].float())
            needs = ctx.needs_input_grad[2:]
            return (
                None,
                None,
                *(_round(g, t) if need else None for g, t, need in zip(wide, tensors, needs, strict=True)),
            )


def apply(function: type[Function], *inputs: Any) -> Tensor:
    """Call ``function.apply`` with all arguments of its forward.

    Outside of torch.func transforms this leaves out torch's search for defaults in the signature of `forward`, some
    40 us a call on a CPU; what is left is what torch does there itself.
    """
    if torch._C._are_functorch_transforms_active():
        return cast(Tensor, function.apply(*inputs))
    bare: Any = super(Function, function)
    return cast(Tensor, bare.apply(*unwrap_dead_wrappers(inputs)))


def _recorded(*inputs: Tensor) -> bool:
    """Return whether widening and rounding must be operators of their own: the Functions above cannot stand here.

    Dynamo traces operators, forward-mode derivatives want every operator's own, and a ragged batch has no shape.
    """
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or any(t.is_nested for t in inputs)


def _recomputed(compute: Callable[..., Tensor], *inputs: Tensor, twice: Callable[..., Tensor] | None = None) -> Tensor:
    if _recorded(*inputs):
        return _round(compute(*(t.float() for t in inputs)), inputs[0])
    return apply(_Recomputed, compute, twice or compute, *inputs)


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    return _product(input, mat2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if _recorded(a, b):
        return _round(a.float() @ b.float(), a)
    return apply(_Product, a, b)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """torch.matmul: the shapes of neural networks take the saved-low path, the rest is recomputed."""
    if input.is_nested or other.is_nested:
        return _round(torch.matmul(input.float(), other.float()), input)
    if input.dim() == 2 == other.dim():
        return _product(input, other)
    if input.dim() >= 3 and other.dim() == 2:
        return _product(input.flatten(0, -2), other).reshape(*input.shape[:-1], other.shape[-1])
    if input.dim() >= 3 and input.shape[:-2] == other.shape[:-2]:
        shape = (*input.shape[:-1], other.shape[-1])
        return _product(input.flatten(0, -3), other.flatten(0, -3)).reshape(shape)
    return _recomputed(torch.matmul, input, other)


def _rmatmul(input: Tensor, other: Tensor) -> Tensor:
    return _matmul(other, input)


def _add_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if _recorded(bias, a, b):
        operator = torch.addmm if a.dim() == 2 else torch.baddbmm
        return _round(operator(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha), a)
    return apply(_AddProduct, bias, a, b, beta, alpha)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add_product(input, mat1, mat2, beta=beta, alpha=alpha)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add_product(input, batch1, batch2, beta=beta, alpha=alpha)


def _mv(input: Tensor, vec: Tensor) -> Tensor:
    return _recomputed(torch.mv, input, vec)


def _addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _recomputed(lambda *t: torch.addmv(*t, beta=beta, alpha=alpha), input, mat, vec)


def _addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _recomputed(lambda *t: torch.addbmm(*t, beta=beta, alpha=alpha), input, batch1, batch2)


def _einsum(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):  # the sublist form: operand, sublist, operand, sublist, ..., [output]
        flat = (equation, *operands)
        tensors = tuple(t for t in flat if isinstance(t, Tensor))
        lists = [s for s in flat if not isinstance(s, Tensor)]

        def compute(*wide: Tensor) -> Tensor:
            pairs = [item for pair in zip(wide, lists, strict=False) for item in pair]
            return torch.einsum(*pairs, *lists[len(wide) :])

        return _recomputed(compute, *tensors)
    return _recomputed(lambda *wide: torch.einsum(equation, *wide), *operands)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    plain = weight.dim() == 2 and (bias is None or bias.dim() == 1)
    if not plain or _recorded(input, weight):
        return _round(F.linear(input.float(), weight.float(), None if bias is None else bias.float()), input)
    return apply(_Linear, input, weight, bias)


def _each(value: Any, dims: int) -> list[int]:
    """Spread a stride, padding or dilation over `dims` spatial dimensions."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * dims if len(values) == 1 else values


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    batched = x.dim() == weight.dim()
    x = x if batched else x[None]
    if _recorded(x, weight):
        wide = torch.convolution(x.float(), weight.float(), None if bias is None else bias.float(), *geometry)
        out = _round(wide, x)
    else:
        out = apply(_Convolution, x, weight, bias, geometry)
    return out if batched else out[0]


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    dims = weight.dim() - 2
    dilation = _each(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):  # an odd total is padded at the far end first, as torch does
            input = F.pad(input, [side for t in reversed(total) for side in (0, t % 2)])
    return _convolve(
        input, weight, bias, _each(stride, dims), _each(padding, dims), dilation, False, [0] * dims, groups
    )


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    dims = weight.dim() - 2
    spread = [_each(v, dims) for v in (stride, padding, dilation)]
    return _convolve(input, weight, bias, *spread, True, _each(output_padding, dims), groups)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention; with dropout the probabilities are kept (a recomputation would draw others)."""
    low_mask = attn_mask is not None and attn_mask.is_floating_point()
    floats = (query, key, value, attn_mask) if low_mask else (query, key, value)

    def compute(*wide: Tensor) -> Tensor:
        q, k, v = wide[:3]
        mask = wide[3] if low_mask else attn_mask
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def differentiable_twice(*wide: Tensor) -> Tensor:  # fused attention kernels have no second derivative
        q, k, v = wide[:3]
        mask = wide[3] if low_mask else attn_mask
        if mask is not None and not mask.is_floating_point():  # the math kernel takes additive masks only
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
        return torch._scaled_dot_product_attention_math(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    tensors = cast("tuple[Tensor, ...]", floats)
    if dropout_p > 0:
        return _round(compute(*(t.float() for t in tensors)), query)
    return _recomputed(compute, *tensors, twice=differentiable_twice)


LOWS = frozenset({torch.float16, torch.bfloat16})


def widened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` computed in fp32 from low tensors, every result rounded once (sequences, rare products).

    The widening and the rounding are recorded by autograd, so gradients are rounded once where they leave; what `func`
    saves for its backward pass is fp32.
    """

    def wide(*args: Any, **kwargs: Any) -> Any:
        low = next((t.dtype for t in tensors((args, kwargs)) if t.dtype in LOWS), None)
        if low is None:
            return func(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), lambda t: t.float() if t.dtype in LOWS else t)
        return map_tensors(func(*args, **kwargs), lambda t: t.to(low) if t.dtype is torch.float32 else t)

    return wide


EMULATED: Mapping[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _mm,
    "bmm": _mm,
    "mv": _mv,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "einsum": _einsum,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "conv_transpose1d": _conv_transpose,
    "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose,
    "scaled_dot_product_attention": _attention,
}
"""Operator name -> the function that emulates it; its arguments are torch's, its floating tensors already low."""

RECURRENT = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
)
"""Emulated by `widened`: a whole sequence is computed in fp32 and rounded at its end."""

WIDENED = RECURRENT | {
    *("addr", "bilinear", "chain_matmul", "conv_tbc", "convolution", "grouped_mm", "inner", "tensordot"),
    *("linalg.multi_dot", "linalg.vecdot"),
}
"""Operators emulated by `widened`: recurrent ones and rare products."""

REFLECTED: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    torch.Tensor.__rmatmul__: _rmatmul,
}
"""Callables whose operands come the other way round."""


def emulation_of(name: str, func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what emulates the operator `name` when it is called as `func`, or None if its low kernels serve."""
    if func in REFLECTED:
        return REFLECTED[func]
    if name in WIDENED:
        return widened(func)
    return EMULATED.get(name)
