"""megengine.functional.nn: layers as functions, and the losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.megengine.functional.elemwise import (
    gelu,
    hsigmoid,
    hswish,
    logsigmoid,
    relu,
    relu6,
    sigmoid,
    silu,
    softplus,
)  # fmt: skip
from halfstep.compat.megengine.functional.loss import (
    binary_cross_entropy,
    cross_entropy,
    hinge_loss,
    l1_loss,
    square_loss,
)
from halfstep.errors import StepError

__all__ = [
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "batch_norm", "binary_cross_entropy", "conv1d",
    "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "cross_entropy", "dropout", "embedding", "gelu",
    "group_norm", "hinge_loss", "hsigmoid", "hswish", "instance_norm", "interpolate", "l1_loss", "layer_norm",
    "leaky_relu", "linear", "local_response_norm", "logsigmoid", "logsoftmax", "logsumexp", "max_pool2d", "one_hot",
    "pad", "prelu", "relu", "relu6", "sigmoid", "silu", "softmax", "softplus", "square_loss",
]  # fmt: skip

Size = int | tuple[int, ...]

linear, prelu = F.linear, F.prelu
conv1d, conv2d, conv3d = F.conv1d, F.conv2d, F.conv3d
adaptive_avg_pool2d, adaptive_max_pool2d = F.adaptive_avg_pool2d, F.adaptive_max_pool2d


def conv_transpose2d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of images; MegEngine puts `dilation` before `groups`."""
    return F.conv_transpose2d(inp, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of volumes."""
    return F.conv_transpose3d(inp, weight, bias, stride, padding, output_padding, groups, dilation)


def max_pool2d(inp: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
    """Return the largest element of each window."""
    return F.max_pool2d(inp, kernel_size, stride, padding)


def avg_pool2d(
    inp: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, mode: str = "average_count_exclude_padding"
) -> Tensor:
    """Return the mean of each window; `mode` "average" counts the padding."""
    return F.avg_pool2d(inp, kernel_size, stride, padding, count_include_pad=mode == "average")


def softmax(inp: Tensor, axis: int | None = None) -> Tensor:
    """Return the softmax along `axis`, the last by default."""
    return F.softmax(inp, -1 if axis is None else axis)


def logsoftmax(inp: Tensor, axis: int) -> Tensor:
    """Return the logarithm of the softmax."""
    return F.log_softmax(inp, axis)


def logsumexp(inp: Tensor, axis: Any, keepdims: bool = False) -> Tensor:
    """Return the logarithm of the sum of exponentials."""
    return torch.logsumexp(inp, axis, keepdim=keepdims)


def leaky_relu(inp: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return `inp`, and `negative_slope` times it where it is negative."""
    return F.leaky_relu(inp, negative_slope)


def dropout(inp: Tensor, drop_prob: float, training: bool = True) -> Tensor:
    """Set elements to zero with probability `drop_prob` and enlarge the others."""
    return F.dropout(inp, drop_prob, training)


def embedding(inp: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return rows of `weight`."""
    return F.embedding(inp, weight, padding_idx)


def one_hot(inp: Tensor, num_classes: int) -> Tensor:
    """Return one row for each label, with a one at its place."""
    return F.one_hot(inp.long(), num_classes)


def pad(src: Tensor, pad_width: Any, mode: str = "constant", constant_value: float = 0.0) -> Tensor:
    """Pad each axis, given as ((before, after), ...) from the first axis on.

    Raises:
        StepError: an unknown mode.
    """
    modes = {"constant": "constant", "edge": "replicate", "replicate": "replicate", "reflect": "reflect"}
    if mode not in modes:
        raise StepError(f"pad(mode={mode!r}): expected one of {', '.join(modes)}")
    widths = [number for pair in reversed(list(pad_width)) for number in pair]
    while widths and mode != "constant" and widths[-2:] == [0, 0]:
        widths = widths[:-2]  # torch pads the last axes only, unless with a constant
    if mode == "constant":
        return F.pad(src, widths, "constant", constant_value)
    return F.pad(src, widths, modes[mode])


def batch_norm(
    inp: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, *, training: bool = False, momentum: float = 0.9, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise each channel; `momentum` is the share of the old statistics that stays."""
    mean, variance, scale, shift = (
        None if t is None else t.view(-1) for t in (running_mean, running_var, weight, bias)
    )
    return F.batch_norm(inp, mean, variance, scale, shift, training, 1.0 - momentum, eps)


def layer_norm(
    inp: Tensor, normalized_shape: Any, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over the last axes."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return F.layer_norm(inp, shape, weight if affine else None, bias if affine else None, eps)


def group_norm(
    inp: Tensor, num_groups: int, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over groups of channels."""
    return F.group_norm(inp, num_groups, weight if affine else None, bias if affine else None, eps)


def instance_norm(
    inp: Tensor, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each channel of each sample."""
    return F.instance_norm(inp, weight=weight if affine else None, bias=bias if affine else None, eps=eps)


def local_response_norm(
    inp: Tensor, kernel_size: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75
) -> Tensor:
    """Divide by the energy of neighbouring channels; `alpha` is for their sum, not for their mean as in torch."""
    return F.local_response_norm(inp.float(), kernel_size, alpha * kernel_size, beta, k).to(inp.dtype)


def interpolate(
    inp: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "bilinear", align_corners: bool | None = None
) -> Tensor:
    """Resize images."""
    corners = None if mode in ("nearest", "area") else bool(align_corners)
    return F.interpolate(inp, size, scale_factor, mode, corners)
