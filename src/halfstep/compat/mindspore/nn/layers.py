"""Layers with MindSpore's arguments and defaults. Each is torch's layer too: its weights have torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.ops.shapes import check_padding, cut, pad_for, sizes

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


def _fill(name: str, parameter: Tensor | None, value: Any) -> None:
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
        elif value in ("zeros", "ones"):
            parameter.fill_(float(value == "ones"))
        elif value == "normal":
            parameter.normal_(0.0, 0.01)  # MindSpore's Normal
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
    """A convolution with MindSpore's arguments.

    Args:
        in_channels, out_channels: numbers of channels.
        kernel_size, stride, dilation: one number, or one for each dimension.
        pad_mode: "same" (ceil(size / stride) outputs), "valid" (no padding) or "pad" (`padding`).
        padding: one number, one for each dimension, or two for each.
        group: groups of channels that do not see each other.
        has_bias: whether there is a bias; there is none unless asked for.
        weight_init, bias_init: a tensor, a number, "zeros", "ones", "normal" or None for torch's initialisation.
    """

    kind: ClassVar[Any]
    function: ClassVar[Any]
    dims: ClassVar[int]
    weight: Any
    bias: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        pad_mode: str = "same",
        padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        name, dims = type(self).__name__, self.dims
        around = check_padding(name, pad_mode, padding, dims)
        window = sizes(f"{name}: kernel_size", kernel_size, dims)
        steps, spread = sizes(f"{name}: stride", stride, dims), sizes(f"{name}: dilation", dilation, dims)
        self.kind.__init__(
            self, in_channels, out_channels, window, stride=steps, dilation=spread, groups=group, bias=has_bias
        )
        self.training = False
        self.window, self.steps, self.spread, self.around = window, steps, spread, around
        self.pad_mode, self.group, self.has_bias = pad_mode, group, has_bias
        _fill(f"{name}: weight_init", self.weight, weight_init)
        _fill(f"{name}: bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return the convolution of `x`, (batch, channels, size of each dimension)."""
        x = pad_for(x, self.pad_mode, self.around, self.window, self.steps, self.spread)
        result: Tensor = type(self).function(x, self.weight, self.bias, self.steps, 0, self.spread, self.group)
        return result


class Conv1d(_Conv, nn.Conv1d):
    """One-dimensional convolution."""

    kind, function, dims = nn.Conv1d, staticmethod(F.conv1d), 1


class Conv2d(_Conv, nn.Conv2d):
    """Two-dimensional convolution."""

    kind, function, dims = nn.Conv2d, staticmethod(F.conv2d), 2


class Conv3d(_Conv, nn.Conv3d):
    """Three-dimensional convolution."""

    kind, function, dims = nn.Conv3d, staticmethod(F.conv3d), 3


class _Transposed(_Conv):
    """A transposed convolution; "same" gives stride times as many outputs as inputs."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of `x`: all of it, of which the padding is cut off."""
        full: Tensor = type(self).function(x, self.weight, None, self.steps, 0, 0, self.group, self.spread)
        for i in range(self.dims):
            axis = i - self.dims
            whole = (x.shape[axis] - 1) * self.steps[i] + (self.window[i] - 1) * self.spread[i] + 1
            if self.pad_mode == "same":
                length = x.shape[axis] * self.steps[i]
                begin = max(whole - length, 0) // 2
            else:
                begin, length = self.around[2 * i], whole - self.around[2 * i] - self.around[2 * i + 1]
            full = cut(full, axis, begin, length)
        return full if self.bias is None else full + self.bias.reshape(-1, *[1] * self.dims)


class Conv1dTranspose(_Transposed, nn.ConvTranspose1d):
    """Transposed one-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose1d, staticmethod(F.conv_transpose1d), 1


class Conv2dTranspose(_Transposed, nn.ConvTranspose2d):
    """Transposed two-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose2d, staticmethod(F.conv_transpose2d), 2


class Conv3dTranspose(_Transposed, nn.ConvTranspose3d):
    """Transposed three-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose3d, staticmethod(F.conv_transpose3d), 3


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
        self.around = check_padding(name, self.pad_mode, padding, 2)

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
    """A batch normalisation with MindSpore's arguments.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: share of the old running statistics that stays; torch's momentum is one less this.
        affine: whether there are gamma and beta.
        gamma_init, beta_init: as for convolutions.
        use_batch_statistics: True or False: always or never those of the batch; None: while training.
    """

    kind: ClassVar[Any]
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    eps: float
    momentum: Any

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = None,
        beta_init: Any = None,
        use_batch_statistics: bool | None = None,
    ) -> None:
        name = type(self).__name__
        if not 0.0 <= momentum <= 1.0:
            raise MindSporeValueError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        self.kind.__init__(self, num_features, eps=eps, momentum=1.0 - momentum, affine=affine)
        self.training = False
        self.use_batch_statistics = use_batch_statistics
        _fill(f"{name}: gamma_init", self.weight, gamma_init)
        _fill(f"{name}: beta_init", self.bias, beta_init)

    @property
    def gamma(self) -> Any:
        """The factor; torch's weight."""
        return self.weight

    @property
    def beta(self) -> Any:
        """The summand; torch's bias."""
        return self.bias

    @property
    def moving_mean(self) -> Any:
        """The running mean."""
        return self.running_mean

    @property
    def moving_variance(self) -> Any:
        """The running variance."""
        return self.running_var

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        self.kind._check_input_dim(self, x)
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        if batch and not self.training:  # those of the batch, and the running ones stay as they are
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if batch:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, batch, self.momentum, self.eps
        )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Batch normalisation of (batch, channels) or (batch, channels, length)."""

    kind = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch normalisation of (batch, channels, height, width)."""

    kind = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """Batch normalisation of (batch, channels, depth, height, width)."""

    kind = nn.BatchNorm3d


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
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


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
