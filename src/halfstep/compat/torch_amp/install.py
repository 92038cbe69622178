"""install: torch.amp's public names follow a policy in this process, for scripts that import them from torch.

`halfstep run --policy mixed train.py` does this: the names of `torch.amp`, `torch.cuda.amp` and `torch.cpu.amp` become
subclasses of those in `halfstep.compat.torch_amp`, whose regions follow a policy instead of torch's operator lists.

Note [what stays torch's]: code of torch gets torch's class, because checkpointing and torch.compile restore autocast's
own state with it, and halfstep restores its rules there itself. The exception is DataParallel, which opens the region
of its caller in other threads. The modules in which torch defines the names (``torch.amp.autocast_mode``,
``torch.amp.grad_scaler``) keep them: Dynamo identifies autocast by these, and would trace any class in their place as
a region with torch's lists. `unserved` finds the scripts that import from there.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.cpu.amp
import torch.cuda.amp
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfstep as hs
from halfstep.compat.torch_amp import autocast_mode, cpu, cuda, grad_scaler
from halfstep.compat.torch_amp.cuda.autocast_mode import here

DATA_PARALLEL = "torch.nn.parallel.parallel_apply"


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
        self.scalers: list[GradScaler] = []  # that are enabled
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

    def stepped(self, *_: Any) -> None:
        """Count a call of an optimizer's ``step``: torch calls this after each."""
        self.steps += 1

    def scaled(self, scaler: GradScaler, before: int, skipped: Tensor) -> None:
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


_served: list[Served] = []  # one while installed
_back = ExitStack()  # gives torch its names back


# ------------------------------------------------------------------ the names


class autocast(autocast_mode.autocast):
    """torch.autocast's arguments, and a policy's rules."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a region; for code of torch, one of torch: note [what stays torch's]."""
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] == "torch" and caller != DATA_PARALLEL:
            return torch.amp.autocast_mode.autocast(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device_type, dtype, enabled, cache_enabled)
        if not _served:
            return
        policy = _served[0].policy
        formats = [format for _, format, on in self.recipe.devices if on]
        if formats:  # else it is off for torch's reasons, such as a machine without CUDA
            format = formats[0] if policy.dtype == "auto" else None
            hs.autocast.__init__(self, device_type, format, enabled, cache_enabled, policy=policy.replace(scale="auto"))
        _served[0].region(self)


class CudaAutocast(cuda.autocast, autocast):
    """torch.cuda.amp.autocast's arguments."""

    __slots__ = ()


class CpuAutocast(cpu.autocast, autocast):
    """torch.cpu.amp.autocast's arguments."""

    __slots__ = ()


class GradScaler(grad_scaler.GradScaler):
    """torch.amp.GradScaler's arguments; a scale that the policy names takes their place."""

    def __init__(
        self, device: str | None = "cuda", init_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        rule = _rule(_served[0].policy) if _served else None
        if rule is None:
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        else:
            hs.GradScaler.__init__(self, device, enabled=enabled, rule=rule)
        if _served and self.is_enabled():
            _served[0].scalers.append(self)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do what `hs.GradScaler.step` does, and count it."""
        before = _served[0].steps if _served else 0
        result = super().step(optimizer, *args, **kwargs)
        if _served and self.is_enabled():
            _served[0].scaled(self, before, self.skipped(optimizer))
        return result


class CudaGradScaler(cuda.GradScaler, GradScaler):
    """torch.cuda.amp.GradScaler's arguments."""


class CpuGradScaler(cpu.GradScaler, GradScaler):
    """torch.cpu.amp.GradScaler's arguments."""


def _rule(policy: hs.Policy) -> hs.ScaleRule | str | None:
    """Return the rule of a scaler under `policy`; None for that of the script."""
    scale = 1.0 if policy.scale == "none" else policy.scale  # the script's check of gradients stays
    if scale == "auto":
        return None
    return scale if isinstance(scale, (hs.ScaleRule, str)) else hs.ScaleRule.static(scale)


NAMES: dict[Any, dict[str, Any]] = {
    torch: {"autocast": autocast},
    torch.amp: {
        "autocast": autocast, "GradScaler": GradScaler, "custom_fwd": autocast_mode.custom_fwd,
        "custom_bwd": partial(autocast_mode.backward_in, autocast),
    },
    torch.cuda.amp: {
        "autocast": CudaAutocast, "GradScaler": CudaGradScaler, "custom_fwd": cuda.custom_fwd,
        "custom_bwd": lambda bwd: autocast_mode.backward_in(autocast, bwd, device_type=here()),
    },
    torch.cpu.amp: {"autocast": CpuAutocast, "GradScaler": CpuGradScaler},
}  # fmt: skip
"""Module of torch -> its names and what they are while installed."""


# ------------------------------------------------------------------ in place and back


def install(policy: hs.Policy) -> Served:
    """Let torch.amp's public names follow `policy` in this process, until `uninstall` or another `install`.

    A format that `policy` names is that of every region that is on; with ``dtype="auto"`` each has the script's. A loss
    scale that it names is that of every scaler; with ``scale="auto"`` scalers have the script's arguments and torch's
    default values.

    Returns:
        What counts their use.

    Raises:
        PolicyError: `policy` needs a model: it lowers parameters, has rules for modules, and so on.
    """
    hs.autocast(policy=policy.replace(scale="auto"))  # refuses what a region cannot carry out
    uninstall()
    served = Served(policy)
    _served.append(served)
    _back.callback(register_optimizer_step_post_hook(served.stepped).remove)
    for module, names in NAMES.items():
        for name, ours in names.items():
            _back.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, ours)
    return served


def uninstall() -> None:
    """Give torch its names back. Regions and scalers that were made follow the policy still; new ones none."""
    _back.close()
    _served.clear()


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
