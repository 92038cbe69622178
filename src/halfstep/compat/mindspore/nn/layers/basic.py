"""Dense layers, activations, embeddings, recurrent cells: layers that need no more than torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.layers.initial import fill, made_of

__all__ = [
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GELU",
    "GRUCell",
    "LSTMCell",
    "RNNCell",
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]


class Dense(Cell, nn.Linear):
    """Fully connected layer; torch.nn.Linear."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Linear.__init__(self, in_channels, out_channels, bias=has_bias)
        self.training = False
        made_of(self, dtype)
        self.in_channels, self.out_channels, self.has_bias = in_channels, out_channels, has_bias
        self.activation = _activation(activation)
        fill("Dense: weight_init", self.weight, weight_init)
        fill("Dense: bias_init", self.bias, bias_init)

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
        return known[activation]()
    raise MindSporeValueError(
        f"Dense: activation={activation!r}; expected a cell, None or one of {', '.join(map(repr, known))}"
    )


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
        nn.Dropout.__init__(self, float(share))
        self.training = False
        made_of(self, dtype)

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


class Embedding(Cell, nn.Embedding):
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
        if not isinstance(use_one_hot, bool):
            raise MindSporeTypeError(
                f"Embedding: use_one_hot={use_one_hot!r}; expected True or False; padding_idx= is an argument by name"
            )
        nn.Embedding.__init__(self, vocab_size, embedding_size)
        self.padding_idx = padding_idx
        self.training = False
        made_of(self, dtype)
        fill("Embedding: embedding_table", self.weight, embedding_table)
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx] = 0.0

    @property
    def embedding_table(self) -> Any:
        """The table; torch's weight."""
        return self.weight

    def construct(self, ids: Tensor) -> Tensor:
        """Return the rows `ids`."""
        return F.embedding(ids, self.weight)


class _RecurrentCell(Cell):
    """One step of a recurrent layer: torch's cell under MindSpore's arguments."""

    def construct(self, x: Tensor, hx: Any = None) -> Any:
        """Return the next hidden state (an LSTM's is a pair)."""
        return self._torch_cell.forward(self, x, hx)

    _torch_cell: Any = nn.RNNCell


class RNNCell(_RecurrentCell, nn.RNNCell):
    """One step of an Elman network, tanh or relu."""

    _torch_cell = nn.RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        has_bias: bool = True,
        nonlinearity: str = "tanh",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.RNNCell.__init__(self, input_size, hidden_size, has_bias, nonlinearity)
        self.training = False
        made_of(self, dtype)


class LSTMCell(_RecurrentCell, nn.LSTMCell):
    """One step of an LSTM."""

    _torch_cell = nn.LSTMCell

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        nn.LSTMCell.__init__(self, input_size, hidden_size, has_bias)
        self.training = False
        made_of(self, dtype)


class GRUCell(_RecurrentCell, nn.GRUCell):
    """One step of a GRU."""

    _torch_cell = nn.GRUCell

    def __init__(
        self, input_size: int, hidden_size: int, has_bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        nn.GRUCell.__init__(self, input_size, hidden_size, has_bias)
        self.training = False
        made_of(self, dtype)
