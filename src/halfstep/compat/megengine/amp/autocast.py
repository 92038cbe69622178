"""megengine.amp.autocast: a context manager and a decorator, and the switch of each thread.

A frame is what one `autocast` (or, at the bottom, the switch alone) has set. Setting a property changes the innermost
frame; leaving an `autocast` removes its frame and restores the one before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch

import halfstep as hs
from halfstep.compat.megengine.tensor import dtype_of
from halfstep.schema import packaged_toml

P = ParamSpec("P")
R = TypeVar("R")

SHORT = {name: hs.formats.DTYPE_NAMES[getattr(torch, name)] for name in ("float16", "bfloat16", "float32")}
"""MegEngine's name of a format -> halfstep's."""

LISTS = SimpleNamespace(**packaged_toml("compat/megengine/amp/lists.toml"))

AS_SHIPPED = (
    hs.Policy(name="megengine-1.13", dtype="fp16", table="none", scale="megengine")
    .with_ops(fp32=LISTS.no_low_kernel)
    .with_ops(
        low=[*LISTS.products, *LISTS.norms_in_low],
        fp32=[*LISTS.sensitive, *LISTS.moments],
        widest=[*LISTS.promoted, *LISTS.volumes],
    )
)
"""MegEngine 1.13.0's behaviour, with convolutions of volumes not lowered, and softmax and sums in low formats."""

MEGENGINE = AS_SHIPPED.replace(name="megengine").with_ops(low=LISTS.volumes, fp32=["softmax", "softmin", *LISTS.sums])
"""The default: `AS_SHIPPED`, softmax in fp32 as MegEngine's document promises, and sums that do not overflow."""


@dataclass(kw_only=True, slots=True)
class Frame:
    """The settings in force."""

    enabled: bool = False  # whether operators are cast
    low: str = "float16"  # format of products, one of `SHORT`
    high: str = "float32"  # format of sensitive operators, "float32" or the low one
    policy: hs.Policy = MEGENGINE  # the rule of each operator
    owner: object = None  # the object that pushed the frame
    region: hs.autocast | None = field(default=None, compare=False)  # the open halfstep region, if one is needed

    def open(self) -> None:
        """Open the region; the bottom frame needs none while nothing is cast."""
        if self.enabled or self.owner is not None:
            self.region = hs.autocast(policy=policy_for(self.policy, self.low, self.high), enabled=self.enabled)
            self.region.__enter__()

    def close(self, *, failing: bool = False) -> None:
        """Close the region."""
        region, self.region = self.region, None
        if region is not None:
            region.__exit__(hs.errors.RegionError if failing else None, None, None)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack = [Frame()]


_frames = _Frames()


def now() -> Frame:
    """Return the settings in force in this thread."""
    return _frames.stack[-1]


def change(name: str, value: Any) -> None:
    """Change a field of the frame in force up to the end of the innermost `autocast`; an error changes nothing."""
    if name == "policy":
        value = hs.Policy.of(value)
    else:
        value = bool(value) if name == "enabled" else precision(value, f"{name}_prec_dtype")
    frame = now()
    wanted = replace(frame, region=None, **{name: value})
    if wanted == frame:
        return
    if wanted.enabled:
        policy_for(wanted.policy, wanted.low, wanted.high)
    frame.close()
    _frames.stack[-1] = wanted
    wanted.open()


def precision(dtype: object, where: str) -> str:
    """Return the name of a format, given by name or as numpy's or torch's dtype."""
    name = str(dtype_of(dtype)).removeprefix("torch.")
    if name not in SHORT:
        raise hs.errors.RegionError(f"amp: {where}={dtype!r}; expected one of {', '.join(map(repr, SHORT))}")
    return name


@functools.cache
def policy_for(policy: hs.Policy, low: str, high: str) -> hs.Policy:
    """Return `policy` for two formats."""
    if high not in ("float32", low):
        raise hs.errors.RegionError(
            f"amp: high_prec_dtype={high!r} beside low_prec_dtype={low!r}; a region has one low format: use 'float32', "
            f"or {low!r} to lower sensitive operators too"
        )
    if high != "float32":
        lowered = ((op, "low" if rule == "fp32" and op not in LISTS.no_low_kernel else rule) for op, rule in policy.ops)
        policy = policy.replace(ops=tuple(lowered), loss="keep")
    return policy.replace(dtype=SHORT[low], scale="auto")  # scaling is `amp.GradScaler`'s


class autocast:
    """Run operators in mixed precision, by the rules of ``amp.policy``.

    Nests and re-enters, also the same object and recursive functions; ``enabled=False`` inside another one does switch
    it off. The state is the thread's own.

    Args:
        enabled: False: operators in it are not cast.
        low_prec_dtype: format of products: "float16" or "bfloat16" ("float32": nothing is lowered).
        high_prec_dtype: format of sensitive operators: "float32", or the low one.
    """

    def __init__(self, enabled: bool = True, low_prec_dtype: str = "float16", high_prec_dtype: str = "float32") -> None:
        self.enabled = bool(enabled)
        self.low_prec_dtype = precision(low_prec_dtype, "low_prec_dtype")
        self.high_prec_dtype = precision(high_prec_dtype, "high_prec_dtype")
        policy_for(now().policy, self.low_prec_dtype, self.high_prec_dtype)  # refuses a pair that cannot be

    def __enter__(self) -> None:
        low, high = self.low_prec_dtype, self.high_prec_dtype
        frame = Frame(enabled=self.enabled, low=low, high=high, policy=now().policy, owner=self)
        frame.open()
        _frames.stack.append(frame)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stack, failing = _frames.stack, kind is not None
        index = next((i for i in range(len(stack) - 1, 0, -1) if stack[i].owner is self), None)
        if index is not None:
            stack.pop(index).close(failing=failing)
        elif not failing:
            raise hs.errors.RegionError(
                "amp.autocast was left in a thread in which it is not open; enter and leave it in one thread"
            )

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Decorate `func`: each call runs in the region, under torch.compile by the lists in force now."""
        policy = policy_for(now().policy, self.low_prec_dtype, self.high_prec_dtype)
        traced = hs.autocast(policy=policy, enabled=self.enabled)(func)  # refuses what cannot be decorated

        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return traced(*args, **kwargs)
            with self:
                return func(*args, **kwargs)

        return wrapper

    def __repr__(self) -> str:
        low, high = self.low_prec_dtype, self.high_prec_dtype
        return f"amp.autocast(enabled={self.enabled}, low_prec_dtype={low!r}, high_prec_dtype={high!r})"
