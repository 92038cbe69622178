"""What was served in this process under a policy; `autocast_mode` and `grad_scaler` follow it while it is installed."""

import sys

import torch
import torch.cpu.amp
import torch.cuda.amp
from torch import Tensor

import halfstep as hs


class Served:
    """What was served in this process under a policy, in numbers."""

    def __init__(self, policy: hs.Policy) -> None:
        self.policy = policy
        self.begin()

    def begin(self) -> None:
        """Count from zero."""
        self.regions = self.off = 0  # that were made; of them those that are off, by ``enabled=False`` or their format
        self.steps = 0  # of optimizers, skipped ones among them
        self.narrow = False  # whether a region computes in fp16
        self.scalers: list[hs.GradScaler] = []  # that are enabled
        self._skipped: dict[torch.device, Tensor] = {}

    @property
    def used(self) -> bool:
        """Whether a region or a scaler was made."""
        return bool(self.regions or self.scalers)

    @property
    def skipped(self) -> int:
        """Steps that scalers have skipped; waits for the device."""
        return sum(int(count) for count in self._skipped.values())

    def region(self, region: hs.autocast) -> None:
        """Count a region that was made."""
        formats = [dtype for _, dtype, on in region.recipe.devices if on]
        self.regions += 1
        self.off += not formats
        self.narrow = self.narrow or torch.float16 in formats

    def rule(self) -> hs.ScaleRule | str | None:
        """Return the rule of a scaler under the policy; None for that of the script."""
        scale = 1.0 if self.policy.scale == "none" else self.policy.scale  # the script's check of gradients stays
        if scale == "auto":
            return None
        return scale if isinstance(scale, (hs.ScaleRule, str)) else hs.ScaleRule.static(scale)

    def stepped(self, *_: object) -> None:
        """Count a call of an optimizer's ``step``: torch calls this after each."""
        self.steps += 1

    def scaled(self, scaler: hs.GradScaler, before: int, skipped: Tensor) -> None:
        """Count a step of `scaler`, before which there were `before`; `skipped` is a 0-dim bool. Waits for nothing."""
        self.steps = before + 1
        if not any(scaler is known for known in self.scalers):
            self.scalers.append(scaler)
        count = self._skipped.setdefault(skipped.device, torch.zeros((), dtype=torch.int64, device=skipped.device))
        count += skipped

    def __str__(self) -> str:
        """Return one line; waits for the device."""
        policy, skipped = self.policy, self.skipped
        named = f"{policy.name or '(of a file)'}{'' if policy.dtype == 'auto' else ':' + policy.dtype}"
        parts = [f"policy {named}: {self.steps} steps, {skipped} of them skipped"]
        if self.used:
            scales = "".join(f", scale {scaler.get_scale():g}" for scaler in self.scalers)
            regions = f"{self.regions} regions of autocast ({self.off} off)"
            parts.append(f"replaced: {regions}, {len(self.scalers)} GradScaler{scales}")
        else:
            parts.append("nothing was replaced, because neither autocast nor GradScaler of torch.amp was used")
        if self.narrow and not self.scalers:
            parts.append("fp16 without a GradScaler: small gradients become 0; choose bf16, or use a GradScaler")
        if skipped > 1 and 4 * skipped >= self.steps:  # more than a scale that falls
            parts.append("a black box says why: hs.BlackBox(model, loss_fn, optimizer) in the loop")
        if names := unserved():
            parts.append(f"not replaced, imported from where torch defines them: {', '.join(names)}")
        return "; ".join(parts)


def unserved() -> list[str]:
    """Return where torch's own classes are used, as "module.name": imported from the modules that define them."""
    amps = (torch.amp, torch.cuda.amp, torch.cpu.amp)
    known = {id(c) for amp in amps for c in (amp.autocast_mode.autocast, amp.grad_scaler.GradScaler)}
    return sorted(
        f"{path}.{name}"
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] not in {"torch", "halfstep"}
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in known
    )


installed: list[Served] = []  # one at the most
