"""``mindspore.common.initializer``: how weights begin, by name or as an object.

Names and formulas: MindSpore 2.10, https://www.mindspore.cn. They are carried out by torch.nn.init.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.errors import did_you_mean

__all__ = [
    "Constant", "HeNormal", "HeUniform", "Initializer", "Normal", "One", "TruncatedNormal", "Uniform", "XavierNormal",
    "XavierUniform", "Zero", "initializer",
]  # fmt: skip


class Initializer:
    """Fills a tensor: ``initializer(tensor)``, in place."""

    def __call__(self, arr: Tensor) -> None:
        """Fill `arr`."""
        self._fill(arr)

    def _fill(self, arr: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__(arr)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@dataclass(repr=False, eq=False)
class Constant(Initializer):
    """One number everywhere."""

    value: float

    def _fill(self, arr: Tensor) -> None:
        init.constant_(arr, self.value)


class Zero(Initializer):
    """Zeros."""

    def _fill(self, arr: Tensor) -> None:
        init.zeros_(arr)


class One(Initializer):
    """Ones."""

    def _fill(self, arr: Tensor) -> None:
        init.ones_(arr)


@dataclass(repr=False, eq=False)
class Normal(Initializer):
    """Normal numbers of a deviation and a mean."""

    sigma: float = 0.01
    mean: float = 0.0

    def _fill(self, arr: Tensor) -> None:
        init.normal_(arr, self.mean, self.sigma)


@dataclass(repr=False, eq=False)
class TruncatedNormal(Initializer):
    """Normal numbers between `a` and `b`."""

    sigma: float = 0.01
    mean: float = 0.0
    a: float = -2.0
    b: float = 2.0

    def _fill(self, arr: Tensor) -> None:
        init.trunc_normal_(arr, self.mean, self.sigma, self.a, self.b)


@dataclass(repr=False, eq=False)
class Uniform(Initializer):
    """Uniform numbers from ``-scale`` to ``scale``."""

    scale: float = 0.07

    def _fill(self, arr: Tensor) -> None:
        init.uniform_(arr, -self.scale, self.scale)


@dataclass(repr=False, eq=False)
class XavierUniform(Initializer):
    """Uniform numbers of deviation ``gain * sqrt(2 / (fan_in + fan_out))``."""

    gain: float = 1

    def _fill(self, arr: Tensor) -> None:
        init.xavier_uniform_(arr, self.gain)


class XavierNormal(XavierUniform):
    """Normal numbers of deviation ``gain * sqrt(2 / (fan_in + fan_out))``."""

    def _fill(self, arr: Tensor) -> None:
        init.xavier_normal_(arr, self.gain)


@dataclass(repr=False, eq=False)
class HeUniform(Initializer):
    """Uniform numbers of deviation ``gain / sqrt(fan)``, the gain being that of the nonlinearity."""

    negative_slope: float = 0
    mode: Any = "fan_in"
    nonlinearity: Any = "leaky_relu"

    def _fill(self, arr: Tensor) -> None:
        init.kaiming_uniform_(arr, self.negative_slope, self.mode, self.nonlinearity)


class HeNormal(HeUniform):
    """Normal numbers of deviation ``gain / sqrt(fan)``."""

    def _fill(self, arr: Tensor) -> None:
        init.kaiming_normal_(arr, self.negative_slope, self.mode, self.nonlinearity)


NAMED: Mapping[str, type[Initializer]] = MappingProxyType(
    {
        "zeros": Zero, "zero": Zero, "ones": One, "one": One, "normal": Normal, "truncatednormal": TruncatedNormal,
        "uniform": Uniform, "xavier_uniform": XavierUniform, "xavieruniform": XavierUniform,
        "xavier_normal": XavierNormal, "xaviernormal": XavierNormal, "he_uniform": HeUniform, "heuniform": HeUniform,
        "he_normal": HeNormal, "henormal": HeNormal,
    }
)  # fmt: skip


def chosen(where: str, value: Any) -> Initializer:
    """Return the initializer that a name, a number or an initializer stands for."""
    if isinstance(value, Initializer):
        return value
    if isinstance(value, str):
        if value.lower() not in NAMED:
            raise MindSporeValueError(
                f"{where}={value!r}; expected a tensor, a number, an Initializer, None for torch's initialisation, or "
                f"one of {', '.join(map(repr, NAMED))}{did_you_mean(value.lower(), NAMED)}; else use torch.nn.init"
            )
        return NAMED[value.lower()]()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Constant(value)
    raise MindSporeTypeError(f"{where}={value!r} is a {type(value).__name__}; expected a name, a number or a tensor")


def initializer(init: Any, shape: Sequence[int] | int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a new tensor filled by `init`; at once, where MindSpore waits until it is used.

    Args:
        init: a name, a number, an `Initializer`, or a tensor, which is copied.
        shape: of the tensor; may be left out for a tensor.
        dtype: a number format.
    """
    wanted = (shape,) if isinstance(shape, int) else None if shape is None else tuple(shape)
    if isinstance(init, Tensor):
        if wanted is not None and tuple(init.shape) != wanted:
            raise MindSporeValueError(f"initializer: a tensor of shape {tuple(init.shape)} and shape={wanted}")
        return init.detach().to(dtype, copy=True)
    if wanted is None:
        raise MindSporeValueError(f"initializer({init!r}): pass a shape")
    made = torch.empty(wanted, dtype=dtype)
    with torch.no_grad():
        chosen("initializer: init", init)(made)
    return made
