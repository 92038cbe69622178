"""MindSpore's levels and flags as halfstep policies: all that distinguishes them from halfstep is in these values.

Operator lists: those of MindSpore 2.10 (`mindspore.amp`, https://gitee.com/mindspore/mindspore).
A primitive here stands for every way torch spells it: function, method, operator sign, layer and subclass of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

import halfstep as hs
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.shared import LOW_NAMES

__all__ = [
    "AUTO_BLACK", "AUTO_PROMOTE", "AUTO_WHITE", "LEVELS", "O1_WHITE", "PREFIX", "as_built_policy", "fp32_policy",
    "is_low_everywhere", "level_policy", "low_name", "low_policy",
]  # fmt: skip

PREFIX = "mindspore-"
"""How the names of these policies begin; a policy without it was bound by the user."""

LEVELS = ("O0", "O1", "O2", "O3", "auto")

O1_WHITE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Conv1d": ("conv1d",), "Conv2D": ("conv2d",), "Conv3D": ("conv3d",), "Conv1dTranspose": ("conv_transpose1d",),
        "Conv2DTranspose": ("conv_transpose2d",), "Conv3DTranspose": ("conv_transpose3d",),
        "Dense": ("linear", "bilinear"), "LSTMCell": ("lstm_cell", "lstm"),
        "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell", "rnn_tanh", "rnn_relu"), "GRUCell": ("gru_cell", "gru"),
        "MatMul": ("matmul", "mm", "mv", "addmm", "addmv", "einsum", "tensordot", "inner", "linalg.multi_dot"),
        "BatchMatMul": ("bmm", "baddbmm", "addbmm", "scaled_dot_product_attention"), "PReLU": ("prelu",),
        "ReLU": ("relu",), "Ger": ("outer",),
    }
)  # fmt: skip
"""O1's white list: primitive or cell -> torch's operators."""

AUTO_WHITE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Conv2D": ("conv1d", "conv2d"), "Conv3D": ("conv3d",),
        "Conv2DTranspose": ("conv_transpose1d", "conv_transpose2d"), "Conv3DTranspose": ("conv_transpose3d",),
        "MatMul": ("matmul", "mm", "tensordot", "inner", "linalg.multi_dot"),
        "BatchMatMul": ("bmm", "scaled_dot_product_attention"), "PReLU": ("prelu",), "Einsum": ("einsum",),
        "Dense": ("linear", "bilinear", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "gru_cell"),
        "LSTM": ("lstm", "rnn_tanh", "rnn_relu", "gru"), "Addmm": ("addmm",), "Addbmm": ("addbmm",),
        "Addmv": ("addmv",), "Baddbmm": ("baddbmm",), "Mv": ("mv",),
    }
)  # fmt: skip
"""The auto level's white list; recurrent layers are listed because MindSpore makes them of its MatMul."""

AUTO_BLACK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Pow": ("pow",), "ACos": ("acos",), "Asin": ("asin",), "Cosh": ("cosh",), "Erfinv": ("erfinv",),
        "Exp": ("exp",), "Expm1": ("expm1",), "Log": ("log",), "Log10": ("log10",), "Log1p": ("log1p",),
        "Log2": ("log2",), "Reciprocal": ("reciprocal",), "Rsqrt": ("rsqrt",), "Sinh": ("sinh",), "Tan": ("tan",),
        "Softplus": ("softplus",), "LayerNorm": ("layer_norm",), "BatchNorm": ("batch_norm",),
        "GroupNorm": ("group_norm",), "Norm": ("norm", "linalg.norm", "linalg.vector_norm", "linalg.matrix_norm"),
        "KLDivLoss": ("kl_div",), "SmoothL1Loss": ("smooth_l1_loss",),
        "MultilabelMarginLoss": ("multilabel_margin_loss",), "SoftMarginLoss": ("soft_margin_loss",),
        "TripletMarginLoss": ("triplet_margin_loss",), "MultiMarginLoss": ("multi_margin_loss",),
        "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits",), "Pdist": ("pdist",), "Cdist": ("cdist",),
        "Renorm": ("renorm",), "ReduceProd": ("prod",), "Softmax": ("softmax",), "LogSoftmax": ("log_softmax",),
        "CumProd": ("cumprod",), "CumSum": ("cumsum",), "SumExt": ("sum",), "L1LossExt": ("l1_loss",),
        "MSELossExt": ("mse_loss",), "NLLLoss": ("nll_loss", "cross_entropy"),
    }
)  # fmt: skip

