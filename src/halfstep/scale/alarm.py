"""The alarm of a scaler: a flag on the device, and the message when gradients are bad at the lowest scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.accelerators import capturing, copies_behind_events
from halfstep.kernels.native.calls import peek
from halfstep.policy.scale_rule import ScaleRule

__all__ = ["DelayedFlag", "alarm_text", "is_error"]


def is_error(rule: ScaleRule, host: Mapping[str, Any] | None = None) -> bool:
    """Return whether the rule's alarm is an error: for the state `host`, or for any state if there is none."""
    impatient = rule.patience > 0 and (host is None or host["streak"] > rule.patience)
    return impatient or rule.at_floor != "warn"


def alarm_text(rule: ScaleRule, host: Mapping[str, Any], culprits: Sequence[str]) -> str:
    """Return the message: what happened, at which scale, which gradients, what to do.

    Args:
        rule: the numbers in force.
        host: the state as plain numbers.
        culprits: descriptions of parameters whose gradient is not finite.
    """
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
        """Start without a copy under way."""
        self._landed: Tensor | None = None
        self._event: Any = None

    def read(self, flag: Tensor) -> bool | None:
        """Return the flag as of this or an earlier read, or None if nothing is known yet.

        Args:
            flag: 0-dim bool tensor.
        """
        if type(flag) is not Tensor:
            return None
        if flag.device.type == "cpu":
            return peek(flag)
        if not copies_behind_events(flag.device.type) or capturing(flag.device.type):
            return None
        module = torch.get_device_module(flag.device)
        with module.device(flag.device):
            if self._landed is None or self._event is None:
                self._landed = torch.zeros((), dtype=torch.bool, pin_memory=True)
                self._event = module.Event()
            elif not self._event.query():
                return None
            earlier = peek(self._landed)
            self._landed.copy_(flag, non_blocking=True)
            self._event.record()
        return earlier
