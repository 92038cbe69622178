"""Layers with MindSpore's arguments and defaults. Each is torch's layer too: its weights have torch's names."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.common.initializer import chosen
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.optim import NOT_DECAYED
from halfstep.compat.mindspore.ops.shapes import Size, Windowed, sizes
from halfstep.compat.shared import alias
from halfstep.torch_private.modules import check_input_dim

__all__ = [
    "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv1dTranspose", "Conv2d", "Conv2dTranspose",
    "Conv3d", "Conv3dTranspose", "Dense", "Dropout", "Embedding", "Flatten", "GELU", "GRUCell", "GroupNorm",
    "LSTMCell", "LayerNorm", "MaxPool2d", "RNNCell", "ReLU", "Sigmoid", "Softmax", "Tanh",
]  # fmt: skip

LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


class Layer(Cell):
    """A cell that is torch's layer too.

    Attributes:
        kind: torch's class among the bases, whose constructor `make` calls and whose forward computes.
    """

    kind: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = next(base for base in cls.__mro__ if base.__module__.startswith("torch.nn.modules"))

    def make(self, *args: Any, dtype: torch.dtype = torch.float32, **named: Any) -> None:
        """Construct torch's layer, in evaluation mode as every Cell, with parameters of `dtype`."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise MindSporeTypeError(f"{type(self).__name__}: dtype={dtype!r}; expected a float such as mstype.float32")
        self.kind.__init__(self, *args, **named)
        self.training = False
        self.to(dtype)

    def fill(self, argument: str, parameter: Tensor | None, value: Any) -> None:
        """Initialise a parameter from a number, a tensor, an Initializer or its name; None leaves torch's."""
        where = f"{type(self).__name__}: {argument}"
        if value is None or parameter is None:
            return
        with torch.no_grad():
            if not isinstance(value, Tensor):
                chosen(where, value)(parameter)
            elif value.shape == parameter.shape:
                parameter.copy_(value)
            else:
                raise MindSporeValueError(
                    f"{where}: a tensor of shape {tuple(value.shape)} for weights of {tuple(parameter.shape)}"
                )

    def construct(self, *inputs: Any, **named: Any) -> Any:
        """Return what torch's layer computes."""
        return self.kind.forward(self, *inputs, **named)


def _named(base: type[Layer], kind: type[nn.Module], doc: str) -> Any:
    """Return a layer with the arguments of `base` and the name of torch's `kind`, whose forward computes."""
    return type(kind.__name__, (base, kind), {"__doc__": doc, "__module__": __name__})


# ------------------------------------------------------------------------------------------------ no more than torch's


class ReLU(Layer, nn.ReLU):
    """max(x, 0)."""

    def __init__(self) -> None:
        self.make()


Sigmoid = _named(Layer, nn.Sigmoid, "1 / (1 + exp(-x)).")
Tanh = _named(Layer, nn.Tanh, "Hyperbolic tangent.")


class GELU(Layer, nn.GELU):
    """x times the normal distribution function; by default the tanh approximation, as in MindSpore."""

    def __init__(self, approximate: bool = True) -> None:
        self.make("tanh" if approximate else "none")


class Softmax(Layer, nn.Softmax):
    """exp(x) / sum(exp(x)) along an axis."""

    def __init__(self, axis: int = -1) -> None:
        self.make(axis)


class Flatten(Layer, nn.Flatten):
    """All dimensions but the first as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.make(start_dim, end_dim)


class Dropout(Layer, nn.Dropout):
    """Zero elements at random while training; the older `keep_prob` is 1 - p."""

    def __init__(
        self, keep_prob: float | None = None, p: float | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        call = f"Dropout(keep_prob={keep_prob!r}, p={p!r})"
        if keep_prob is not None and p is not None:
            raise MindSporeValueError(f"{call}: give one; keep_prob is 1 - p")
        share = 0.5 if p is None and keep_prob is None else (1.0 - keep_prob if keep_prob is not None else p)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share < 1.0:
            raise MindSporeValueError(f"{call}: expected 0 < keep_prob <= 1, 0 <= p < 1")
        self.make(float(share), dtype=dtype)


class Dense(Layer, nn.Linear):
    """Fully connected layer; torch.nn.Linear."""

    def __init__(
        self, in_channels: int, out_channels: int, weight_init: Any = None, bias_init: Any = None,
        has_bias: bool = True, activation: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(in_channels, out_channels, bias=has_bias, dtype=dtype)
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
        known = {"relu": ReLU, "sigmoid": Sigmoid, "tanh": Tanh, "gelu": GELU, "softmax": Softmax}
        if isinstance(activation, str) and activation in known:
            activation = known[activation]()
        if not (activation is None or isinstance(activation, nn.Module)):
            raise MindSporeValueError(
                f"Dense: activation={activation!r}; expected a cell, None or one of {', '.join(map(repr, known))}"
            )
        self.activation = activation
        self.fill("weight_init", self.weight, weight_init)
        self.fill("bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, activated."""
        x = F.linear(x, self.weight, self.bias)
        return x if self.activation is None else self.activation(x)


