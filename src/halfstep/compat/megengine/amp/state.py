"""The switch: what is in force in a thread, and the halfstep region that carries it out.

A frame is what one `autocast` (or, at the bottom, the bare switch) has set. Setting a property changes the innermost
frame; leaving an `autocast` takes its frame away, so whatever was in force before is in force again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import cache

import halfstep as hs
from halfstep.compat.megengine.amp.lists import MEGENGINE, for_formats
from halfstep.compat.megengine.tensor import dtype_of
from halfstep.errors import RegionError

__all__ = ["Frame", "change", "now", "policy_for", "pop", "precision", "push"]

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(kw_only=True, slots=True)
class Frame:
    """What is in force.

    Attributes:
        enabled: whether operators are cast.
        low: format of products, one of `SHORT`.
        high: format of sensitive operators, "float32" or the low one.
        policy: which operator is which.
        owner: the object that pushed the frame.
        region: the open halfstep region, if one is needed.
    """

    enabled: bool = False
    low: str = "float16"
    high: str = "float32"
    policy: hs.Policy = MEGENGINE
    owner: object = None
    region: hs.autocast | None = field(default=None, compare=False)

    def open(self) -> None:
        """Open the region; below the first frame none is needed to have nothing cast."""
        if self.enabled or self.owner is not None:
            self.region = hs.autocast(policy=policy_for(self.policy, self.low, self.high), enabled=self.enabled)
            self.region.__enter__()

    def close(self, *, failing: bool = False) -> None:
        """Close the region."""
        region, self.region = self.region, None
        if region is not None:
            error = RegionError if failing else None
            region.__exit__(error, None, None)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack = [Frame()]


_frames = _Frames()


def now() -> Frame:
    """Return what is in force in this thread."""
    return _frames.stack[-1]


def change(
    *, enabled: bool | None = None, low: object = None, high: object = None, policy: hs.Policy | str | None = None
) -> None:
    """Change what is in force up to the end of the innermost `autocast`; an error changes nothing.

    Raises:
        RegionError: a format that is none of float16, bfloat16, float32, or a pair that cannot be.
        PolicyError: an unknown policy.
    """
    frame = now()
    wanted = Frame(
        enabled=frame.enabled if enabled is None else bool(enabled),
        low=frame.low if low is None else precision(low, "low_prec_dtype"),
        high=frame.high if high is None else precision(high, "high_prec_dtype"),
        policy=frame.policy if policy is None else hs.Policy.of(policy),
        owner=frame.owner,
    )
    if wanted == frame:
        return
    if wanted.enabled:
        policy_for(wanted.policy, wanted.low, wanted.high)
    frame.close()
    _frames.stack[-1] = wanted
    wanted.open()


def push(owner: object, *, enabled: bool, low: str, high: str) -> None:
    """Put a frame on top, with the policy that is in force."""
    frame = replace(now(), enabled=enabled, low=low, high=high, owner=owner, region=None)
    frame.open()
    _frames.stack.append(frame)


def pop(owner: object, *, failing: bool = False) -> None:
    """Take away the innermost frame of `owner`.

    Raises:
        RegionError: it is not the innermost of all (a generator was suspended inside); everything is in order then.
    """
    stack = _frames.stack
    index = next((i for i in range(len(stack) - 1, 0, -1) if stack[i].owner is owner), None)
    if index is None:
        if failing:
            return
        raise RegionError("amp.autocast was left in a thread in which it is not open; enter and leave it in one thread")
    stack.pop(index).close(failing=failing)


def precision(dtype: object, where: str) -> str:
    """Return the name of a format, given by name or as numpy's or torch's dtype.

    Raises:
        RegionError: not one of the formats that amp knows.
    """
    name = str(dtype_of(dtype)).removeprefix("torch.")
    if name not in SHORT:
        raise RegionError(f"amp: {where}={dtype!r}; expected one of {', '.join(map(repr, SHORT))}")
    return name


@cache
def policy_for(policy: hs.Policy, low: str, high: str) -> hs.Policy:
    """Return `policy` for two formats.

    Raises:
        RegionError: they cannot be in force together.
    """
    if high not in ("float32", low):
        raise RegionError(
            f"amp: high_prec_dtype={high!r} beside low_prec_dtype={low!r}; a region has one low format: use 'float32', "
            f"or {low!r} to lower sensitive operators too"
        )
    return for_formats(policy, SHORT[low], SHORT[high]).replace(scale="auto")  # scaling is `amp.GradScaler`'s
