"""The peers' scale rules as they compute them, in Python floats or in fp32: what the device rule is compared with.

Each takes ``step(bad)`` and has ``scale`` and ``alarm`` (the peer would have raised). Written from the formulas in the
peers' public sources, not from halfstep's rule.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field


def f32(value: float) -> float:
    """Round to fp32; past its range inf."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@dataclass(kw_only=True)
class Peer:
    """What all peers have."""

    scale: float = 65536.0
    growth: float = 2.0
    interval: int = 2000
    alarm: bool = False


@dataclass(kw_only=True)
class Torch(Peer):
    """``_amp_update_scale_``: fp32 scale, double factor."""

    backoff: float = 0.5
    tracker: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale, self.tracker = f32(self.scale * self.backoff), 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            grown = f32(self.scale * self.growth)
            self.scale, self.tracker = grown if math.isfinite(grown) else self.scale, 0


@dataclass(kw_only=True)
class Apex(Peer):
    """amp.scaler.LossScaler on a Python float."""

    ceiling: float = 2.0**24
    unskipped: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale /= 2.0
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.interval:
            self.scale = min(self.ceiling, self.scale * self.growth)
            self.unskipped = 0


@dataclass(kw_only=True)
class ApexFp16Utils(Peer):
    """fp16_utils.DynamicLossScaler on a Python float."""

    scale: float = 2.0**32
    interval: int = 1000
    iteration: int = 0
    last_bad: int = -1

    def step(self, bad: bool) -> None:
        if bad:
            self.scale = max(self.scale / self.growth, 1.0)
            self.last_bad = self.iteration
        elif (self.iteration - self.last_bad) % self.interval == 0:
            self.scale *= self.growth
        self.iteration += 1


@dataclass(kw_only=True)
class DeepSpeed(Peer):
    """DynamicLossScaler with delayed shift, on a Python float."""

    interval: int = 1000
    minimum: float = 1.0
    shift: int = 2
    consecutive: bool = False
    iteration: int = 0
    last_bad: int = -1
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.shift

    def step(self, bad: bool) -> None:
        self.alarm = False
        if bad:
            if self.shift == 1 or self.left == 1:
                self.alarm = self.scale == self.minimum
                self.scale = max(self.scale / self.growth, self.minimum)
            else:
                self.left -= 1
            self.last_bad = self.iteration
        else:
            if self.consecutive:
                self.left = self.shift
            stable = self.iteration - self.last_bad - 1
            if stable > 0 and stable % self.interval == 0:
                if not self.consecutive:
                    self.left = self.shift
                self.scale *= self.growth
        self.iteration += 1


@dataclass(kw_only=True)
class Megatron(Peer):
    """DynamicGradScaler: scale and factors are fp32 tensors."""

    scale: float = 2.0**32
    backoff: float = 0.5
    interval: int = 1000
    minimum: float = 1.0
    hysteresis: int = 2
    tracker: int = 0
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def step(self, bad: bool) -> None:
        if bad:
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(f32(self.scale * f32(self.backoff)), self.minimum)
            return
        self.tracker += 1
        if self.tracker == self.interval:
            self.tracker, self.left = 0, self.hysteresis
            self.scale = f32(self.scale * f32(self.growth))


@dataclass(kw_only=True)
class Fairseq(Peer):
    """DynamicLossScaler on a Python float; what follows a raise is not modelled."""

    scale: float = 2.0**15
    tolerance: float = 0.0
    minimum: float = 1e-4
    iteration: int = 0
    last_bad: int = -1
    last_rescale: int = -1
    bad_since: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            before, since = self.scale, self.iteration - self.last_rescale
            self.last_bad = self.iteration
            self.bad_since += 1
            if self.bad_since / float(since) >= self.tolerance:
                self.scale /= self.growth
                self.last_rescale, self.bad_since = self.iteration, 0
            if self.scale <= self.minimum:
                self.scale, self.alarm = before, True
        elif (self.iteration - self.last_bad) % self.interval == 0:
            self.scale *= self.growth
            self.last_rescale = self.iteration
        self.iteration += 1


@dataclass(kw_only=True)
class MindSporeScaler(Peer):
    """amp.DynamicLossScaler: fp32, divides, keeps the scale when a growth is not finite."""

    scale: float = 2.0**24
    counter: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale, self.counter = max(1.0, f32(self.scale / self.growth)), 0
            return
        grown = f32(self.scale * self.growth)
        if self.counter == self.interval - 1 and math.isfinite(grown):
            self.scale = grown
        self.counter = (self.counter + 1) % self.interval


@dataclass(kw_only=True)
class MindSporeCell(Peer):
    """nn.DynamicLossScaleUpdateCell: fp32, multiplies by the fp32 reciprocal, sticks at inf."""

    scale: float = 2.0**24
    current: int = 1
    last: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale = max(f32(self.scale * f32(1.0 / self.growth)), 1.0)
        elif self.interval <= self.current - self.last:
            self.scale = f32(self.scale * self.growth)
        else:
            self.current += 1
            return
        self.last = self.current
        self.current += 1


@dataclass(kw_only=True)
class MindSporeManager(Peer):
    """amp.DynamicLossScaleManager on a Python float; raises after too many bad steps in a row."""

    scale: float = 2.0**24
    patience: int = 1000
    current: int = 1
    last: int = 0
    bad_steps: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale = max(self.scale / self.growth, 1.0)
            self.last = self.current
            self.bad_steps += 1
        else:
            if (self.current - self.last) % self.interval == 0:
                self.scale *= self.growth
            self.bad_steps = 0
        self.alarm = self.bad_steps > self.patience
        self.current += 1


@dataclass(kw_only=True)
class MegEngine(Peer):
    """amp.GradScaler on a Python float."""

    scale: float = 16.0
    backoff: float = 0.5
    tracker: int = 0

    def step(self, bad: bool) -> None:
        if bad:
            self.scale *= self.backoff
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker >= self.interval:
            self.scale *= self.growth
            self.tracker = 0