class Embedding(Layer, nn.Embedding):
    """Rows of a table.

    Args:
        vocab_size: rows.
        embedding_size: elements of each.
        use_one_hot: how MindSpore looks rows up; the result is the same, and torch indexes.
        embedding_table: how the table begins, as `weight_init` of convolutions; "normal" has a deviation of 0.01.
        dtype: its format.
        padding_idx: a row of zeros.
    """

    def __init__(
        self, vocab_size: int, embedding_size: int, use_one_hot: bool = False, embedding_table: Any = "normal",
        dtype: torch.dtype = torch.float32, padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        checks.check_bool("Embedding: use_one_hot", use_one_hot, "; padding_idx= is an argument by name")
        self.make(vocab_size, embedding_size, dtype=dtype)
        self.padding_idx = padding_idx
        self.fill("embedding_table", self.weight, embedding_table)
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx] = 0.0

    embedding_table = alias("weight", "The table; torch's weight.")

    def construct(self, ids: Tensor) -> Tensor:
        """Return the rows `ids`."""
        return F.embedding(ids, self.weight)  # as in MindSpore the padding row is trained


class RNNCell(Layer, nn.RNNCell):
    """One step of an Elman network, tanh or relu; returns the next hidden state."""

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, nonlinearity: str = "tanh",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(input_size, hidden_size, has_bias, nonlinearity, dtype=dtype)


class _Gated(Layer):
    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        self.make(input_size, hidden_size, has_bias, dtype=dtype)


LSTMCell = _named(_Gated, nn.LSTMCell, "One step of an LSTM; returns the next hidden state, a pair.")
GRUCell = _named(_Gated, nn.GRUCell, "One step of a GRU; returns the next hidden state.")


# ---------------------------------------------------------------------------------------------------- normalisation


class _Norm(Layer):
    weight: Any
    bias: Any

    def begin(self, gamma_init: Any, beta_init: Any, *, trained: bool = True) -> None:
        """Initialise gamma and beta; MindSpore's optimizers leave them out of weight decay, by their names."""
        for parameter in (self.weight, self.bias):
            setattr(parameter, NOT_DECAYED, True)
            parameter.requires_grad_(bool(trained))
        self.fill("gamma_init", self.weight, gamma_init)
        self.fill("beta_init", self.bias, beta_init)


class _BatchNormalisation(_Norm):
    """A batch normalisation with MindSpore's arguments.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: share of the old running statistics that stays; torch's momentum is one less this.
        affine: whether gamma and beta, which there always are as in MindSpore, are trained.
        gamma_init, beta_init: as for convolutions.
        moving_mean_init, moving_var_init: how the running statistics begin, likewise.
        use_batch_statistics: True or False: always or never those of the batch; None: while training. Those
            of the batch also move the running ones.
        data_format: "NCHW".
        dtype: format of gamma and beta.
    """

    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    eps: float
    momentum: Any

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True,
        gamma_init: Any = None, beta_init: Any = None, moving_mean_init: Any = None, moving_var_init: Any = None,
        use_batch_statistics: bool | None = None, data_format: str = "NCHW", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        share = checks.check_number(f"{name}: momentum", momentum, "the share of the old, 0 to 1")
        checks.check_value(f"{name}: momentum", momentum, 0.0 <= share <= 1.0, "the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        checks.check_layout(name, data_format, "NCHW")
        self.make(num_features, eps=eps, momentum=1.0 - momentum, affine=True, dtype=dtype)
        for statistics in (self.running_mean, self.running_var):
            statistics.data = statistics.data.float()
        self.use_batch_statistics = use_batch_statistics
        self.begin(gamma_init, beta_init, trained=affine)
        self.fill("moving_mean_init", self.running_mean, moving_mean_init)
        self.fill("moving_var_init", self.running_var, moving_var_init)

    gamma = alias("weight", "The factor; torch's weight.")
    beta = alias("bias", "The summand; torch's bias.")
    moving_mean = alias("running_mean", "The running mean.")
    moving_variance = alias("running_var", "The running variance.")

    def construct(self, x: Tensor) -> Tensor:
        check_input_dim(self.kind)(self, x)
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        if batch:
            self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, batch, self.momentum, self.eps)


OF = "Batch normalisation of (batch, channels{})."
BatchNorm1d = _named(_BatchNormalisation, nn.BatchNorm1d, OF.format(") or (batch, channels, length"))
BatchNorm2d = _named(_BatchNormalisation, nn.BatchNorm2d, OF.format(", height, width"))
BatchNorm3d = _named(_BatchNormalisation, nn.BatchNorm3d, OF.format(", depth, height, width"))


