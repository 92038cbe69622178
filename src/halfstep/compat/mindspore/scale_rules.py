"""MindSpore's loss-scale rules, as halfstep's presets with other numbers; halfstep's GradScaler carries them out.

What the numbers say, with s the scale, f the factor and w the window, all in float32:

DynamicLossScaler ("mindspore-scaler"): a bad step gives max(1, s / f), the w-th good step in a row s * f.
DynamicLossScaleUpdateCell ("mindspore-cell"): the same, but a bad step gives max(1, s * (1 / f)).
DynamicLossScaleManager: as the first in Python floats, without an upper bound; the 1001st bad step in a row raises.

A growth past the largest float32 is not carried out, where MindSpore's cell goes to inf and never comes back.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import halfstep as hs
from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError

__all__ = ["by_hand", "cell_rule", "check_count", "check_scale", "check_factor", "scaler_rule"]

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _preset(name: str, init: float, factor: float, window: int, backoff: float) -> hs.ScaleRule:
    rule = hs.GradScaler(rule=name).rule
    return dataclasses.replace(
        rule, init=_fp32(init), growth=_fp32(factor), backoff=backoff, interval=window, guard=True
    )


def scaler_rule(init: float, factor: float, window: int) -> hs.ScaleRule:
    """Return the rule of `DynamicLossScaler`."""
    return _preset("mindspore-scaler", init, factor, window, 1.0 / _fp32(factor))


def cell_rule(init: float, factor: float, window: int) -> hs.ScaleRule:
    """Return the rule of `DynamicLossScaleUpdateCell`: it multiplies by the float32 reciprocal."""
    return _preset("mindspore-cell", init, factor, window, _fp32(1.0 / _fp32(factor)))


def by_hand() -> hs.ScaleRule:
    """Return the rule of a scale that only moves when somebody sets it."""
    return hs.ScaleRule(init=1.0, growth=1.0, backoff=1.0, interval=1, floor=0.0, ceiling=FP32_MAX)


def check_scale(where: str, value: Any, low: float = 1.0) -> float:
    """Return a loss scale that was given as a number.

    Raises:
        MindSporeTypeError, MindSporeValueError: not a number, below `low`, or more than float32 holds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MindSporeTypeError(
            f"{where}={value!r} is a {type(value).__name__}; expected a number, float or int, such as 1024.0"
        )
    if not low <= value <= FP32_MAX:
        raise MindSporeValueError(f"{where}={value!r}; expected a finite number of at least {low:g}")
    return float(value)


def check_factor(where: str, value: Any) -> float:
    """Return the factor of a dynamic scale.

    Raises:
        MindSporeTypeError, MindSporeValueError: not a number, or below 1: good steps would lower the scale.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MindSporeTypeError(f"{where}={value!r} is a {type(value).__name__}; expected a number, 2 is usual")
    if not 1 <= value <= FP32_MAX:
        raise MindSporeValueError(
            f"{where}={value!r}; expected a number of at least 1, which good steps multiply the scale by; 2 is usual"
        )
    return float(value)


def check_count(where: str, value: Any) -> int:
    """Return a whole number from 1.

    Raises:
        MindSporeTypeError, MindSporeValueError: not a whole number, or below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise MindSporeTypeError(f"{where}={value!r} is a {type(value).__name__}; expected an int from 1")
    if value < 1:
        raise MindSporeValueError(f"{where}={value!r}; expected an int from 1")
    return value
