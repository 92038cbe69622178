"""Layers with MindSpore's arguments and defaults. Each is torch's layer too: its weights have torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.ops.shapes import check_padding, pad_for, sizes

__all__ = [
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv1dTranspose",
    "Conv2d",
    "Conv2dTranspose",
    "Conv3d",
    "Conv3dTranspose",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GELU",
    "GRUCell",
    "GroupNorm",
    "LSTMCell",
    "LayerNorm",
    "MaxPool2d",
    "RNNCell",
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]

Size = int | tuple[int, ...]


def _fill(name: str, parameter: nn.Parameter | None, value: Any) -> None:
    """Initialise a parameter from a number, a tensor or the name of a simple rule; None leaves torch's."""
    if value is None or parameter is None:
        return
    with torch.no_grad():
        if isinstance(value, Tensor):
            if value.shape != parameter.shape:
                raise MindSporeValueError(
                    f"{name}: a tensor of shape {tuple(value.shape)} for weights of {tuple(parameter.shape)}"
                )
            parameter.copy_(value)
        elif value in ("zeros", "ones", "normal"):
            # MindSpore's Normal has a standard deviation of 0.01
            {"zeros": parameter.zero_, "ones": parameter.fill_, "normal": parameter.normal_}[value](
                *{"zeros": (), "ones": (1.0,), "normal": (0.0, 0.01)}[value]  # type: ignore[arg-type]
            )
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            parameter.fill_(value)
        else:
            raise MindSporeValueError(
                f"{name}={value!r}; expected a tensor, a number, 'zeros', 'ones', 'normal' or None for torch's "
                "initialisation; for others use torch.nn.init on the layer's weight"
            )


class Dense(Cell, nn.Linear):
    """Fully connected layer; torch.nn.Linear."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: nn.Module | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_channels, out_channels, bias=has_bias)
        self.training = False
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
        self.activation = activation
        _fill("Dense: weight_init", self.weight, weight_init)
        _fill("Dense: bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, activated."""
        x = F.linear(x, self.weight, self.bias)
        return x if self.activation is None else self.activation(x)


