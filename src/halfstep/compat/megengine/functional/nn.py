"""megengine.functional.nn: layers as functions, resizing, and the losses, in fp32 whatever comes in."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.megengine.functional import elemwise
from halfstep.compat.shared import public
from halfstep.errors import StepError

__all__ = [
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "batch_norm", "binary_cross_entropy", "conv1d",
    "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "cross_entropy", "dropout", "embedding", "gelu",
    "group_norm", "hinge_loss", "hsigmoid", "hswish", "instance_norm", "interpolate", "l1_loss", "layer_norm",
    "leaky_relu", "linear", "local_response_norm", "logsigmoid", "logsoftmax", "logsumexp", "max_pool2d", "one_hot",
    "pad", "prelu", "relu", "relu6", "sigmoid", "silu", "softmax", "softplus", "square_loss",
]  # fmt: skip

gelu, relu, relu6, sigmoid, silu = elemwise.gelu, elemwise.relu, elemwise.relu6, elemwise.sigmoid, elemwise.silu
hsigmoid, hswish = elemwise.hsigmoid, elemwise.hswish
logsigmoid, softplus = elemwise.logsigmoid, elemwise.softplus


def check_modes(where: str, compute_mode: object, conv_mode: object = "cross_correlation") -> None:
    """Refuse other modes than MegEngine has; products of low formats are summed in fp32 in either compute mode."""
    if str(conv_mode).lower() != "cross_correlation":
        raise StepError(f"{where}(conv_mode={conv_mode!r}): expected 'cross_correlation'; flip the kernel for others")
    if str(compute_mode).lower() not in ("default", "float32"):
        raise StepError(f"{where}(compute_mode={compute_mode!r}): expected 'default' or 'float32'")


def linear(inp: Tensor, weight: Tensor, bias: Tensor | None = None, compute_mode: str = "default") -> Tensor:
    """Return ``inp @ weight.T + bias``."""
    check_modes("linear", compute_mode)
    return F.linear(inp, weight, bias)


def _joined(weight: Tensor, bias: Tensor | None, dims: int) -> tuple[Tensor, Tensor | None]:
    """Return a weight whose groups, if they are an axis of their own, are joined with the channels, and a flat bias."""
    weight = weight.flatten(0, 1) if weight.dim() == dims + 3 else weight
    return weight, bias if bias is None or bias.dim() == 1 else bias.reshape(-1)


def _convolution(function: Callable[..., Tensor], dims: int) -> Callable[..., Any]:
    def convolve(
        inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, conv_mode: str = "cross_correlation", compute_mode: str = "default",
    ) -> Tensor:  # fmt: skip
        """Return the convolution of sequences, images or volumes (batch, channels, size of each axis).

        Args:
            inp: the input.
            weight: (out, in, kernel), or (groups, out / groups, in / groups, kernel) in either spelling of groups.
            bias: one number for each output channel, of shape (1, out, 1, ...) or (out,).
            stride: number of elements between two windows.
            padding: zeros before and after.
            dilation: distance of the window's elements.
            groups: groups of channels that do not see each other.
            conv_mode: "cross_correlation".
            compute_mode: "default" or "float32".
        """
        check_modes(function.__name__, compute_mode, conv_mode)
        return function(inp, *_joined(weight, bias, dims), stride, padding, dilation, groups)

    return public(function, convolve)


def _transposed(function: Callable[..., Tensor], dims: int) -> Callable[..., Any]:
    def convolve(
        inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, dilation: Any = 1, groups: int = 1, conv_mode: str = "cross_correlation",
        compute_mode: str = "default",
    ) -> Tensor:  # fmt: skip
        """Return the transposed convolution of images or volumes; MegEngine puts `dilation` before `groups`.

        The weight is (in, out, kernel), or (groups, in / groups, out / groups, kernel); the rest is as for `conv2d`.
        """
        check_modes(function.__name__, compute_mode, conv_mode)
        return function(inp, *_joined(weight, bias, dims), stride, padding, output_padding, groups, dilation)

    return public(function, convolve)


conv1d, conv2d, conv3d = _convolution(F.conv1d, 1), _convolution(F.conv2d, 2), _convolution(F.conv3d, 3)
conv_transpose2d, conv_transpose3d = _transposed(F.conv_transpose2d, 2), _transposed(F.conv_transpose3d, 3)
leaky_relu = public(F.leaky_relu, lambda inp, negative_slope=0.01: F.leaky_relu(inp, negative_slope))
logsumexp = public(torch.logsumexp, lambda inp, axis, keepdims=False: torch.logsumexp(inp, axis, keepdim=keepdims))
one_hot = public(F.one_hot, lambda inp, num_classes: F.one_hot(inp.long(), num_classes).to(inp.dtype))
max_pool2d = public(
    F.max_pool2d, lambda inp, kernel_size, stride=None, padding=0: F.max_pool2d(inp, kernel_size, stride, padding)
)
adaptive_avg_pool2d = public(F.adaptive_avg_pool2d, lambda inp, oshp: F.adaptive_avg_pool2d(inp, _listed(oshp)))
adaptive_max_pool2d = public(F.adaptive_max_pool2d, lambda inp, oshp: F.adaptive_max_pool2d(inp, _listed(oshp)))


def _listed(oshp: Any) -> Any:
    return oshp.tolist() if isinstance(oshp, Tensor) else oshp


def prelu(x: Tensor, y: Tensor) -> Tensor:
    """Return `x` where it is positive and ``x * y`` elsewhere; `y` broadcasts, so channels need (1, channels, 1, 1)."""
    return torch.where(x > 0, x, x * y)


def avg_pool2d(
    inp: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, mode: str = "average_count_exclude_padding"
) -> Tensor:
    """Return the mean of each window; `mode` "average" counts the padding."""
    if mode not in ("average", "average_count_exclude_padding"):
        raise StepError(f"avg_pool2d(mode={mode!r}): expected 'average_count_exclude_padding' or 'average'")
    return F.avg_pool2d(inp, kernel_size, stride, padding, count_include_pad=mode == "average")


def softmax(inp: Tensor, axis: int | None = None) -> Tensor:
    """Return the softmax along `axis`; by default along axis 1, or axis 0 of tensors with 0, 1 or 3 axes."""
    default = 0 if inp.dim() in (0, 1, 3) else 1
    return F.softmax(inp, default if axis is None else axis)


def logsoftmax(inp: Tensor, axis: Any) -> Tensor:
    """Return the logarithm of the softmax along one axis or several."""
    if isinstance(axis, int):
        return F.log_softmax(inp, axis)
    return inp - torch.logsumexp(inp, tuple(axis), keepdim=True)


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
        last = src.shape[axis] - 1
        if (before, after) != (0, 0):
            places = torch.arange(-before, last + 1 + after, device=src.device)
            if name == "reflect":
                places = last - (last - places.abs()).abs()
            src = src.index_select(axis, places.clamp(0, last))
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
    given = (running_mean, running_var, weight, bias)
    mean, variance, scale, shift = (None if t is None else t.view(-1) for t in given)
    if training and (mean is None) != (variance is None):  # torch takes both or neither
        mean = torch.zeros_like(variance) if mean is None and variance is not None else mean
        variance = torch.ones_like(mean) if variance is None and mean is not None else variance
    result = F.batch_norm(inp, mean, variance, scale, shift, training, 1.0 - momentum, eps)
    return result if inplace or not training or mean is None else (result, running_mean, running_var)


def layer_norm(
    inp: Tensor, normalized_shape: Any, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over the last axes; with `affine` by `weight` and `bias` too."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return F.layer_norm(inp, shape, *_affine("layer_norm", affine, weight, bias), eps)


def group_norm(
    inp: Tensor, num_groups: int, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalise over groups of channels; with `affine` by `weight` and `bias` too."""
    return F.group_norm(inp, num_groups, *_affine("group_norm", affine, weight, bias), eps)


