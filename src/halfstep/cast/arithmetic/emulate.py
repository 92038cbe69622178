"""Operators in formats that a device has no units for (emulated), or that no dtype stores (simulated).

`rounded` does the arithmetic of emulation: low inputs, fp32 compute, one rounding of the result. Here are functions
with the arguments of torch's operators that call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.arithmetic.rounded import add_product, convolve, linear, product, recomputed
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES, BlockFormat, Format
from halfstep.torch_private.operators import attention_math
from halfstep.torch_private.trees import tree_flatten, tree_unflatten
from halfstep.trees import map_tensors, tensors

Rounding = Callable[[Tensor], Tensor]


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """torch.matmul: the shapes of neural networks save low operands, all others are recomputed."""
    if input.is_nested or other.is_nested:
        return torch.matmul(input.float(), other.float()).to(input.dtype)
    if input.dim() == 2 == other.dim():
        return product(input, other)
    if input.dim() >= 3 and other.dim() == 2:
        return product(input.flatten(0, -2), other).reshape(*input.shape[:-1], other.shape[-1])
    if input.dim() >= 3 and input.shape[:-2] == other.shape[:-2]:
        shape = (*input.shape[:-1], other.shape[-1])
        return product(input.flatten(0, -3), other.flatten(0, -3)).reshape(shape)
    return recomputed(torch.matmul, input, other)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return add_product(input, batch1, batch2, beta=beta, alpha=alpha)


def _recomputing(func: Callable[..., Tensor], twice: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Return `func`, and `twice`, by `recomputed`; floating tensors may be anywhere in their arguments."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        leaves, form = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        low = [leaves[n] for n in places]
        others = [None if n in places else leaf for n, leaf in enumerate(leaves)]

        def compute(function: Callable[..., Tensor], *wide: Tensor) -> Tensor:
            given = list(others)
            for n, tensor in zip(places, wide, strict=True):
                given[n] = tensor
            args, kwargs = tree_unflatten(given, form)
            return function(*args, **kwargs)

        again = None if twice is None else functools.partial(compute, twice)
        return recomputed(functools.partial(compute, func), *low, twice=again)

    return call


def _each(value: Any, dims: int) -> list[int]:
    """Spread a stride, padding or dilation over `dims` spatial dimensions."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * dims if len(values) == 1 else values


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
    return convolve(input, weight, bias, _each(stride, dims), _each(padding, dims), dilation, False, [0] * dims, groups)


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
    return convolve(input, weight, bias, *spread, True, _each(output_padding, dims), groups)


def _differentiable_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention by the math kernel: the fused ones have no second derivative."""
    if attn_mask is not None and not attn_mask.is_floating_point():  # it takes additive masks only
        attn_mask = torch.zeros(attn_mask.shape, device=attn_mask.device).masked_fill(~attn_mask, float("-inf"))
    return attention_math(query, key, value, attn_mask, 0.0, is_causal, **options)[0]


_recomputed_attention = _recomputing(F.scaled_dot_product_attention, _differentiable_attention)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention; with dropout the probabilities are kept (a recomputation would draw others)."""
    if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0:
        return cast(Tensor, widened(F.scaled_dot_product_attention)(*args, **kwargs))
    return _recomputed_attention(*args, **kwargs)


