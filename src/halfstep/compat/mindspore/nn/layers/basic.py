"""Dense layers, activations, embeddings, recurrent cells: layers that need no more than torch's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError, check_bool
from halfstep.compat.mindspore.common.initializer import chosen
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.shared import alias

__all__ = [
    "Dense", "Dropout", "Embedding", "Flatten", "GELU", "GRUCell", "LSTMCell", "RNNCell", "ReLU", "Sigmoid", "Softmax",
    "Tanh",
]  # fmt: skip


class Layer(Cell):
    """A cell that is torch's layer too.

    Attributes:
        kind: torch's class, whose constructor `make` calls and whose forward computes.
    """

    kind: ClassVar[Any]

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


class Dense(Layer, nn.Linear):
    """Fully connected layer; torch.nn.Linear."""

    kind = nn.Linear

    def __init__(
        self, in_channels: int, out_channels: int, weight_init: Any = None, bias_init: Any = None,
        has_bias: bool = True, activation: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(in_channels, out_channels, bias=has_bias, dtype=dtype)
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
        self.activation = _activation(activation)
        self.fill("weight_init", self.weight, weight_init)
        self.fill("bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, activated."""
        x = F.linear(x, self.weight, self.bias)
        return x if self.activation is None else self.activation(x)


def _activation(activation: Any) -> nn.Module | None:
    """Return an activation given as a cell or by name."""
    if activation is None or isinstance(activation, nn.Module):
        return activation
    known = {"relu": ReLU, "sigmoid": Sigmoid, "tanh": Tanh, "gelu": GELU, "softmax": Softmax}
    if isinstance(activation, str) and activation in known:
        made: nn.Module = known[activation]()
        return made
    raise MindSporeValueError(
        f"Dense: activation={activation!r}; expected a cell, None or one of {', '.join(map(repr, known))}"
    )


class ReLU(Layer, nn.ReLU):
    """max(x, 0)."""

    kind = nn.ReLU

    def __init__(self) -> None:
        self.make()


class Sigmoid(Layer, nn.Sigmoid):
    """1 / (1 + exp(-x))."""

    kind = nn.Sigmoid


class Tanh(Layer, nn.Tanh):
    """Hyperbolic tangent."""

    kind = nn.Tanh


class GELU(Layer, nn.GELU):
    """x times the normal distribution function; by default the tanh approximation, as in MindSpore."""

    kind = nn.GELU

    def __init__(self, approximate: bool = True) -> None:
        self.make("tanh" if approximate else "none")


class Softmax(Layer, nn.Softmax):
    """exp(x) / sum(exp(x)) along an axis."""

    kind = nn.Softmax

    def __init__(self, axis: int = -1) -> None:
        self.make(axis)


class Dropout(Layer, nn.Dropout):
    """Zero elements at random while training; the older `keep_prob` is 1 - p."""

    kind = nn.Dropout

    def __init__(
        self, keep_prob: float | None = None, p: float | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        if keep_prob is not None and p is not None:
            raise MindSporeValueError(f"Dropout(keep_prob={keep_prob!r}, p={p!r}): give one; keep_prob is 1 - p")
        share = 0.5 if p is None and keep_prob is None else (1.0 - keep_prob if keep_prob is not None else p)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share < 1.0:
            raise MindSporeValueError(
                f"Dropout(keep_prob={keep_prob!r}, p={p!r}): expected 0 < keep_prob <= 1, 0 <= p < 1"
            )
        self.make(float(share), dtype=dtype)


class Flatten(Layer, nn.Flatten):
    """All dimensions but the first as one."""

    kind = nn.Flatten

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.make(start_dim, end_dim)


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

    kind = nn.Embedding

    def __init__(
        self, vocab_size: int, embedding_size: int, use_one_hot: bool = False, embedding_table: Any = "normal",
        dtype: torch.dtype = torch.float32, padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        check_bool("Embedding: use_one_hot", use_one_hot, "; padding_idx= is an argument by name")
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

    kind = nn.RNNCell

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, nonlinearity: str = "tanh",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(input_size, hidden_size, has_bias, nonlinearity, dtype=dtype)


class LSTMCell(Layer, nn.LSTMCell):
    """One step of an LSTM; returns the next hidden state, a pair."""

    kind = nn.LSTMCell

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        self.make(input_size, hidden_size, has_bias, dtype=dtype)


class GRUCell(Layer, nn.GRUCell):
    """One step of a GRU; returns the next hidden state."""

    kind = nn.GRUCell

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        self.make(input_size, hidden_size, has_bias, dtype=dtype)