def instance_norm(
    inp: Tensor, affine: bool, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each channel of each sample; with `affine` by `weight` and `bias` too."""
    return F.instance_norm(inp, None, None, *_affine("instance_norm", affine, weight, bias), eps=eps)


def local_response_norm(
    inp: Tensor, kernel_size: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75
) -> Tensor:
    """Divide by the energy of neighbouring channels; `alpha` is for their sum, not for their mean as in torch."""
    return F.local_response_norm(inp.float(), kernel_size, alpha * kernel_size, beta, k).to(inp.dtype)


def _affine(
    where: str, affine: bool, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if affine and (weight is None or bias is None):
        raise StepError(f"{where}(affine=True): pass weight and bias, or affine=False")
    return (weight, bias) if affine else (None, None)


SMOOTH = ("bilinear", "linear", "trilinear")
MODES = (*SMOOTH, "bicubic", "nearest")


def interpolate(
    inp: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "bilinear", align_corners: bool | None = None
) -> Tensor:
    """Resize sequences ("linear"), images or volumes ("trilinear").

    Args:
        inp: (batch, channels, ...).
        size: of the result: a number for all axes, or one for each.
        scale_factor: instead of `size`.
        mode: one of `MODES`.
        align_corners: whether the outermost elements stay where they are; for linear modes.
    """
    name = str(mode).lower()
    if name not in MODES:
        raise StepError(f"interpolate(mode={mode!r}): expected one of {', '.join(map(repr, MODES))}")
    if (size is None) == (scale_factor is None):
        given = "neither" if size is None else "both"
        raise StepError(f"interpolate takes size or scale_factor, and was given {given}")
    if name not in SMOOTH and align_corners is not None:
        raise StepError(f"interpolate(align_corners={align_corners!r}): mode {name!r} has no such choice; leave it out")
    return F.interpolate(inp, size, scale_factor, name, bool(align_corners) if name in SMOOTH else None)


def cross_entropy(
    pred: Tensor, label: Tensor, axis: int = 1, with_logits: bool = True, label_smooth: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of `pred` and the class labels.

    Args:
        pred: logits, or probabilities without `with_logits`.
        label: integers of any width.
        axis: that of the classes.
        with_logits: whether `pred` are logits.
        label_smooth: share of the label that is spread over all classes.
        reduction: "mean", "sum" or "none".
    """
    pred = pred.movedim(axis, 1) if pred.dim() > 1 else pred
    if with_logits:
        return F.cross_entropy(pred, label.long(), reduction=_reduction(reduction), label_smoothing=label_smooth)
    logarithms = torch.log(pred)
    loss = F.nll_loss(logarithms, label.long(), reduction=_reduction(reduction))
    if not label_smooth:
        return loss
    spread = -logarithms.float().mean(1 if pred.dim() > 1 else 0)
    return (1.0 - label_smooth) * loss + label_smooth * _reduced(spread, reduction)


def binary_cross_entropy(pred: Tensor, label: Tensor, with_logits: bool = True, reduction: str = "mean") -> Tensor:
    """Return the binary cross entropy of logits, or of probabilities without `with_logits`."""
    function = F.binary_cross_entropy_with_logits if with_logits else F.binary_cross_entropy
    return function(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def l1_loss(pred: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean distance."""
    return F.l1_loss(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def square_loss(pred: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean squared distance."""
    return F.mse_loss(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def hinge_loss(pred: Tensor, label: Tensor, norm: str = "L1", reduction: str = "mean") -> Tensor:
    """Return the hinge loss, summed over the classes: labels are 1 and -1."""
    if str(norm).upper() not in ("L1", "L2"):
        raise StepError(f"hinge_loss(norm={norm!r}): expected 'L1' or 'L2'")
    margin = torch.relu(1.0 - pred.float() * label.float())
    return _reduced((margin if norm.upper() == "L1" else margin * margin).sum(1), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    reduction = _reduction(reduction)
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def _reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise StepError(f"reduction={reduction!r}; expected 'mean', 'sum' or 'none'")
    return reduction