class LayerNorm(_Norm, nn.LayerNorm):
    """Layer normalisation over the last dimensions.

    Args:
        normalized_shape: their sizes.
        begin_norm_axis: the first of them, -1 for that of `normalized_shape`; checked when the layer is called.
        begin_params_axis: likewise; gamma and beta have `normalized_shape`.
        gamma_init, beta_init: as for convolutions.
        epsilon: added to the variance.
        dtype: format of gamma and beta.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], begin_norm_axis: int = -1, begin_params_axis: int = -1,
        gamma_init: Any = "ones", beta_init: Any = "zeros", epsilon: float = 1e-7, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        for name, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis)):
            checks.check_whole(f"LayerNorm: {name}", axis, "an int", least=-(2**31))
        self.make(shape, eps=epsilon, dtype=dtype)
        self.begin_norm_axis, self.begin_params_axis = begin_norm_axis, begin_params_axis
        self.begin(gamma_init, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        first = x.dim() - len(self.normalized_shape)
        for name in ("begin_norm_axis", "begin_params_axis"):
            axis = getattr(self, name)
            if axis != -1 and axis % x.dim() != first:
                raise MindSporeValueError(
                    f"LayerNorm: {name}={axis} for an input of {x.dim()} dimensions and normalized_shape "
                    f"{tuple(self.normalized_shape)}, which begins at {first}; give that axis, or -1"
                )
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(_Norm, nn.GroupNorm):
    """Group normalisation.

    Args:
        num_groups: groups of channels.
        num_channels: channels.
        eps: added to the variance.
        affine: whether gamma and beta are trained.
        gamma_init, beta_init: as for convolutions.
        dtype: format of gamma and beta.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, gamma_init: Any = "ones",
        beta_init: Any = "zeros", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(num_groups, num_channels, eps=eps, affine=True, dtype=dtype)
        self.begin(gamma_init, beta_init, trained=affine)


# ------------------------------------------------------------------------------------------- convolutions and pooling


