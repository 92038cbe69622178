"""Products in block formats, as units for them would compute: simulated in fp32.

A product sums over one dimension, and the blocks of both operands lie along it: the three products of a linear layer
and its backward pass each round their operands anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from halfstep.cast.arithmetic.emulate import rounded_by, rounded_to, simulated
from halfstep.formats import BlockFormat

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
    return rounded_by(partial(form.round, dim=dim, mode="stochastic" if stochastic else "nearest"), None, x)


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
