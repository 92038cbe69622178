"""megengine.functional.nn: layers as functions, and the losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.megengine.functional import conv, loss
from halfstep.compat.megengine.functional.conv import *  # noqa: F403  # each file lists its functions
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
from halfstep.compat.megengine.functional.loss import *  # noqa: F403
from halfstep.compat.megengine.functional.vision import interpolate
from halfstep.errors import StepError

__all__ = [
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "batch_norm", "dropout", "embedding", "gelu",
    "group_norm", "hsigmoid", "hswish", "instance_norm", "interpolate", "layer_norm", "leaky_relu",
    "local_response_norm", "logsigmoid", "logsoftmax", "logsumexp", "max_pool2d", "one_hot", "pad", "prelu", "relu",
    "relu6", "sigmoid", "silu", "softmax", "softplus",
]  # fmt: skip
__all__ += conv.__all__
__all__ += loss.__all__


def prelu(x: Tensor, y: Tensor) -> Tensor:
    """Return `x` where it is positive and ``x * y`` elsewhere; `y` broadcasts, so channels need (1, channels, 1, 1)."""
    return torch.where(x > 0, x, x * y)


def adaptive_avg_pool2d(inp: Tensor, oshp: Any) -> Tensor:
    """Return means of `oshp` windows: a number or (height, width)."""
    return F.adaptive_avg_pool2d(inp, _output_size(oshp))


def adaptive_max_pool2d(inp: Tensor, oshp: Any) -> Tensor:
    """Return the largest elements of `oshp` windows: a number or (height, width)."""
    largest: Tensor = F.adaptive_max_pool2d(inp, _output_size(oshp))
    return largest


def _output_size(oshp: Any) -> Any:
    return oshp.tolist() if isinstance(oshp, Tensor) else oshp


def max_pool2d(inp: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
    """Return the largest element of each window."""
    return F.max_pool2d(inp, kernel_size, stride, padding)


def avg_pool2d(
    inp: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, mode: str = "average_count_exclude_padding"
) -> Tensor:
    """Return the mean of each window; `mode` "average" counts the padding."""
    if mode not in ("average", "average_count_exclude_padding"):
        raise StepError(f"avg_pool2d(mode={mode!r}): expected 'average_count_exclude_padding' or 'average'")
    return F.avg_pool2d(inp, kernel_size, stride, padding, count_include_pad=mode == "average")


def softmax(inp: Tensor, axis: int | None = None) -> Tensor:
    """Return the softmax along `axis`; by default along axis 1, or axis 0 of tensors with 0, 1 or 3 axes."""
    if axis is None:
        axis = 0 if inp.dim() in (0, 1, 3) else 1
    return F.softmax(inp, axis)


def logsoftmax(inp: Tensor, axis: Any) -> Tensor:
    """Return the logarithm of the softmax along one axis or several."""
    if isinstance(axis, int):
        return F.log_softmax(inp, axis)
    return inp - torch.logsumexp(inp, tuple(axis), keepdim=True)


def logsumexp(inp: Tensor, axis: Any, keepdims: bool = False) -> Tensor:
    """Return the logarithm of the sum of exponentials."""
    return torch.logsumexp(inp, axis, keepdim=keepdims)


def leaky_relu(inp: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return `inp`, and `negative_slope` times it where it is negative."""
    return F.leaky_relu(inp, negative_slope)


def dropout(inp: Tensor, drop_prob: float, training: bool = True) -> Tensor:
    """Set elements to zero with probability `drop_prob` and enlarge the others."""
    if not 0 <= drop_prob < 1:
        raise StepError(f"dropout(drop_prob={drop_prob!r}): expected a probability from 0 and below 1")
    return F.dropout(inp, drop_prob, training)


def embedding(
    inp: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float | None = None,
) -> Tensor:  # fmt: skip
    """Return rows of `weight`.

    Args:
        inp: row numbers.
        weight: the table.
        padding_idx: a row whose gradient is zero.
        max_norm: refused, as in MegEngine.
        norm_type: refused, as in MegEngine.
    """
    if max_norm is not None or norm_type is not None:
        raise StepError("embedding: rows are not scaled to a norm (MegEngine refuses it too); leave out max_norm")
    return F.embedding(inp, weight, padding_idx)


