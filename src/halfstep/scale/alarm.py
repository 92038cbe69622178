"""The alarms of a scaler: bad gradients at the lowest scale (a flag on the device), and gradients it has not scaled."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.accelerators import Landing, capturing
from halfstep.errors import warn
from halfstep.formats import format_of
from halfstep.kernels.native.calls import peek
from halfstep.policy.scale_rule import ScaleRule
from halfstep.scale.rule import StoredScale


def is_error(rule: ScaleRule, host: Mapping[str, Any] | None = None) -> bool:
    """Return whether the rule's alarm is an error: for the state `host`, or for any state if there is none."""
    impatient = rule.patience > 0 and (host is None or host["streak"] > rule.patience)
    return impatient or rule.at_floor != "warn"


def alarm_text(rule: ScaleRule, host: Mapping[str, Any], culprits: Sequence[str]) -> str:
    """Return the message: what happened, at which scale, which gradients, what to do."""
    scale = host["scale"]
    if rule.patience and host["streak"] > rule.patience:
        what = f"{host['streak']} steps in a row had gradients that are not finite (loss scale {scale!r})"
    elif rule.is_static:
        what = f"gradients are not finite under the static loss scale {scale!r}"
    else:
        what = f"the loss scale is at its floor {rule.floor!r} (now {scale!r}) and gradients are still not finite"
    where = f" Not finite: {', '.join(culprits)}." if culprits else ""
    cure = (
        "Use a smaller static scale or a dynamic one"
        if rule.is_static and scale > 1.0
        else "Look for inf or NaN in the batch, the loss and the parameters, lower the "
        "learning rate, or run the operators that overflow in fp32 or bf16"
    )
    return f"{what}; such steps are skipped.{where} {cure}."


class DelayedFlag:
    """Reads of a flag on the device that return a late value instead of waiting.

    On the CPU the value is current. On an accelerator each read starts a copy to pinned memory and returns what an
    earlier copy brought. Nothing is known while a graph is captured, on fake tensors, and on devices without such
    copies.
    """

    def __init__(self) -> None:
        self._landing: Landing | None = None

    def read(self, flag: Tensor) -> bool | None:
        """Return `flag` (0-dim bool) as of this or an earlier read, or None if nothing is known yet."""
        if type(flag) is not Tensor:
            return None
        if flag.device.type == "cpu":
            return peek(flag)
        landing = self._landing = self._landing or Landing()
        if flag.device.type not in landing.devices or capturing(flag.device.type) or not landing.there():
            return None
        earlier = None if landing.flag is None else peek(landing.landed()[0])
        landing.send([flag])
        return earlier


def is_scaler(value: Any) -> bool:
    """Return whether a value is a GradScaler that is on: torch's, halfstep's or one made from them."""
    if not any("GradScaler" in kind.__name__ for kind in type(value).__mro__):
        return False
    methods = all(callable(getattr(value, name, None)) for name in ("is_enabled", "get_scale"))
    return methods and bool(value.is_enabled())  # settings of scalers have such names too


def in_scaler(frame: FrameType | None) -> bool:
    """Return whether a method of a scaler that is on has called `frame`."""
    while frame is not None:
        if is_scaler(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


class ExpectedScaler:
    """Warns at the first step of an optimizer if no scaler has scaled a loss until then.

    A step without gradients, or at a learning rate of zero, is not the first one: it makes states or precedes a
    scheduler. Every scaler that takes part (`drop`) ends the watch, and so does the first step. `dtype` is the format
    of the gradients, with fewer exponent bits than fp32.
    """

    _known: weakref.WeakKeyDictionary[Optimizer, ExpectedScaler] = weakref.WeakKeyDictionary()

    def __init__(self, scaler: StoredScale, optimizer: Optimizer, dtype: str) -> None:
        self.drop([optimizer])
        self.scaler, self.dtype = scaler, dtype
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        self._known[optimizer] = self

    @classmethod
    def drop(cls, optimizers: Iterable[Optimizer]) -> None:
        """Expect no scaler any more for `optimizers`."""
        for optimizer in optimizers:
            if (known := cls._known.pop(optimizer, None)) is not None:
                known._handle.remove()

    @classmethod
    def release(cls, parameters: set[int]) -> None:
        """Expect no scaler any more for optimizers with any of `parameters` (ids)."""
        cls.drop([o for o in cls._known if any(id(p) in parameters for g in o.param_groups for p in g["params"])])

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not any(map(_moves, optimizer.param_groups)):
            return
        self.drop([optimizer])
        scale = self.scaler.get_scale()
        if scale == 1.0 or self.scaler.is_started or in_scaler(_getframe(1)):
            return
        lost = format_of(self.dtype).smallest_subnormal
        warn(
            f"{type(optimizer).__name__} steps gradients of a loss that was not scaled: in {self.dtype} gradients "
            f"below {lost:.0e} are zero. hs.prepare returned a GradScaler for them (scale "
            f"{scale:g}); write scaler.scale(loss).backward(), scaler.step(optimizer) and "
            "scaler.update(). Where a library makes these calls, prepare in bf16; if it scales the loss itself, "
            "prepare with a policy of scale='none'"
        )


def _moves(group: dict[str, Any]) -> bool:
    return bool(group.get("lr", 1.0)) and any(parameter.grad is not None for parameter in group["params"])
