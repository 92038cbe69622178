"""Functions to checkpoint, with tensors small enough to run every combination in the default test run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Tensor]


def _vocabulary(x: Tensor, w: Tensor) -> Tensor:
    """Embed rows whose numbers do not depend on values, so that rounding cannot change them."""
    return F.embedding(torch.arange(3), w) @ x


FUNCTIONS: dict[str, Function] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w,
    "mm": torch.mm,
    "bmm": lambda x, w: torch.bmm(x.expand(2, 4, 4), w.expand(2, 4, 4)),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x.expand(2, 4, 4), x.expand(2, 4, 4), w.expand(2, 4, 4)),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "conv1d": lambda x, w: F.conv1d(x.reshape(1, 4, 4), w.reshape(4, 4, 1)),
    "conv2d": lambda x, w: F.conv2d(x.reshape(1, 1, 4, 4), w.reshape(4, 1, 2, 2)),
    "conv3d": lambda x, w: F.conv3d(x.reshape(1, 1, 1, 4, 4), w.reshape(4, 1, 1, 2, 2)),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x.reshape(1, 1, 4, 4), w.reshape(1, 4, 2, 2)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], x[None]),
    "layer_norm": lambda x, w: F.layer_norm(F.linear(x, w), (4,)),
    "group_norm": lambda x, w: F.group_norm(F.linear(x, w), 2),
    "rms_norm": lambda x, w: F.rms_norm(F.linear(x, w), (4,)),
    "softmax": lambda x, w: F.linear(x, w).softmax(-1),
    "log_softmax": lambda x, w: F.log_softmax(F.linear(x, w), -1),
    "cross_entropy": lambda x, w: F.cross_entropy(F.linear(x, w), torch.arange(4)),
    "mse_loss": lambda x, w: F.mse_loss(F.linear(x, w), x),
    "gelu": lambda x, w: F.gelu(F.linear(x, w)),
    "silu": lambda x, w: F.silu(F.linear(x, w)) * x,
    "exp": lambda x, w: F.linear(x, w).exp(),
    "pow": lambda x, w: F.linear(x, w).pow(2),
    "sum": lambda x, w: F.linear(x, w).exp().sum(0),
    "mean": lambda x, w: F.linear(x, w).mean(-1),
    "norm": lambda x, w: F.linear(x, w).norm(dim=-1),
    "embedding": _vocabulary,
    "cat": lambda x, w: torch.cat([F.linear(x, w), x]),
}
"""Name -> function of x and w, both of shape (4, 4)."""