AUTO_PROMOTE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Addcdiv": ("addcdiv",), "Addcmul": ("addcmul",), "Cross": ("cross", "linalg.cross"),
        "GridSampler2D": ("grid_sample",), "BiasAdd": ("add",), "Dot": ("dot",), "Concat": ("cat",),
    }
)  # fmt: skip


def _rules(table: Mapping[str, tuple[str, ...]], rule: str) -> tuple[tuple[str, str], ...]:
    return tuple((operator, rule) for operators in table.values() for operator in operators)


FP32_RULES = (("*", "fp32"),)
O1_RULES = (*FP32_RULES, *_rules(O1_WHITE, "low"))
AUTO_RULES = (*_rules(AUTO_WHITE, "low"), *_rules(AUTO_BLACK, "fp32"), *_rules(AUTO_PROMOTE, "widest"))
ALL_LOW = (("", "low"),)


def fp32_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flag fp32: operators take fp32; `dtype`, the low format around, keeps the region on."""
    return hs.Policy(name=PREFIX + "fp32", dtype=dtype, table="none", ops=FP32_RULES, scale="none")


def low_policy(dtype: str) -> hs.Policy:
    """Return the policy of the flags fp16 and bf16: every operator low, parameters fp32, loss functions fp32."""
    return hs.Policy(name=PREFIX + dtype, dtype=dtype, table="none", modules=ALL_LOW, outputs="fp32", scale="none")


def level_policy(
    level: str, dtype: str, black: tuple[str, ...] = (), white: tuple[str, ...] | None = None
) -> hs.Policy:
    """Return the policy of an amp level."""
    base = hs.Policy(name=PREFIX + level, dtype=dtype, table="none", outputs="fp32", scale="none")
    if level == "O0":
        return base.replace(dtype="fp32", loss="keep", outputs="keep")
    if level == "O1":
        rules = O1_RULES if white is None else (*FP32_RULES, *((operator, "low") for operator in white))
        return base.replace(ops=rules)
    if level == "auto":
        return base.replace(ops=AUTO_RULES)
    return base.replace(modules=(*ALL_LOW, *((pattern, "fp32") for pattern in black)))


def as_built_policy(dtype: str, modules: tuple[tuple[str, str], ...]) -> hs.Policy:
    """Return O0's policy of a network built with low parameters: they stay low, and optimizers step them as they are.

    Args:
        dtype: the low format.
        modules: (path, "low" or "fp32") of every module with parameters of its own, outer ones first.
    """
    return hs.Policy(
        name=PREFIX + "O0", dtype=dtype, params="low", norms="low", master="none", table="none", scale="none",
        modules=modules,
    )  # fmt: skip


def is_low_everywhere(policy: hs.Policy) -> bool:
    """Return whether `policy` runs everything low but modules it names: O2, O3 and the flags fp16 and bf16."""
    return policy.modules[:1] == ALL_LOW


def low_name(dtype: object, where: str) -> str:
    """Return "fp16" or "bf16" for a dtype."""
    if not isinstance(dtype, torch.dtype):
        raise MindSporeTypeError(f"{where}: dtype={dtype!r} is not a dtype; pass mstype.float16 or mstype.bfloat16")
    if dtype not in LOW_NAMES:
        raise MindSporeValueError(f"{where}: dtype={dtype}; a low format is mstype.float16 or mstype.bfloat16")
    return LOW_NAMES[dtype]
