"""MindSpore's levels and flags as halfstep policies: all that distinguishes them from halfstep is in these values.

Operator lists: those of MindSpore 2.10 (`mindspore.amp`, https://gitee.com/mindspore/mindspore).
A primitive here stands for every way torch spells it: function, method, operator sign, layer and subclass of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import halfstep as hs
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.shared import LOW_NAMES

__all__ = ["ALL_LOW", "O1_WHITE", "PREFIX", "fp32_policy", "level_policy", "low_name", "low_policy", "new_policy"]

PREFIX = "mindspore-"
"""How the names of these policies begin; a policy without it was bound by the user."""

O1_WHITE: Mapping[str, tuple[str, ...]] = {
    "conv1d": ("conv1d",), "conv2d": ("conv2d",), "conv3d": ("conv3d",), "conv1dtranspose": ("conv_transpose1d",),
    "conv2dtranspose": ("conv_transpose2d",), "conv3dtranspose": ("conv_transpose3d",),
    "dense": ("linear", "bilinear"), "lstmcell": ("lstm_cell", "lstm"),
    "rnncell": ("rnn_tanh_cell", "rnn_relu_cell", "rnn_tanh", "rnn_relu"), "grucell": ("gru_cell", "gru"),
    "matmul": ("matmul", "mm", "mv", "addmm", "addmv", "einsum", "tensordot", "inner", "linalg.multi_dot"),
    "batchmatmul": ("bmm", "baddbmm", "addbmm", "scaled_dot_product_attention"), "prelu": ("prelu",),
    "relu": ("relu",), "ger": ("outer",),
}  # fmt: skip
"""O1's white list: primitive or cell, in small letters -> torch's operators."""

AUTO_WHITE = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul", "mm",
    "tensordot", "inner", "linalg.multi_dot", "bmm", "scaled_dot_product_attention", "prelu", "einsum", "linear",
    "bilinear", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm", "rnn_tanh", "rnn_relu", "gru",
    "addmm", "addbmm", "addmv", "baddbmm", "mv",
)  # fmt: skip
"""The auto level's white list; recurrent layers are listed because MindSpore makes them of its MatMul."""

AUTO_BLACK = (
    "pow", "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt",
    "sinh", "tan", "softplus", "layer_norm", "batch_norm", "group_norm", "norm", "linalg.norm", "linalg.vector_norm",
    "linalg.matrix_norm", "kl_div", "smooth_l1_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "pdist", "cdist", "renorm", "prod",
    "softmax", "log_softmax", "cumprod", "cumsum", "sum", "l1_loss", "mse_loss", "nll_loss", "cross_entropy",
)  # fmt: skip
AUTO_PROMOTE = ("addcdiv", "addcmul", "cross", "linalg.cross", "grid_sample", "add", "dot", "cat")


def _rules(operators: Iterable[str], rule: str) -> tuple[tuple[str, str], ...]:
    return tuple((operator, rule) for operator in operators)


FP32_RULES = (("*", "fp32"),)
AUTO_RULES = (*_rules(AUTO_WHITE, "low"), *_rules(AUTO_BLACK, "fp32"), *_rules(AUTO_PROMOTE, "widest"))
ALL_LOW = (("", "low"),)
"""How the modules of a policy begin that runs everything low but modules it names: O2, O3, the flags fp16 and bf16."""


def new_policy(name: str, dtype: str, **fields: Any) -> hs.Policy:
    """Return a policy of this front-end; MindSpore's loss scales are not policies."""
    return hs.Policy(name=PREFIX + name, dtype=dtype, table="none", scale="none", **fields)


def fp32_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flag fp32: operators take fp32; `dtype`, the low format around, keeps the region on."""
    return new_policy("fp32", dtype, ops=FP32_RULES)


def low_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flags fp16 and bf16: every operator low, parameters fp32, loss functions fp32."""
    return new_policy(dtype, dtype, modules=ALL_LOW, outputs="fp32")


def level_policy(level: str, dtype: str, black: Iterable[str] = (), white: Iterable[str] | None = None) -> hs.Policy:
    """Return the policy of an amp level."""
    if level == "O0":
        return new_policy(level, "fp32", loss="keep")
    if level == "O1":
        operators = (operator for row in O1_WHITE.values() for operator in row) if white is None else white
        return new_policy(level, dtype, outputs="fp32", ops=(*FP32_RULES, *_rules(operators, "low")))
    if level == "auto":
        return new_policy(level, dtype, outputs="fp32", ops=AUTO_RULES)
    return new_policy(level, dtype, outputs="fp32", modules=(*ALL_LOW, *_rules(black, "fp32")))


def low_name(dtype: object, where: str) -> str:
    """Return "fp16" or "bf16" for a dtype."""
    if not isinstance(dtype, torch.dtype):
        raise MindSporeTypeError(f"{where}: dtype={dtype!r} is not a dtype; pass mstype.float16 or mstype.bfloat16")
    if dtype not in LOW_NAMES:
        raise MindSporeValueError(f"{where}: dtype={dtype}; a low format is mstype.float16 or mstype.bfloat16")
    return LOW_NAMES[dtype]
