"""Optimizers that take scale and flag themselves: torch's fused form, and its older protocol ``step(grad_scaler=)``.

The fused form reads ``grad_scale`` and ``found_inf`` and skips on the device. Where torch's fused kernel does not
update a parameter (`kernels.eager.torch_fused`), the optimizer's groups leave that form.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.kernels.eager.torch_fused import WITH_KERNELS, fused_works

_ATTRIBUTES = ("grad_scale", "found_inf")

_NEWER = ("torch.optim.", "halfstep.")
"""Modules whose optimizers that set the marker take tensors; reading a signature costs some microseconds."""


def takes_scaler(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` takes the scaler itself as ``step(grad_scaler=)``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or type(optimizer).__module__.startswith(_NEWER):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` takes scale and flag as attributes (torch's optimizers with ``fused=True``).

    torch's own marker outlives a `load_state_dict` that puts another form into the groups.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused", True) for group in optimizer.param_groups) and not takes_scaler(optimizer)


def must_not_skip(optimizer: Optimizer) -> bool:
    """Return whether a skip on the device would do harm, so that the host must decide.

    torch's fused SGD (2.13) allocates its momentum without filling it in the first step that it is called for; if that
    one is skipped, the next good step starts from whatever was in memory.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
                return True
    return False


def step_with_flag(
    optimizer: Optimizer, scale: Tensor | None, found: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``optimizer.step``, which divides gradients by ``grad_scale`` and does nothing if ``found_inf`` is not zero.

    As in torch, a ``grad_scale`` that the user has set beforehand is multiplied in and used up. If the step raises,
    both attributes are as they were before. `scale` and `found` are 0-dim fp32; None: gradients have been unscaled.
    """
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    own = getattr(optimizer, "grad_scale", None)
    factors = [factor for factor in (scale, own) if factor is not None]
    attributes["grad_scale"] = factors[0] * factors[1] if len(factors) == 2 else next(iter(factors), None)
    attributes["found_inf"] = found
    try:
        result = optimizer.step(*args, **kwargs)
        before = {}  # used up
        return result
    finally:
        for name in _ATTRIBUTES:
            attributes.pop(name, None)
        attributes.update(before)


def use_working_form(optimizer: Optimizer, stepped: Iterable[Tensor] | None = None) -> bool:
    """Take groups of an optimizer out of torch's fused form where its kernel does not work; return whether one was.

    State stays: on a CPU all forms have the same. `stepped`: what it steps; default its own parameters, unless precise
    weights take their place in its step.
    """
    if not isinstance(optimizer, WITH_KERNELS) or (stepped is None and hasattr(optimizer, WEIGHTS_ATTRIBUTE)):
        return False
    others = None if stepped is None else [*stepped]
    changed = False
    for group in optimizer.param_groups:
        if group.get("fused"):
            parameters = group["params"] if others is None else others
            on_cpu = bool(parameters) and parameters[0].device.type == "cpu"
            if on_cpu and not all(fused_works(type(optimizer), p) for p in parameters):
                group["fused"] = None
                changed = True
    return changed


def keep_working_form(optimizer: Optimizer, stepped: Iterable[Tensor]) -> None:
    """Do what `use_working_form` does, now and after every `load_state_dict`, which restores a saved form."""
    if use_working_form(optimizer, stepped):
        optimizer.register_load_state_dict_post_hook(use_working_form)  # type: ignore[arg-type]  # torch reads no result