def widened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` computed in fp32 from low tensors, every result and gradient rounded once; it saves fp32."""

    def wide(*args: Any, **kwargs: Any) -> Any:
        low = next((t.dtype for t in tensors((args, kwargs)) if t.dtype in LOW_DTYPES), None)
        if low is None:
            return func(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), lambda t: t.float() if t.dtype in LOW_DTYPES else t)
        return map_tensors(func(*args, **kwargs), lambda t: t.to(low) if t.dtype is torch.float32 else t)

    return wide


EMULATED: Mapping[str, Callable[..., Tensor]] = {
    "linear": linear,
    "matmul": _matmul,
    "mm": product,
    "bmm": product,
    "mv": _recomputing(torch.mv),
    "addmm": add_product,
    "baddbmm": _baddbmm,
    "addmv": _recomputing(torch.addmv),
    "addbmm": _recomputing(torch.addbmm),
    "einsum": _recomputing(torch.einsum),
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


def emulation_of(name: str, func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what emulates the operator `name` when it is called as `func`, or None if its low kernels serve."""
    if func is Tensor.__rmatmul__:
        return lambda input, other: _matmul(other, input)
    if name in WIDENED:
        return widened(func)
    return EMULATED.get(name)


# ------------------------------------------------------------------ simulation
#
# What a unit for the format would do: its numbers in, fp32 compute, one rounding of the result; gradients are rounded
# where they arrive and where they leave. Memory is fp32's and speed is worse: this shows what a format does to a model
# before there is hardware for it.


class _Simulated(Function):
    """A tensor rounded by a function; its gradient by another one, or None: as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, there: Rounding, back: Rounding | None) -> Tensor:
        return there(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.back = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return grads[0] if ctx.back is None else ctx.back(grads[0]), None, None


def rounded_by(there: Rounding, back: Rounding | None, tensor: Tensor) -> Tensor:
    """Return `tensor` rounded by `there`, and its gradient by `back`; None: it stays as it is."""
    function: type[Function] = _Simulated
    return cast(Tensor, function.apply(tensor, there, back))


def rounded_to(form: Format, tensor: Tensor) -> Tensor:
    """Return the numbers of `form` nearest to those of `tensor`, as fp32; tensors that no policy casts as they are."""
    if tensor.dtype not in POLICY_DTYPES:
        return tensor
    carrier = form.carrier
    return rounded_by(carrier.round, functools.partial(rounded_to, carrier), tensor.float())


def simulated(func: Callable[..., Any], form: Format, *, inputs: bool = True) -> Callable[..., Any]:
    """Return `func` as units for `form` would compute it: rounded tensors in (if `inputs`), a rounded result out."""
    round_off = functools.partial(rounded_to, form)

    def call(*args: Any, **kwargs: Any) -> Any:
        if inputs:
            args, kwargs = map_tensors((args, kwargs), round_off)
        return map_tensors(func(*args, **kwargs), round_off)

    return call


# ------------------------------------------------------------------ products in block formats
#
# A product sums over one dimension, and the blocks of both operands lie along it: the three products of a linear layer
# and its backward pass each round their operands anew.


SIGNS = torch.tensor([1, -1, 1, 1, -1, 1, -1, -1, 1, 1, 1, -1, -1, -1, 1, -1], dtype=torch.float32, device="cpu")
"""Signs of the rows of the Hadamard matrix: any that are fixed do."""


class _BlockProduct(Function):
    """x @ weight.T of matrices, each rounded in blocks along what a product sums over, in all three products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, form: BlockFormat) -> Tensor:
        return form.round(x, dim=1) @ form.round(weight, dim=1).T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.form = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x, weight), form, grad = ctx.saved_tensors, ctx.form, grads[0]
        of, chance = form.gradient or form, form.stochastic
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _in_blocks(grad, of, 1, chance) @ _in_blocks(weight, form, 0, False)
        if ctx.needs_input_grad[1]:
            left, right = (_spread(grad), _spread(x)) if form.hadamard else (grad, x)
            of_weight = _in_blocks(left, of, 0, chance).T @ _in_blocks(right, form, 0, False)
        return of_x, of_weight, None


def _in_blocks(x: Tensor, form: BlockFormat, dim: int, stochastic: bool) -> Tensor:
    return rounded_by(functools.partial(form.round, dim=dim, mode="stochastic" if stochastic else "nearest"), None, x)


def _spread(rows: Tensor) -> Tensor:
    """Multiply each 16 rows by an orthogonal Hadamard matrix with signs; what is left over stays."""
    size = len(SIGNS)
    whole = len(rows) - len(rows) % size
    matrix = SIGNS.to(rows.device).diag()
    for _ in range(4):  # Sylvester's construction, a butterfly at a time: 2**4 rows
        matrix = torch.cat([matrix[0::2] + matrix[1::2], matrix[0::2] - matrix[1::2]])
    turned = torch.einsum("ij,bjk->bik", matrix / 4.0, rows[:whole].unflatten(0, (-1, size))).flatten(0, 1)
    return torch.cat([turned, rows[whole:]])


def _block_linear(form: BlockFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    function: type[Function] = _BlockProduct
    made = cast(Tensor, function.apply(input.float().reshape(-1, input.shape[-1]), weight.float(), form))
    made = made if bias is None else made + bias.float()
    return rounded_to(form, made.reshape(*input.shape[:-1], weight.shape[0]))


def in_blocks(name: str, func: Callable[..., Any], form: BlockFormat) -> Callable[..., Any]:
    """Return the operator `name` with products in a block format, and bf16 numbers out of all others.

    These are linear layers and products with a matrix on the right, as the recipes for such units have it: attention
    and convolutions are in bf16.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "linear" and (args + (*kwargs.values(),))[1].dim() == 2:
            return _block_linear(form, *args, **kwargs)
        if name in {"mm", "matmul"} and len(args) == 2 and not kwargs and args[0].dim() > 1 and args[1].dim() == 2:
            return _block_linear(form, args[0], args[1].T)
        if name == "addmm" and len(args) == 3 and not kwargs:
            return _block_linear(form, args[1], args[2].T, args[0])
        return simulated(func, form)(*args, **kwargs)

    return call