def one_hot(inp: Tensor, num_classes: int) -> Tensor:
    """Return one row for each label, with a one at its place, in the labels' dtype."""
    return F.one_hot(inp.long(), num_classes).to(inp.dtype)


def pad(src: Tensor, pad_width: Any, mode: str = "constant", constant_value: float = 0.0) -> Tensor:
    """Pad each axis, given as ((before, after), ...) from the first axis on; axes that are not named stay.

    Args:
        src: any tensor.
        pad_width: elements before and after, for each axis.
        mode: "constant", "edge" (or "replicate") or "reflect".
        constant_value: for "constant".
    """
    name = str(mode).lower()
    if name not in ("constant", "edge", "replicate", "reflect"):
        raise StepError(f"pad(mode={mode!r}): expected one of constant, edge, replicate, reflect")
    pairs = [(int(before), int(after)) for before, after in pad_width]
    if len(pairs) > src.dim():
        raise StepError(f"pad: pad_width names {len(pairs)} axes and the tensor has {src.dim()}")
    if name == "constant":
        pairs += [(0, 0)] * (src.dim() - len(pairs))
        return F.pad(src, [number for pair in reversed(pairs) for number in pair], "constant", constant_value)
    for axis, (before, after) in enumerate(pairs):  # torch's other modes pad the last axes only
        size = src.shape[axis]
        if (before, after) != (0, 0):
            places = torch.arange(-before, size + after, device=src.device)
            if name == "reflect":
                places = (size - 1) - ((size - 1) - places.abs()).abs()
            src = src.index_select(axis, places.clamp(0, size - 1))
    return src


def batch_norm(
    inp: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, *, training: bool = False, momentum: float = 0.9, eps: float = 1e-5,
    inplace: bool = True,
) -> Any:  # fmt: skip
    """Normalise each channel.

    Args:
        inp: (batch, channels, ...).
        running_mean: its statistics; changed while `training`, unless `inplace` is False.
        running_var: as `running_mean`.
        weight: factor of each channel.
        bias: summand of each channel.
        training: whether the statistics are those of the batch.
        momentum: the share of the old statistics that stays.
        eps: added to the variance.
        inplace: False: return (result, new mean, new variance) while training, and change neither.
    """
    if not training and (running_mean is None or running_var is None):
        raise StepError("batch_norm(training=False): pass running_mean and running_var, or training=True")
    if not inplace:
        running_mean, running_var = (None if t is None else t.clone() for t in (running_mean, running_var))
    mean, variance, scale, shift = (
        None if t is None else t.view(-1) for t in (running_mean, running_var, weight, bias)
    )
    if training and (mean is None) != (variance is None):  # torch takes both or neither
        mean = torch.zeros_like(variance) if mean is None and variance is not None else mean
        variance = torch.ones_like(mean) if variance is None and mean is not None else variance
    result = F.batch_norm(inp, mean, variance, scale, shift, training, 1.0 - momentum, eps)
    if inplace or not training or mean is None:
        return result
    return result, running_mean, running_var


def layer_norm(
    inp: Tensor, normalized_shape: Any, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over the last axes; with `affine` by `weight` and `bias` too."""
    _check_affine("layer_norm", affine, weight, bias)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return F.layer_norm(inp, shape, weight if affine else None, bias if affine else None, eps)


def group_norm(
    inp: Tensor, num_groups: int, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over groups of channels; with `affine` by `weight` and `bias` too."""
    _check_affine("group_norm", affine, weight, bias)
    return F.group_norm(inp, num_groups, weight if affine else None, bias if affine else None, eps)


def instance_norm(
    inp: Tensor, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each channel of each sample; with `affine` by `weight` and `bias` too."""
    _check_affine("instance_norm", affine, weight, bias)
    return F.instance_norm(inp, weight=weight if affine else None, bias=bias if affine else None, eps=eps)


def local_response_norm(
    inp: Tensor, kernel_size: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75
) -> Tensor:
    """Divide by the energy of neighbouring channels; `alpha` is for their sum, not for their mean as in torch."""
    return F.local_response_norm(inp.float(), kernel_size, alpha * kernel_size, beta, k).to(inp.dtype)


def _check_affine(where: str, affine: bool, weight: Tensor | None, bias: Tensor | None) -> None:
    if affine and (weight is None or bias is None):
        raise StepError(f"{where}(affine=True): pass weight and bias, or affine=False")