class _Conv(Layer, Windowed):
    """A convolution with MindSpore's arguments.

    Args:
        in_channels, out_channels: numbers of channels.
        kernel_size, stride, dilation: one number, or one for each dimension.
        pad_mode: "same" (ceil(size / stride) outputs), "valid" (no padding) or "pad" (`padding`).
        padding: one number, one for each dimension, or two for each.
        group: groups of channels that do not see each other.
        has_bias: whether there is a bias; there is none unless asked for.
        weight_init, bias_init: a tensor, a number, "zeros", "ones", "normal" (or another name of
            `common.initializer`), an Initializer, or None for torch's initialisation, which is MindSpore's.
        data_format: channels come second.
        dtype: format of the weights.
    """

    weight: Any
    bias: Any

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None, data_format: str = "", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        dims = self.dims = int(self.kind.__name__[-2])  # of nn.Conv2d and nn.ConvTranspose2d: 2
        checks.check_layout(name, data_format, "", LAYOUTS[dims])
        self.set_window(name, dims, kernel_size, stride, pad_mode, padding, dilation, group)
        settings = {"stride": self.stride, "dilation": self.dilation, "groups": group, "bias": has_bias}
        self.make(in_channels, out_channels, self.kernel_size, dtype=dtype, **settings)
        self.has_bias = has_bias
        self.fill("weight_init", self.weight, weight_init)
        self.fill("bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, self.bias)


Conv1d = _named(_Conv, nn.Conv1d, "One-dimensional convolution.")
Conv2d = _named(_Conv, nn.Conv2d, "Two-dimensional convolution.")
Conv3d = _named(_Conv, nn.Conv3d, "Three-dimensional convolution.")


class _Transposed(_Conv):
    """A transposed convolution; "same" gives stride times as many outputs as inputs.

    Args:
        output_padding: zeros after the end of each dimension, as in MindSpore (torch computes them); for pad_mode
            "pad".
    """

    def __init__(self, *args: Any, output_padding: Size = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beyond = sizes(f"{type(self).__name__}: output_padding", output_padding, self.dims)
        if any(self.beyond) and self.pad_mode != "pad":
            raise MindSporeValueError(
                f"{type(self).__name__}: output_padding={output_padding!r} beside pad_mode={self.pad_mode!r}; use "
                "pad_mode='pad'"
            )

    def construct(self, x: Tensor) -> Tensor:
        full = self.input_gradient(x, self.weight)
        full = full if self.bias is None else full + self.bias.reshape(-1, *[1] * self.dims)
        return F.pad(full, [n for beyond in self.beyond[::-1] for n in (0, beyond)]) if any(self.beyond) else full


class Conv1dTranspose(_Transposed, nn.ConvTranspose1d):
    """Transposed one-dimensional convolution."""


class Conv2dTranspose(_Transposed, nn.ConvTranspose2d):
    """Transposed two-dimensional convolution; `output_padding` comes before `dilation`."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, output_padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False,
        weight_init: Any = None, bias_init: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias, weight_init,
            bias_init, output_padding=output_padding, dtype=dtype,
        )  # fmt: skip


class Conv3dTranspose(_Transposed, nn.ConvTranspose3d):
    """Transposed three-dimensional convolution; `output_padding` comes after `group`."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, output_padding: Size = 0, has_bias: bool = False,
        weight_init: Any = None, bias_init: Any = None, data_format: str = "NCDHW", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias, weight_init,
            bias_init, data_format, output_padding=output_padding, dtype=dtype,
        )  # fmt: skip


class _Pool(Cell, Windowed):
    """A window of two dimensions. The stride is 1 unless given, as in MindSpore and not as in torch."""

    def __init__(
        self, kernel_size: Size, stride: Size, pad_mode: str, padding: Size, data_format: str, padded: str, given: bool
    ) -> None:
        """Check the settings; `padded` are the names of those for pad_mode "pad" alone, `given`: any is."""
        super().__init__()
        name = type(self).__name__
        checks.check_layout(name, data_format, LAYOUTS[2])
        self.set_window(name, 2, kernel_size, stride, str(pad_mode).lower(), padding)
        self.both = self.pad[0::2]
        even = self.pad_mode != "pad" or self.both == self.pad[1::2]
        checks.check_value(f"{name}: padding", padding, even, "the same before and after")
        if self.pad_mode != "pad" and given:
            raise MindSporeValueError(f"{name}: {padded} belong to pad_mode='pad', not {pad_mode!r}")

    def extra_repr(self) -> str:
        """Show the settings, not MindSpore's defaults: stride is 1 unless given."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, pad_mode={self.pad_mode!r}"


class MaxPool2d(_Pool):
    """Maximum of each window.

    Args:
        kernel_size, stride: one number or two; the stride is 1 unless given.
        pad_mode: "same", "valid" or "pad".
        padding: one number or two, for "pad"; what is added never is the maximum.
        dilation, return_indices, ceil_mode: as torch's, for "pad".
        data_format: "NCHW".
    """

    def __init__(
        self, kernel_size: Size = 1, stride: Size = 1, pad_mode: str = "valid", padding: Size = 0, dilation: Size = 1,
        return_indices: bool = False, ceil_mode: bool = False, data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        spread = sizes("MaxPool2d: dilation", dilation, 2)
        padded, given = "dilation, return_indices and ceil_mode", spread != (1, 1) or return_indices or ceil_mode
        super().__init__(kernel_size, stride, pad_mode, padding, data_format, padded, given)
        self.dilation, self.return_indices, self.ceil_mode = spread, return_indices, ceil_mode

    def construct(self, x: Tensor) -> Any:
        """Return the pooled `x`, and with `return_indices` the places."""
        if self.pad_mode == "pad":
            pool: Any = F.max_pool2d  # its overloads are by the value of return_indices
            window = (self.kernel_size, self.stride, self.both, self.dilation)
            return pool(x, *window, self.ceil_mode, self.return_indices)
        return F.max_pool2d(self.padded(x, float("-inf")), self.kernel_size, self.stride)


class AvgPool2d(_Pool):
    """Mean of each window.

    Args:
        kernel_size, stride: one number or two; the stride is 1 unless given.
        pad_mode: "same" (means of what is inside the image), "valid" or "pad".
        padding: one number or two, for "pad".
        ceil_mode, count_include_pad, divisor_override: as torch's, for "pad": padding counts unless told otherwise.
        data_format: "NCHW".
    """

    def __init__(
        self, kernel_size: Size = 1, stride: Size = 1, pad_mode: str = "valid", padding: Size = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
        data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        padded = "ceil_mode, count_include_pad and divisor_override"
        given = ceil_mode or not count_include_pad or divisor_override is not None
        super().__init__(kernel_size, stride, pad_mode, padding, data_format, padded, given)
        self.ceil_mode, self.count_include_pad, self.divisor_override = ceil_mode, count_include_pad, divisor_override

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        if self.pad_mode == "pad":
            window = (self.kernel_size, self.stride, self.both, self.ceil_mode)
            return F.avg_pool2d(x, *window, self.count_include_pad, self.divisor_override)
        padded = self.padded(x)
        mean = F.avg_pool2d(padded, self.kernel_size, self.stride)
        if padded is x:
            return mean
        return mean / F.avg_pool2d(self.padded(torch.ones_like(x)), self.kernel_size, self.stride)
