"""megengine.functional: linear maps and convolutions, with MegEngine's shapes of biases and of weights in groups."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import StepError

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "linear"]


def check_compute_mode(where: str, compute_mode: object) -> None:
    """Take "default" and "float32": products of low formats are summed in fp32 either way."""
    if str(compute_mode).lower() not in ("default", "float32"):
        raise StepError(f"{where}(compute_mode={compute_mode!r}): expected 'default' or 'float32'")


def check_conv_mode(where: str, conv_mode: object) -> None:
    """Take "cross_correlation", the only mode MegEngine takes too."""
    if str(conv_mode).lower() != "cross_correlation":
        raise StepError(f"{where}(conv_mode={conv_mode!r}): expected 'cross_correlation'; flip the kernel for others")


def linear(inp: Tensor, weight: Tensor, bias: Tensor | None = None, compute_mode: str = "default") -> Tensor:
    """Return ``inp @ weight.T + bias``."""
    check_compute_mode("linear", compute_mode)
    return F.linear(inp, weight, bias)


def conv1d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, conv_mode: str = "cross_correlation", compute_mode: str = "default",
) -> Tensor:  # fmt: skip
    """Return the convolution of sequences (batch, channels, length).

    Args:
        inp: the input.
        weight: (out, in, kernel), or (groups, out / groups, in / groups, kernel) in either spelling of groups.
        bias: one number for each output channel, of shape (1, out, 1) or (out,).
        stride: number of elements between two windows.
        padding: zeros before and after.
        dilation: distance of the window's elements.
        groups: groups of channels that do not see each other.
        conv_mode: "cross_correlation".
        compute_mode: "default" or "float32".
    """
    check_conv_mode("conv1d", conv_mode)
    check_compute_mode("conv1d", compute_mode)
    return F.conv1d(inp, _weight(weight, 1), _flat(bias), stride, padding, dilation, groups)


def conv2d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, conv_mode: str = "cross_correlation", compute_mode: str = "default",
) -> Tensor:  # fmt: skip
    """Return the convolution of images; as `conv1d`, the bias of shape (1, out, 1, 1) or (out,)."""
    check_conv_mode("conv2d", conv_mode)
    check_compute_mode("conv2d", compute_mode)
    return F.conv2d(inp, _weight(weight, 2), _flat(bias), stride, padding, dilation, groups)


def conv3d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1, conv_mode: str = "cross_correlation",
) -> Tensor:  # fmt: skip
    """Return the convolution of volumes; as `conv1d`, the bias of shape (1, out, 1, 1, 1) or (out,)."""
    check_conv_mode("conv3d", conv_mode)
    return F.conv3d(inp, _weight(weight, 3), _flat(bias), stride, padding, dilation, groups)


def conv_transpose2d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, dilation: Any = 1, groups: int = 1, conv_mode: str = "cross_correlation",
    compute_mode: str = "default",
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of images; MegEngine puts `dilation` before `groups`.

    The weight is (in, out, height, width), or (groups, in / groups, out / groups, height, width).
    """
    check_conv_mode("conv_transpose2d", conv_mode)
    check_compute_mode("conv_transpose2d", compute_mode)
    return F.conv_transpose2d(
        inp, _weight(weight, 2), _flat(bias), stride, padding, output_padding, groups, dilation
    )  # fmt: skip


def conv_transpose3d(
    inp: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of volumes; as `conv_transpose2d`."""
    return F.conv_transpose3d(
        inp, _weight(weight, 3), _flat(bias), stride, padding, output_padding, groups, dilation
    )  # fmt: skip


def _flat(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dim() == 1 else bias.reshape(-1)


def _weight(weight: Tensor, dims: int) -> Tensor:
    """Return a weight with its groups, if they are an axis of their own, joined with the channels."""
    return weight.flatten(0, 1) if weight.dim() == dims + 3 else weight