class _Conv(Cell):
    """What convolutions share: MindSpore's arguments, padding and `pad_mode`."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _set_up(
        self, kind: type[nn.Module], dims: int, in_channels: int, out_channels: int, kernel_size: Size, stride: Size,
        pad_mode: str, padding: Size, dilation: Size, group: int, has_bias: bool, weight_init: Any, bias_init: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        kernel = sizes(f"{name}: kernel_size", kernel_size, dims)
        steps, spread = sizes(f"{name}: stride", stride, dims), sizes(f"{name}: dilation", dilation, dims)
        around = check_padding(name, pad_mode, padding, dims)
        kind.__init__(
            self, in_channels, out_channels, kernel, stride=steps, dilation=spread, groups=group, bias=has_bias
        )  # type: ignore[misc]  # the torch class of this very layer
        self.training = False
        self.pad_mode, self.around, self.has_bias, self.group = pad_mode, around, has_bias, group
        self.steps, self.spread, self.window = steps, spread, kernel
        _fill(f"{name}: weight_init", self.weight, weight_init)
        _fill(f"{name}: bias_init", self.bias, bias_init)

    def _padded(self, x: Tensor) -> Tensor:
        return pad_for(x, self.pad_mode, self.around, self.window, self.steps, self.spread)


class Conv1d(_Conv, nn.Conv1d):
    """One-dimensional convolution; ``pad_mode`` "same" (the default), "valid" or "pad"."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.Conv1d, 1, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias,
            weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the convolution of `x`, (batch, channels, length)."""
        return F.conv1d(self._padded(x), self.weight, self.bias, self.steps, 0, self.spread, self.group)


class Conv2d(_Conv, nn.Conv2d):
    """Two-dimensional convolution; ``pad_mode`` "same" (the default), "valid" or "pad"."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.Conv2d, 2, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias,
            weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the convolution of `x`, (batch, channels, height, width)."""
        return F.conv2d(self._padded(x), self.weight, self.bias, self.steps, 0, self.spread, self.group)


class Conv3d(_Conv, nn.Conv3d):
    """Three-dimensional convolution; ``pad_mode`` "same" (the default), "valid" or "pad"."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.Conv3d, 3, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias,
            weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the convolution of `x`, (batch, channels, depth, height, width)."""
        return F.conv3d(self._padded(x), self.weight, self.bias, self.steps, 0, self.spread, self.group)


class _Transposed(_Conv):
    """What transposed convolutions share: the size of the result and where it is cut."""

    def _cut(self, full: Tensor, x: Tensor) -> Tensor:
        """Return the part of an unpadded result that the padding leaves."""
        dims = len(self.window)
        for i in range(dims):
            k, s, d = self.window[i], self.steps[i], self.spread[i]
            axis, whole = i - dims, (x.shape[i - dims] - 1) * s + (k - 1) * d + 1
            if self.pad_mode == "same":
                begin, length = max(whole - x.shape[axis] * s, 0) // 2, x.shape[axis] * s
            else:
                begin, length = self.around[2 * i], whole - self.around[2 * i] - self.around[2 * i + 1]
            there = min(length, full.shape[axis] - begin)
            full = full.narrow(axis, begin, there)
            if there < length:  # a stride longer than the window leaves outputs that nothing reaches
                full = F.pad(full, [0, 0] * (-axis - 1) + [0, length - there])
        return full if self.bias is None else full + self.bias.reshape(-1, *[1] * dims)


class Conv1dTranspose(_Transposed, nn.ConvTranspose1d):
    """Transposed one-dimensional convolution; "same" gives stride times as many outputs as inputs."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.ConvTranspose1d, 1, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group,
            has_bias, weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of `x`."""
        return self._cut(F.conv_transpose1d(x, self.weight, None, self.steps, 0, 0, self.group, self.spread), x)


class Conv2dTranspose(_Transposed, nn.ConvTranspose2d):
    """Transposed two-dimensional convolution; "same" gives stride times as many outputs as inputs."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.ConvTranspose2d, 2, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group,
            has_bias, weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of `x`."""
        return self._cut(F.conv_transpose2d(x, self.weight, None, self.steps, 0, 0, self.group, self.spread), x)


class Conv3dTranspose(_Transposed, nn.ConvTranspose3d):
    """Transposed three-dimensional convolution; "same" gives stride times as many outputs as inputs."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:  # fmt: skip
        self._set_up(
            nn.ConvTranspose3d, 3, in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group,
            has_bias, weight_init, bias_init,
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of `x`."""
        return self._cut(F.conv_transpose3d(x, self.weight, None, self.steps, 0, 0, self.group, self.spread), x)


class ReLU(Cell, nn.ReLU):
    """max(x, 0)."""

    def __init__(self) -> None:
        nn.ReLU.__init__(self)
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return F.relu(x)


class Sigmoid(Cell, nn.Sigmoid):
    """1 / (1 + exp(-x))."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return torch.sigmoid(x)


class Tanh(Cell, nn.Tanh):
    """Hyperbolic tangent."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return torch.tanh(x)


class GELU(Cell, nn.GELU):
    """x times the normal distribution function; by default the tanh approximation, as in MindSpore."""

    def __init__(self, approximate: bool = True) -> None:
        nn.GELU.__init__(self, "tanh" if approximate else "none")
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return F.gelu(x, approximate=self.approximate)


class Softmax(Cell, nn.Softmax):
    """exp(x) / sum(exp(x)) along an axis."""

    def __init__(self, axis: int = -1) -> None:
        nn.Softmax.__init__(self, axis)
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return the softmax of `x`."""
        return F.softmax(x, self.dim)


class Dropout(Cell, nn.Dropout):
    """Zero elements at random while training; the older `keep_prob` is 1 - p."""

    def __init__(self, keep_prob: float | None = None, p: float | None = None) -> None:
        if keep_prob is not None and p is not None:
            raise MindSporeValueError(f"Dropout(keep_prob={keep_prob!r}, p={p!r}): give one; keep_prob is 1 - p")
        share = 0.5 if p is None and keep_prob is None else (1.0 - keep_prob if keep_prob is not None else p)
        nn.Dropout.__init__(self, float(share or 0.0))
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` with elements zeroed and the rest scaled up."""
        return F.dropout(x, self.p, self.training)


class Flatten(Cell, nn.Flatten):
    """All dimensions but the first as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        nn.Flatten.__init__(self, start_dim, end_dim)
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` flattened."""
        return torch.flatten(x, self.start_dim, self.end_dim)


class _Pool(Cell):
    def __init__(
        self,
        kernel_size: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        pad_mode: str = "valid",
        padding: int | Sequence[int] = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.window = sizes(f"{name}: kernel_size", kernel_size, 2)
        self.steps = sizes(f"{name}: stride", stride, 2)
        self.pad_mode = pad_mode.lower()
        self.around = check_padding(name, self.pad_mode, padding, 2)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Show the settings, not MindSpore's defaults: stride is 1 unless given."""
        return f"kernel_size={self.window}, stride={self.steps}, pad_mode={self.pad_mode!r}"


class MaxPool2d(_Pool):
    """Maximum of each window. The stride is 1 unless given, as in MindSpore and not as in torch."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        x = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1), float("-inf"))
        return F.max_pool2d(x, self.window, self.steps)


class AvgPool2d(_Pool):
    """Mean of each window, of what is inside the image. The stride is 1 unless given."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        padded = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1))
        if padded is x:
            return F.avg_pool2d(x, self.window, self.steps)
        inside = pad_for(torch.ones_like(x), self.pad_mode, self.around, self.window, self.steps, (1, 1))
        return F.avg_pool2d(padded, self.window, self.steps) / F.avg_pool2d(inside, self.window, self.steps)


class _BatchNorm(Cell):
    """What batch norms share: MindSpore's momentum is the share of the old statistics, torch's of the new."""

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def _set_up(
        self, kind: type[nn.Module], num_features: int, eps: float, momentum: float, affine: bool, gamma_init: Any,
        beta_init: Any, use_batch_statistics: bool | None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if not 0.0 <= momentum <= 1.0:
            raise MindSporeValueError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        kind.__init__(self, num_features, eps=eps, momentum=1.0 - momentum, affine=affine)  # type: ignore[misc]
        self.training = False
        self.use_batch_statistics = use_batch_statistics
        _fill(f"{name}: gamma_init", self.weight, gamma_init)
        _fill(f"{name}: beta_init", self.bias, beta_init)

    @property
    def gamma(self) -> nn.Parameter:
        """The factor; torch's weight."""
        return self.weight

    @property
    def beta(self) -> nn.Parameter:
        """The summand; torch's bias."""
        return self.bias

    @property
    def moving_mean(self) -> Tensor:
        """The running mean."""
        return self.running_mean

    @property
    def moving_variance(self) -> Tensor:
        """The running variance."""
        return self.running_var

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        mean, var, eps, momentum = self.running_mean, self.running_var, float(self.eps), float(self.momentum)  # type: ignore[arg-type]
        self._check_input_dim(x)  # type: ignore[operator]  # torch's own check
        if batch and self.training and isinstance(self.num_batches_tracked, Tensor):
            self.num_batches_tracked.add_(1)
        if batch and not self.training:  # statistics of the batch, and the running ones stay
            return F.batch_norm(x, None, None, self.weight, self.bias, True, momentum, eps)
        return F.batch_norm(x, mean, var, self.weight, self.bias, batch, momentum, eps)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Batch normalisation of (batch, channels) or (batch, channels, length)."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True, gamma_init: Any = None,
        beta_init: Any = None, use_batch_statistics: bool | None = None,
    ) -> None:  # fmt: skip
        self._set_up(nn.BatchNorm1d, num_features, eps, momentum, affine, gamma_init, beta_init, use_batch_statistics)


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch normalisation of (batch, channels, height, width)."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True, gamma_init: Any = None,
        beta_init: Any = None, use_batch_statistics: bool | None = None,
    ) -> None:  # fmt: skip
        self._set_up(nn.BatchNorm2d, num_features, eps, momentum, affine, gamma_init, beta_init, use_batch_statistics)


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """Batch normalisation of (batch, channels, depth, height, width)."""

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True, gamma_init: Any = None,
        beta_init: Any = None, use_batch_statistics: bool | None = None,
    ) -> None:  # fmt: skip
        self._set_up(nn.BatchNorm3d, num_features, eps, momentum, affine, gamma_init, beta_init, use_batch_statistics)


