"""The format of each operator: MegEngine 1.13's rules as policies.

Source: MegEngine's imperative/src/impl/transformations/dtype_promote.cpp and 107 operators called in MegEngine 1.13.0.
Operators named in no list keep the format of their inputs.
"""

from __future__ import annotations

import halfstep as hs

PRODUCTS = (
    "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot",
    "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "tensordot", "inner", "chain_matmul", "linalg.multi_dot",
    "linalg.vecdot", "bilinear", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Convolution, MatrixMul, BatchedMatrixMul, and what torch has of the same kind."""

NORMS_IN_LOW = ("batch_norm",)
"""Input and output low; weights and statistics stay as they are."""

SENSITIVE = (
    "div", "reciprocal", "exp", "exp2", "pow", "float_power", "log", "log2", "log10", "expm1", "log1p", "acos", "asin",
    "atan", "atan2", "cos", "sin", "logaddexp", "logaddexp2", "tan", "asinh", "acosh", "atanh", "sinh", "cosh",
    "softplus", "hardsigmoid", "logsigmoid", "sqrt", "rsqrt", "log_softmax", "logsumexp", "norm", "normalize",
    "layer_norm", "group_norm", "interpolate",
)  # fmt: skip
"""The elementwise list of high precision, LayerNorm and GroupNorm, and what MegEngine computes with them."""

MOMENTS = ("mean", "var", "std", "var_mean", "std_mean", "nanmean")
"""Always fp32, whether amp is on or off."""

NO_LOW_KERNEL = (
    "linalg.*", "fft.*", "cholesky*", "qr", "svd", "lu*", "geqrf", "ormqr", "triangular_solve", "logdet", "stft",
    "nuclear_norm", "istft", "quantile", "nanquantile", "avg_pool3d", "cdist", "pdist", "polar", "complex",
    "view_as_complex",
)  # fmt: skip
"""Not in MegEngine; torch has no low kernels for them."""

VOLUMES = ("conv3d", "conv_transpose3d")
SUMS = ("sum", "nansum", "prod", "cumsum", "cumprod")
PROMOTED = (
    "cat", "stack", "hstack", "vstack", "dstack", "column_stack", "where", "maximum", "minimum", "addcmul", "addcdiv",
    "lerp", "remainder", "fmod", "cross", "index_put", "masked_scatter", "scatter", "scatter_add",
)  # fmt: skip
"""All other elementwise operators, Concat, Stack, where: the widest format of the arguments. (torch promotes sums,
differences, products and comparisons like that by itself.)"""

AS_SHIPPED = (
    hs.Policy(name="megengine-1.13", dtype="fp16", table="none", scale="megengine")
    .with_ops(fp32=NO_LOW_KERNEL)
    .with_ops(low=(*PRODUCTS, *NORMS_IN_LOW), fp32=(*SENSITIVE, *MOMENTS), widest=(*PROMOTED, *VOLUMES))
)
"""MegEngine 1.13.0's behaviour, with convolutions of volumes not lowered, and softmax and sums in low formats."""

MEGENGINE = AS_SHIPPED.replace(name="megengine").with_ops(low=VOLUMES, fp32=("softmax", "softmin", *SUMS))
"""The default: `AS_SHIPPED`, softmax in fp32 as MegEngine's document promises, and sums that do not overflow."""
