"""Take an optimizer out of torch's fused form where that form does not do its work (`eager.torch_fused`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.kernels.eager.torch_fused import WITH_KERNELS, fused_works

__all__ = ["keep_working_form", "use_working_form"]


def use_working_form(optimizer: Optimizer, stepped: Iterable[Tensor] | None = None) -> bool:
    """Take groups of an optimizer out of torch's fused form where its kernel leaves them undone; say if one was.

    State stays: on a CPU all forms have the same.

    Args:
        optimizer: any; changed only if it is one of torch's (or made from one) in the fused form.
        stepped: what it steps; default its own parameters, unless precise weights take their place in its step.
    """
    if not isinstance(optimizer, WITH_KERNELS) or (stepped is None and hasattr(optimizer, WEIGHTS_ATTRIBUTE)):
        return False
    broken = None if stepped is None else any(not fused_works(type(optimizer), p) for p in stepped)
    changed = False
    for group in optimizer.param_groups:
        if group.get("fused") and (_is_broken(optimizer, group) if broken is None else broken):
            group["fused"] = None
            changed = True
    return changed


def keep_working_form(optimizer: Optimizer, stepped: Iterable[Tensor]) -> None:
    """Do what `use_working_form` does, now and after every `load_state_dict`, which brings the form of its state."""
    if use_working_form(optimizer, stepped):
        optimizer.register_load_state_dict_post_hook(_use_working_form)


def _use_working_form(optimizer: Optimizer) -> None:
    use_working_form(optimizer)


def _is_broken(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    parameters = group["params"]
    if not parameters or parameters[0].device.type != "cpu":
        return False
    return any(not fused_works(type(optimizer), parameter) for parameter in parameters)
