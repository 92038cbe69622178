"""Scale rule: how a loss scale answers good and bad steps, as plain numbers.

A *good* step is one whose gradients are all finite, a *bad* step any other. A `ScaleRule` holds numbers only; the state
machine that carries it out on device tensors is `halfstep.scale.rule`. The peers' numbers and formulas were read in
their public repositories, 2025-2026: pytorch/pytorch, NVIDIA/apex, deepspeedai/DeepSpeed, NVIDIA/Megatron-LM,
facebookresearch/fairseq and MegEngine/MegEngine on GitHub, mindspore/mindspore on Gitee.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from halfstep.arguments import FLAG, Kind, check, one_of
from halfstep.errors import ScaleError
from halfstep.schema import packaged_toml

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite fp32 number: as a ceiling it means 'none'."""

MAX_COUNT = 2**31 - 2
"""Counters are int32 on the device, and one more than the largest count must still fit."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ScaleRule:
    """Numbers that say how a loss scale moves; hashable, and ``eval(repr(rule)) == rule``.

    The scale is an fp32 number (see `kept`); each move is computed exactly and rounded once.

    Attributes:
        init: scale before the first step, in ``[floor, ceiling]``.
        growth: factor (>= 1) applied after `interval` good steps in a row; 1 never grows.
        backoff: factor in (0, 1] applied at a bad step; 1 never backs off.
        interval: good steps in a row before the scale grows (>= 1).
        floor: the scale never goes below it (>= 0; 0 = no floor: 2**16 is 0 after 166 halvings, and weights then NaN).
        ceiling: the scale never goes above it (`FP32_MAX` = none).
        hysteresis: bad steps it takes before the scale backs off (>= 1; 1 = at once). Once used up, every further bad
            step backs off until it is refilled.
        refill: what gives the hysteresis back: ``"growth"`` (the scale grew) or ``"good"`` (any good step).
        divide: a bad step divides by `growth` instead of multiplying by `backoff`, which must then be ``1 / growth``
            (differs in the last bit when `growth` is not a power of two).
        delay: good steps after a bad step, and at the start, that do not count towards `interval` (DeepSpeed has 1).
        tolerance: share (0..1) of bad steps since the scale last moved below which a bad step does not back off.
        at_floor: when backing off would go below the floor: ``"warn"`` stay at the floor and warn once; ``"raise"``
            stay at it and raise; ``"refuse"`` never reach the floor: keep the scale where it is and raise.
        patience: bad steps in a row after which the scaler raises; 0 = never.
        guard: a growth past the largest fp32 number is not carried out. Without it the scale becomes inf for good.
        kept: the format the scale moves in: "fp32", or "fp64" as a peer's Python float, which differs where a factor is
            no power of two. Losses and gradients meet its fp32 number in any case.

    Raises:
        ScaleError: a value is of the wrong type or out of range; the message names it, its value and the range.

    Examples:
        >>> rule = hs.ScaleRule(init=2.0**12, interval=500, floor=1.0)
        >>> policy = hs.Policy.of("mixed", dtype="fp16").replace(scale=rule)
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14  # the smallest normal fp16 number: a scale below it cannot save an fp16 gradient
    ceiling: float = 2.0**24  # beyond it 1/scale is 0 in fp16, and an fp32 loss gains nothing
    hysteresis: int = 1
    refill: Literal["growth", "good"] = "growth"
    divide: bool = False
    delay: int = 0
    tolerance: float = 0.0
    at_floor: Literal["warn", "raise", "refuse"] = "warn"
    patience: int = 0
    guard: bool = True
    kept: Literal["fp32", "fp64"] = "fp32"

    def __repr__(self) -> str:
        """Return the constructor call with the fields that are not the default."""
        shown = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"ScaleRule({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def __post_init__(self) -> None:
        """Make numbers of numpy and torch plain, and validate every value and how they go together."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if type(value) not in _PYTHON_TYPES:
                object.__setattr__(self, name, plain(value))
        for name in ("interval", "hysteresis", "delay", "patience"):
            object.__setattr__(self, name, whole(getattr(self, name)))
        check(
            "scale rule",
            ScaleError,
            floor=(self.floor, between(0.0, FP32_MAX, "0 (no floor) or a positive scale")),
            ceiling=(self.ceiling, between(self.floor, FP32_MAX, "at least floor; FP32_MAX for none")),
            init=(self.init, between(self.floor, self.ceiling, "between floor and ceiling")),
            **{name: (getattr(self, name), kind) for name, kind in _KINDS.items()},
        )
        if self.init < 2.0**-149:  # the smallest fp32 number
            raise ScaleError(f"scale rule: init={self.init!r} is 0 in fp32; give a positive scale, 65536.0 is usual")
        if self.divide and self.backoff != 1.0 / self.growth:
            raise ScaleError(
                f"scale rule: divide=True divides by growth={self.growth!r}, but backoff={self.backoff!r} is not "
                f"1/growth; set backoff={1.0 / self.growth!r} or divide=False"
            )
        if self.at_floor == "refuse" and not self.init > self.floor:
            raise ScaleError(
                f"scale rule: at_floor='refuse' keeps the scale above floor={self.floor!r}, but init={self.init!r}; "
                "raise init or lower floor"
            )

    @classmethod
    def static(cls, value: float) -> ScaleRule:
        """Return the rule of a scale that stays at `value`; bad steps are skipped all the same."""
        value = plain(value)
        positive = between(2.0**-149, FP32_MAX, "a positive scale that fp32 can hold")
        check("scale rule", ScaleError, **{"a static value": (value, positive)})
        return cls(init=value, growth=1.0, backoff=1.0, interval=1, floor=value, ceiling=value)

    @property
    def is_static(self) -> bool:
        """Whether the scale can never move."""
        return self.floor == self.ceiling or (self.growth == 1.0 and self.backoff == 1.0)


def plain(value: Any) -> Any:
    """Return the Python number or bool in a numpy scalar or a 0-dim array or tensor (waits for its device), else it."""
    if (
        type(value) not in _PYTHON_TYPES
        and getattr(value, "ndim", None) == 0
        and callable(getattr(value, "item", None))
    ):
        return value.item()
    return value


def whole(value: Any) -> Any:
    """Return a float without a fraction as an int, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_PYTHON_TYPES = frozenset({int, float, bool, str})


def between(low: Any, high: Any, meaning: str) -> Kind:
    """Return the numbers in ``[low, high]``, none of which is negative."""
    words = f"a number in [{low!r}, {high!r}], {meaning},"
    return Kind(words, lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and low <= v <= high)


def steps_from(low: int) -> Kind:
    """Return the counts of steps in ``[low, MAX_COUNT]``."""
    words = f"a whole number of steps in [{low}, {MAX_COUNT}]"
    return Kind(words, lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= MAX_COUNT)


_KINDS = {
    "growth": between(1.0, FP32_MAX, "at least 1; 2 doubles the scale"),
    "backoff": between(2.0**-126, 1.0, "above 0 and at most 1; 0.5 halves the scale"),
    "tolerance": between(0.0, 1.0, "a share of steps"),
    "interval": steps_from(1),
    "hysteresis": steps_from(1),
    "delay": steps_from(0),
    "patience": steps_from(0),
    "refill": one_of("growth", "good"),
    "at_floor": one_of("warn", "raise", "refuse"),
    "divide": FLAG,
    "guard": FLAG,
    "kept": one_of("fp32", "fp64"),
}

SCALE_RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {name: ScaleRule(**numbers) for name, numbers in packaged_toml("policy/tables/scales.toml").items()}
)