class LayerNorm(Cell, nn.LayerNorm):
    """Layer normalisation over the last dimensions."""

    def __init__(
        self, normalized_shape: int | Sequence[int], gamma_init: Any = "ones", beta_init: Any = "zeros",
        epsilon: float = 1e-5,
    ) -> None:  # fmt: skip
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        nn.LayerNorm.__init__(self, shape, eps=epsilon)
        self.training = False
        _fill("LayerNorm: gamma_init", self.weight, gamma_init)
        _fill("LayerNorm: beta_init", self.bias, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # type: ignore[arg-type]


class GroupNorm(Cell, nn.GroupNorm):
    """Group normalisation."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        nn.GroupNorm.__init__(self, num_groups, num_channels, eps=eps, affine=affine)
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Embedding(Cell, nn.Embedding):
    """Rows of a table."""

    def __init__(self, vocab_size: int, embedding_size: int, padding_idx: int | None = None) -> None:
        nn.Embedding.__init__(self, vocab_size, embedding_size, padding_idx)
        self.training = False

    def construct(self, ids: Tensor) -> Tensor:
        """Return the rows `ids`."""
        return F.embedding(ids, self.weight, self.padding_idx)


class _RecurrentCell(Cell):
    """One step of a recurrent layer: torch's cell under MindSpore's arguments."""

    def construct(self, x: Tensor, hx: Any = None) -> Any:
        """Return the next hidden state (an LSTM's is a pair)."""
        return self._torch_cell.forward(self, x, hx)

    _torch_cell: Any = nn.RNNCell


class RNNCell(_RecurrentCell, nn.RNNCell):
    """One step of an Elman network, tanh or relu."""

    _torch_cell = nn.RNNCell

    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True, nonlinearity: str = "tanh") -> None:
        nn.RNNCell.__init__(self, input_size, hidden_size, has_bias, nonlinearity)
        self.training = False


class LSTMCell(_RecurrentCell, nn.LSTMCell):
    """One step of an LSTM."""

    _torch_cell = nn.LSTMCell

    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True) -> None:
        nn.LSTMCell.__init__(self, input_size, hidden_size, has_bias)
        self.training = False


class GRUCell(_RecurrentCell, nn.GRUCell):
    """One step of a GRU."""

    _torch_cell = nn.GRUCell

    def __init__(self, input_size: int, hidden_size: int, has_bias: bool = True) -> None:
        nn.GRUCell.__init__(self, input_size, hidden_size, has_bias)
        self.training = False
