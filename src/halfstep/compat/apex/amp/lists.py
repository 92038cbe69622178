"""The operators that Apex's O1 patches, by module and by list, as its documentation and sources name them.

What is done with them is halfstep's operator table ``apex-o1``; the tests hold the two to each other.
Source of the names: https://github.com/NVIDIA/apex, apex/amp/lists.
"""

from __future__ import annotations

from types import SimpleNamespace

_CONVOLUTIONS = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"]
_BATCHED = ["addbmm", "baddbmm", "bmm"]
_PRODUCTS = ["prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", *_BATCHED]
_POINTWISE = ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh"]
_WIDE = [*_POINTWISE, "tan", "pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"]
_PROMOTED = ["addcdiv", "addcmul", "atan2", "cross", "dot", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt"]
_PROMOTED += ["ne"]
_LOSSES = ["poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss"]
_LOSSES += ["mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"]
_LOSSES += ["multi_margin_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"]
_LOSSES += ["triplet_margin_loss", "ctc_loss"]
_BANNED_MESSAGE = (
    "binary_cross_entropy takes probabilities, which fp16 rounds to 0 and 1; use binary_cross_entropy_with_logits (for "
    "nn.BCELoss after a Sigmoid: nn.BCEWithLogitsLoss), or amp.init(allow_banned=True) to compute it in fp32"
)

functional_overrides = SimpleNamespace(
    FP16_FUNCS=[*_CONVOLUTIONS, "linear"],
    FP32_FUNCS=[
        *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu", "layer_norm"),
        *("group_norm", "local_response_norm", "normalize", "cosine_similarity", *_LOSSES),
    ],
    BANNED_FUNCS=[("binary_cross_entropy", _BANNED_MESSAGE)],
)
"""Functions of torch.nn.functional."""

torch_overrides = SimpleNamespace(
    FP16_FUNCS=[*_CONVOLUTIONS, *_PRODUCTS],
    FP32_FUNCS=list(_WIDE),
    CASTS=[*_PROMOTED, "bilinear"],
    SEQUENCE_CASTS=["cat", "stack"],
)
"""Functions of torch."""

tensor_overrides = SimpleNamespace(
    FP16_FUNCS=["__matmul__", *_PRODUCTS],
    FP32_FUNCS=["__ipow__", "__pow__", "__rpow__", "cpu", *_WIDE],
    CASTS=[
        *("__add__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__idiv__", "__imul__", "__isub__"),
        *("__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__", "__rmul__", "__rsub__"),
        *("__rtruediv__", "__sub__", "__truediv__", *_PROMOTED),
    ],
    SEQUENCE_CASTS=[],
)
"""Methods of torch.Tensor."""
