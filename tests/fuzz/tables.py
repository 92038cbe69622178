"""The operators that random programs call, and their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ONCE", "OPERATORS", "Weights"]

FP32 = torch.float32

Operator = Callable[[Tensor, "Weights"], Tensor]


class Weights:
    """The weights of one operator of a program: fp32 leaves, made once and found again when it runs again."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.made: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, *shape: int) -> Tensor:
        if shape not in self.made:
            self.made[shape] = (torch.randn(shape, generator=self.generator) / 2).requires_grad_()
        return self.made[shape]


def _sdpa(x: Tensor, w: Weights) -> Tensor:
    n, d = x.shape
    return F.scaled_dot_product_attention(x[None], (x @ w(d, d)).to(x.dtype)[None], x[None])[0]


def _lstm(x: Tensor, w: Weights) -> Tensor:
    n, d = x.shape
    zero = torch.zeros(n, d, dtype=x.dtype)
    return torch.lstm_cell(x, (zero, zero), w(4 * d, d), w(4 * d, d))[0]


def _batch_norm(x: Tensor, w: Weights) -> Tensor:
    d = x.shape[1]
    return F.batch_norm(x, torch.zeros(d), torch.ones(d), w(d), None, training=len(x) > 1)


OPERATORS: dict[str, Operator] = {
    "linear": lambda x, w: F.linear(x, w(x.shape[1], x.shape[1])),
    "linear_bias": lambda x, w: F.linear(x, w(x.shape[1], x.shape[1]), w(x.shape[1])),
    "matmul": lambda x, w: x @ w(x.shape[1], x.shape[1]),
    "matmul_t": lambda x, w: x @ w(x.shape[1], x.shape[1]).t(),
    "mm": lambda x, w: torch.mm(x, w(x.shape[1], x.shape[1])),
    "rmatmul": lambda x, w: w(x.shape[0], x.shape[0]) @ x,
    "addmm": lambda x, w: torch.addmm(w(x.shape[1]), x, w(x.shape[1], x.shape[1])),
    "bmm": lambda x, w: torch.bmm(x[None], w(1, x.shape[1], x.shape[1]))[0],
    "baddbmm": lambda x, w: torch.baddbmm(w(1, 1, x.shape[1]), x[None], w(1, x.shape[1], x.shape[1]))[0],
    "einsum": lambda x, w: torch.einsum("nd,de->ne", x, w(x.shape[1], x.shape[1])),
    "mv": lambda x, w: x * torch.mv(x, w(x.shape[1]))[:, None],
    "conv1d": lambda x, w: F.conv1d(x[None], w(x.shape[0], x.shape[0], 3), padding=1)[0],
    "conv2d": lambda x, w: F.conv2d(x[None, None], w(1, 1, 3, 3), padding=1)[0, 0],
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[None], w(x.shape[0], x.shape[0], 3), padding=1)[0],
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[1:], w(x.shape[1])),
    "layer_norm_bare": lambda x, w: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x, w: F.group_norm(x, 1),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[1:]),
    "batch_norm": _batch_norm,
    "attention": _sdpa,
    "lstm_cell": _lstm,
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: torch.log_softmax(x, 0),
    "softmax_dtype": lambda x, w: F.softmax(x, -1, dtype=FP32),
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "relu": lambda x, w: x.relu(),
    "tanh": lambda x, w: torch.tanh(x),
    "prelu": lambda x, w: F.prelu(x, w(1)),
    "exp": lambda x, w: x.tanh().exp(),
    "log": lambda x, w: (x.abs() + 1).log(),
    "pow": lambda x, w: x.tanh().pow(2),
    "rpow": lambda x, w: 2 ** x.tanh(),
    "rsqrt": lambda x, w: (x.abs() + 1).rsqrt(),
    "reciprocal": lambda x, w: (x.abs() + 1).reciprocal(),
    "softplus": lambda x, w: F.softplus(x),
    "sum": lambda x, w: x + x.tanh().sum(-1, keepdim=True),
    "mean": lambda x, w: x - x.mean(-1, keepdim=True),
    "var": lambda x, w: x / (1 + x.var(-1, keepdim=True, unbiased=False)),
    "norm": lambda x, w: x / (1 + x.norm(dim=-1, keepdim=True)),
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "cumsum": lambda x, w: x.tanh().cumsum(-1),
    "cat": lambda x, w: torch.cat([x, w(*x.shape)])[: len(x)],
    "stack": lambda x, w: torch.stack([x, w(*x.shape)]).mean(0),
    "add": lambda x, w: x + w(*x.shape),
    "mul": lambda x, w: x.tanh() * w(*x.shape),
    "addcmul": lambda x, w: torch.addcmul(x, x.tanh(), w(*x.shape)),
    "where": lambda x, w: torch.where(x > 0, x, w(*x.shape)),
    "embedding": lambda x, w: x + F.embedding(torch.arange(len(x)) % 2, w(2, x.shape[1])),
    "cross_entropy": lambda x, w: x * F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "mse_loss": lambda x, w: x * F.mse_loss(x, w(*x.shape)),
    "bce_logits": lambda x, w: x + F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "cosine": lambda x, w: x * F.cosine_similarity(x, w(*x.shape), dim=-1)[:, None],
    "cdist": lambda x, w: x + torch.cdist(x, w(*x.shape)).sum(),
    "outer": lambda x, w: x + torch.outer(x[:, 0], w(x.shape[1])),
    "float": lambda x, w: x.float(),
    "bfloat16": lambda x, w: x.bfloat16(),
    "in_place": lambda x, w: x.clone().add_(w(*x.shape)),
    "transpose": lambda x, w: x.t().contiguous().t(),
    "dropout": lambda x, w: F.dropout(x, 0.25),
}
"""Name -> function of a value of shape (n, d) to another of that shape, and of weights."""

ONCE = sorted(
    set(OPERATORS)
    - {"attention", "mv", "sum", "mean", "var", "norm", "cross_entropy", "mse_loss", "bce_logits", "cosine", "cdist"}
    - {"outer", "silu", "addcmul", "where", "transpose"}
)
"""Operators that use their value once, and give it the memory layout it had."""
