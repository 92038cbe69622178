"""Base classes and argument handling of the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.compat.shared import listed
from halfstep.kernels.eager.torch_fused import fused_works

__all__ = ["FusedOptimizer", "SetGradNone", "count_step", "evaluated", "fuses", "materialised", "refuse_amsgrad"]

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


class SetGradNone(Optimizer):
    """`zero_grad` as in Apex: None or zeros, by the constructor's `set_grad_none`."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `set_to_none` wins over the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedOptimizer(SetGradNone):
    """An optimizer written with torch's functions; a subclass updates one group at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = evaluated(closure)
        self._before_step()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _before_step(self) -> None:
        """Compute what needs the gradients of all groups."""

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        """Update the parameters of one group, all of which have gradients."""
        raise NotImplementedError


def fuses(params: list[Any], kind: type[Optimizer]) -> bool:
    """Return whether torch's fused form of `kind` works on all of `params`."""
    tensors = [t for entry in params for t in (entry["params"] if isinstance(entry, dict) else [entry])]
    flat = [t for item in tensors for t in ([item] if isinstance(item, Tensor) else item)]
    return bool(flat) and all(
        isinstance(t, Tensor) and t.is_floating_point() and t.device.type in FUSED_DEVICES and fused_works(kind, t)
        for t in flat
    )


def materialised(params: Any) -> list[Any]:
    """Return `params` as a list, groups with their parameters as lists: an iterator could be read only once."""
    if params is None or isinstance(params, Tensor):
        what = "None" if params is None else "a single tensor"
        raise TypeError(f"params is {what}; an optimizer takes a list of tensors or of groups, as model.parameters()")
    return [{**p, "params": listed(p["params"])} if isinstance(p, dict) else p for p in params]


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise RuntimeError if `amsgrad` is set."""
    if amsgrad:
        raise RuntimeError(f"{name} does not support the AMSGrad variant; use torch.optim.Adam(amsgrad=True)")


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return what `closure` returns, with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def count_step(group: dict[str, Any]) -> tuple[float, float]:
    """Count a step of `group`; return ``1 - beta**step`` for both betas, or 1 without bias correction."""
    group["step"] = group.get("step", 0) + 1
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
