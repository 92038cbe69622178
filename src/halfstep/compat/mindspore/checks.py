"""The errors of this front-end (halfstep's and also the built-in class that MindSpore raises), and common checks.

A check gets how its message begins, such as "Model: epoch", and the value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, did_you_mean


class MindSporeTypeError(HalfstepError, TypeError):
    """An argument of a type that the function does not take."""


class MindSporeValueError(HalfstepError, ValueError):
    """An argument of the right type with an impossible value."""


class MindSporeRuntimeError(HalfstepError, RuntimeError):
    """A training that cannot go on, or cells put together in a way that cannot be carried out."""


def check_bool(where: str, value: object, hint: str = "") -> None:
    """Raise MindSporeTypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise MindSporeTypeError(f"{where}={value!r}; expected True or False{hint}")


def check_type(where: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise MindSporeTypeError unless `value` is one of `kinds`; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise MindSporeTypeError(f"{where}={value!r} is a {type(value).__name__}; expected {expected}")


def check_value(where: str, value: object, good: object, expected: str) -> None:
    """Raise MindSporeValueError unless `good`, which says whether `value` is what is `expected`."""
    if not good:
        raise MindSporeValueError(f"{where}={value!r}; expected {expected}")


def check_layout(where: str, layout: object, *known: str) -> None:
    """Raise MindSporeValueError unless `layout` is one of `known`, in which channels come second."""
    expected = f"{' or '.join(repr(one) for one in known if one)}: transpose the input, or use torch.channels_last"
    check_value(f"{where}: data_format", layout, layout in known, expected)


def check_number(where: str, value: Any, expected: str = "a number") -> float:
    """Return a number as a float, or raise MindSporeTypeError."""
    check_type(where, value, (int, float), expected)
    return float(value)


def check_whole(where: str, value: Any, expected: str = "an int from 1", least: int = 1) -> int:
    """Return a whole number of at least `least`, or raise MindSporeTypeError or MindSporeValueError."""
    check_type(where, value, int, expected)
    check_value(where, value, value >= least, expected)
    return int(value)


def check_names(where: str, given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise MindSporeValueError if a keyword argument is none of `known`."""
    for name, value in given.items():
        if name not in known:
            takes = f"{', '.join(known)}{did_you_mean(name, known)}"
            raise MindSporeValueError(f"{where}: unsupported argument {name}={value!r}; it takes {takes}")


def check_network(where: str, network: object, loss_fn: object = callable) -> None:
    """Raise MindSporeTypeError unless `network` is a torch module and `loss_fn` can be called."""
    if not isinstance(network, nn.Module):
        raise MindSporeTypeError(f"{where}: the network is a {type(network).__name__}; expected a Cell or torch module")
    if not callable(loss_fn):
        raise MindSporeTypeError(f"{where}: loss_fn={loss_fn!r} is not callable; expected a Cell such as nn.MSELoss()")


def check_optimizer(where: str, optimizer: object) -> None:
    """Raise MindSporeTypeError unless `optimizer` is a torch optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise MindSporeTypeError(f"{where}: optimizer is a {kind}; expected an optimizer such as nn.Momentum")
