"""``mindspore.common.initializer``: how weights begin, by name or as an object.

Names and formulas: MindSpore 2.10, https://www.mindspore.cn. They are carried out by torch.nn.init.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import init

from halfstep.compat.mindspore.checks import MindSporeValueError, check_number
from halfstep.compat.shared import with_settings
from halfstep.errors import did_you_mean

__all__ = [
    "Constant", "HeNormal", "HeUniform", "Initializer", "Normal", "One", "TruncatedNormal", "Uniform", "XavierNormal",
    "XavierUniform", "Zero", "initializer",
]  # fmt: skip


class Initializer:
    """Fills a tensor: ``initializer(tensor)``, in place."""

    def __call__(self, arr: Tensor) -> None:
        """Fill `arr`."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__(arr)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _kind(name: str, meaning: str, function: Callable[..., object], **settings: Any) -> Any:
    return with_settings(Initializer, name, meaning, "__call__", function, **settings)


def _he(function: Callable[..., object]) -> Callable[..., object]:
    return lambda arr, negative_slope, **named: function(arr, negative_slope, **named)


Constant = _kind(
    "Constant", "One number everywhere.", lambda arr, value: init.constant_(arr, value), value=dataclasses.MISSING
)
Zero = _kind("Zero", "Zeros.", init.zeros_)
One = _kind("One", "Ones.", init.ones_)
Normal = _kind(
    "Normal", "Normal numbers of a deviation and a mean.",
    lambda arr, sigma, mean: init.normal_(arr, mean, sigma), sigma=0.01, mean=0.0,
)  # fmt: skip
TruncatedNormal = _kind(
    "TruncatedNormal", "Normal numbers between `a` and `b`.",
    lambda arr, sigma, mean, a, b: init.trunc_normal_(arr, mean, sigma, a, b), sigma=0.01, mean=0.0, a=-2.0, b=2.0,
)  # fmt: skip
Uniform = _kind(
    "Uniform", "Uniform numbers from ``-scale`` to ``scale``.",
    lambda arr, scale: init.uniform_(arr, -scale, scale), scale=0.07,
)  # fmt: skip
XAVIER = "{} numbers of deviation ``gain * sqrt(2 / (fan_in + fan_out))``."
XavierUniform = _kind("XavierUniform", XAVIER.format("Uniform"), init.xavier_uniform_, gain=1)
XavierNormal = _kind("XavierNormal", XAVIER.format("Normal"), init.xavier_normal_, gain=1)
HE = "{} numbers of deviation ``gain / sqrt(fan)``, the gain being that of the nonlinearity."
FAN = {"negative_slope": 0, "mode": "fan_in", "nonlinearity": "leaky_relu"}
HeUniform = _kind("HeUniform", HE.format("Uniform"), _he(init.kaiming_uniform_), **FAN)
HeNormal = _kind("HeNormal", HE.format("Normal"), _he(init.kaiming_normal_), **FAN)

NAMED: dict[str, Callable[[], Initializer]] = {
    "zeros": Zero, "zero": Zero, "ones": One, "one": One, "normal": Normal, "truncatednormal": TruncatedNormal,
    "uniform": Uniform, "xavier_uniform": XavierUniform, "xavieruniform": XavierUniform,
    "xavier_normal": XavierNormal, "xaviernormal": XavierNormal, "he_uniform": HeUniform, "heuniform": HeUniform,
    "he_normal": HeNormal, "henormal": HeNormal,
}  # fmt: skip


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
    return cast(Initializer, Constant(check_number(where, value, "a name, a number or a tensor")))


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
