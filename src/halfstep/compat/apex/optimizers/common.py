"""What the optimizers share: Apex's arguments, and the frame of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.eager.torch_fused import fused_works

__all__ = ["SetGradNone", "bias_corrections", "due", "evaluated", "fuses", "materialised", "refuse_amsgrad"]


class SetGradNone(Optimizer):
    """`zero_grad` as Apex has it: None or zeros, as the constructor said."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `set_to_none` wins over the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def fuses(params: list[Any], kind: type[Optimizer]) -> bool:
    """Return whether torch's fused form of `kind` does its work on all of `params`."""
    tensors = [t for entry in params for t in (entry["params"] if isinstance(entry, dict) else [entry])]
    flat = [t for item in tensors for t in ([item] if isinstance(item, Tensor) else item)]
    devices = ("cpu", "cuda", "xpu", "mps")
    return bool(flat) and all(
        isinstance(t, Tensor) and t.is_floating_point() and t.device.type in devices and fused_works(kind, t)
        for t in flat
    )


def materialised(params: Any) -> list[Any]:
    """Return `params` as a list, groups with their parameters as lists, so that they can be looked at."""
    if isinstance(params, Tensor):
        raise TypeError("params is a single tensor; an optimizer takes a list of tensors or of groups")
    if params is None:
        raise TypeError("params is None; an optimizer takes a list of tensors or of groups, as model.parameters()")
    return [{**p, "params": _one(p["params"])} if isinstance(p, dict) else p for p in params]


def _one(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


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


def due(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield each group that has gradients, its step counted, with the parameters that have them."""
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            group["step"] = group.get("step", 0) + 1
            yield group, params


def bias_corrections(group: dict[str, Any]) -> tuple[float, float]:
    """Return ``1 - beta**step`` for both betas of `group`; 1 if it wants no correction."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
