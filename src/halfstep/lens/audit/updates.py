"""Updates: what an optimizer step should have changed, and what of that its formats swallowed.

Before the step the optimizer is copied onto float64 weights, with its states and the gradients it is about to read. The
copy's step is the intended one; a change smaller than half an ulp of what it changes is one after which a rounding to
nearest gives back what was there.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.formats import FP32, Format, format_of
from halfstep.lens.audit.rows import Tally, form_of

__all__ = ["Intended", "copied", "pace_of", "stored_form", "swallow"]

FORMS = {"foreach": False, "fused": False, "capturable": False}
"""Of torch's optimizers: the for-loop form takes float64 everywhere."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused form that takes float64 on a CPU, in a fifth of the time."""


def copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of `optimizer` without its hooks, over the parameters that `memo` has for its own.

    Args:
        optimizer: any torch optimizer; not changed.
        memo: as of copy.deepcopy, id -> what takes its place.
    """
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step" or name.startswith("_halfstep"):  # a scheduler's wrapper; a weight store's mark
            continue
        vars(made)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    return made


AVERAGES = {
    "exp_avg_sq": ("betas", 1),
    "max_exp_avg_sq": ("betas", 1),
    "exp_avg": ("betas", 0),
    "exp_inf": ("betas", 1),
    "square_avg": ("alpha", None),
    "momentum_buffer": ("momentum", None),
}
"""State of torch's optimizers -> where its group says how slowly it moves."""


class Intended:
    """The step that an optimizer is about to make, in float64.

    Args:
        optimizer: about to step; not changed.
        precise: parameter -> its precise value, for every parameter that has a gradient.
        gradients: parameter -> unscaled gradient, float64.

    Attributes:
        before: parameter -> its precise value.
        after: parameter -> float64 value after the intended step.
        states: parameter -> (low states before, all states after), float64, of states in the shape of the parameter.
    """

    def __init__(
        self, optimizer: Optimizer, precise: Mapping[nn.Parameter, Tensor], gradients: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self.before = {p: value.detach() for p, value in precise.items()}
        twins = {p: nn.Parameter(value.to(torch.float64, copy=True)) for p, value in self.before.items()}
        memo: dict[int, Any] = {id(p): twin for p, twin in twins.items()}
        old: dict[nn.Parameter, dict[str, Tensor]] = {p: {} for p in twins}
        for p, state in optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":
                    memo[id(value)] = value.detach().cpu().clone()
                elif value.is_floating_point():
                    memo[id(value)] = value.detach().double()
                    if isinstance(p, nn.Parameter) and p in old and format_of(value.dtype).bits < FP32.bits:
                        old[p][name] = value.detach().double()
        wide = copied(optimizer, memo)
        forms = {**FORMS, "fused": _has_fused(wide)}
        for group in (wide.defaults, *wide.param_groups):
            group.update({name: value for name, value in forms.items() if name in group})
        for p, twin in twins.items():
            twin.grad = gradients[p].detach()
        wide.step()
        self.after = {p: twin.detach() for p, twin in twins.items()}
        self.states = {p: (old[p], dict(_states(wide, twin))) for p, twin in twins.items()}


def _has_fused(optimizer: Optimizer) -> bool:
    """Return whether a copy of `optimizer` in float64 can take its fused form."""
    if type(optimizer) not in FUSED:
        return False
    options = {name for group in optimizer.param_groups for name in ("differentiable",) if group.get(name)}
    return not options and all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def _states(optimizer: Optimizer, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(n, v) for n, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape and v.dim()]


@torch.no_grad()
def swallow(tally: Tally, before: Tensor, after: Tensor, found: Tensor, form: Format) -> None:
    """Add to `tally` the intended change of one tensor, and how much of it a format loses.

    Args:
        tally: of role "update" or "state".
        before: what is stored.
        after: float64, what it should become.
        found: what it has become.
        form: the format it is stored in.
    """
    change = before.to(torch.float64, copy=True)
    torch.sub(after, change, out=change)
    narrow = change.float()
    back = after.to(form.torch_dtype) if form.torch_dtype is not None else form.round(after)
    small = back == before
    lost = 0
    if bool(small.any()):
        lost = int(torch.count_nonzero(small.logical_and_(change != 0)))
    tally.see(narrow, FP32)
    tally.form = form
    tally.moved += int(torch.count_nonzero(change))
    tally.swallowed += lost
    tally.mass += float(torch.linalg.vector_norm(change, 1))
    if lost:
        tally.swallowed_mass += float(torch.linalg.vector_norm(change[small], 1))
    tally.local.add((found - before).float(), narrow, FP32)


def stored_form(parameter: Tensor, strategy: str) -> Format:
    """Return the format in which the value that an optimizer steps is kept: fp32 behind low weights, if anything is."""
    return FP32 if strategy in {"master", "split", "kahan", "stochastic"} else form_of(parameter)


def pace_of(optimizer: Optimizer, parameter: nn.Parameter, key: str) -> float:
    """Return how much of a moving average is new at each step; 0.0 if it is not known to be one."""
    option, place = AVERAGES.get(key, ("", None))
    for group in optimizer.param_groups:
        if option in group and any(p is parameter for p in group["params"]):
            factor = group[option] if place is None else group[option][place]
            return 1.0 - float(factor)
    return 0.0
