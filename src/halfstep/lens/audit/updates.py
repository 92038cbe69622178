"""Updates: what an optimizer step should have changed, what its formats lost of that, and what gradients add up to.

Before the step the optimizer is copied onto float64 weights, with its states and the gradients it is about to read. The
step of the copy is the intended one. A change is lost if it is smaller than half an ulp of what it changes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.binding.prepare import store_of
from halfstep.errors import first_line
from halfstep.formats import FP32, LOW_DTYPES, Format, float64_of
from halfstep.lens.audit.record import AuditRecorder
from halfstep.lens.audit.rows import Tally, form_of
from halfstep.lens.calls import BELOW_FP32
from halfstep.optim import clipped_together, copy_of, members, stepped_by
from halfstep.step.train_step import TrainStep
from halfstep.weights.states import LowStates

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers with a fused form that takes float64 on a CPU, in a fifth of the time."""


PRECISE = frozenset({"master", "split", "kahan", "stochastic"})
"""Strategies under which an optimizer steps fp32 values behind low weights."""

AVERAGES = {  # state of torch's optimizers -> the option of its group that sets how slowly it moves
    "exp_avg_sq": ("betas", 1),
    "max_exp_avg_sq": ("betas", 1),
    "exp_avg": ("betas", 0),
    "exp_inf": ("betas", 1),
    "square_avg": ("alpha", None),
    "momentum_buffer": ("momentum", None),
}


class Change(NamedTuple):
    """An intended step of one parameter; all but `before` are float64, and states are those in its shape."""

    before: Tensor
    after: Tensor
    low_states: dict[str, Tensor]  # before the step
    states: dict[str, Tensor]  # after the step


def intended(
    optimizer: Optimizer, precise: Mapping[nn.Parameter, Tensor], gradients: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Change]:
    """Return the step that `optimizer`, which is not changed, is about to make, computed in float64.

    `precise` has the precise value of every parameter that has a gradient, `gradients` unscaled ones in float64.
    """
    twins = {p: nn.Parameter(float64_of(value.detach(), copy=True)) for p, value in precise.items()}
    memo: dict[int, Any] = {id(p): twin for p, twin in twins.items()}
    low: dict[nn.Parameter, dict[str, Tensor]] = {p: {} for p in twins}
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if name == "step":
                memo[id(value)] = value.detach().cpu().clone()
            elif value.is_floating_point():
                memo[id(value)] = float64_of(value.detach(), copy=True)
                if isinstance(p, nn.Parameter) and p in low and value.dtype in BELOW_FP32:
                    low[p][name] = float64_of(value.detach())
    wide = copy_of(optimizer, memo)
    fused = type(wide) in FUSED and not any(group.get("differentiable") for group in wide.param_groups)
    on_cpu = all(p.device.type == "cpu" for p in stepped_by(wide))
    forms = {"foreach": False, "fused": fused and on_cpu, "capturable": False}  # a loop takes float64 everywhere
    for group in (wide.defaults, *wide.param_groups):
        group.update({name: value for name, value in forms.items() if name in group})
    for p, twin in twins.items():
        twin.grad = gradients[p].detach()
    wide.step()
    changes = {}
    for p, twin in twins.items():
        state = wide.state.get(twin, {})
        states = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.shape == twin.shape and v.dim()}
        changes[p] = Change(precise[p].detach(), twin.detach(), low[p], states)
    return changes


@torch.no_grad()
def swallow(tally: Tally, before: Tensor, after: Tensor, found: Tensor, form: Format) -> None:
    """Add to `tally` the intended change of one tensor, stored in `form`, and how much of it that format loses.

    `before` is what was stored, `after` (float64) what it should become, `found` what it has become.
    """
    before, found = before.to(after.device), found.to(after.device)
    change = float64_of(before, copy=True)
    torch.sub(after, change, out=change)
    narrow = change.float()
    back = after.to(form.torch_dtype) if form.torch_dtype is not None else form.round(after)
    small = back == before
    lost = int(torch.count_nonzero(small.logical_and_(change != 0))) if bool(small.any()) else 0
    tally.see(narrow, FP32)
    tally.form = form
    mass = float(torch.linalg.vector_norm(change, 1))
    tally.add_share("swallowed", lost, int(torch.count_nonzero(change)))
    tally.add_share("swallowed_mass", float(torch.linalg.vector_norm(change[small], 1)) if lost else 0.0, mass)
    tally.local.add((found - before).float(), narrow, FP32)


def pace_of(optimizer: Optimizer, parameter: nn.Parameter, key: str) -> float:
    """Return how much of a moving average is new at each step; 0.0 if it is not known to be one."""
    option, place = AVERAGES.get(key, ("", None))
    for group in optimizer.param_groups:
        if option in group and any(p is parameter for p in group["params"]):
            return 1.0 - float(group[option] if place is None else group[option][place])
    return 0.0


def precise_of(model: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Return the precise value of `parameter`, for reading: it may be the parameter's own memory."""
    if (store := store_of(model)) is not None and parameter in store:
        return store.read(parameter)
    value = parameter.detach()
    return value.float() if value.dtype in LOW_DTYPES else value


class Meter:
    """Watches the updates of an audited step; `moves`: there is an optimizer to measure."""

    def __init__(self, step: TrainStep, recorder: AuditRecorder, *, moves: bool) -> None:
        self.train, self.recorder, self.names, self.moves = step, recorder, recorder.parameters, moves
        self.notes: list[str] = []  # what could not be measured
        self._intended: dict[nn.Parameter, Change] = {}
        self._sums: dict[str, Tensor] = {}  # fp32 sums of the gradients of low parameters over a window
        step.watchers.append(self)
        if step.accumulate > 1:
            for name, parameter in step.model.named_parameters():
                if parameter.requires_grad and parameter.dtype in BELOW_FP32:
                    parameter.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            total = self._sums.get(name)
            self._sums[name] = gradient.float() if total is None else total.add_(gradient)

    def wants_update(self) -> bool:
        """Return True: every update is measured."""
        return True

    def pass_update(self) -> None:
        """Do nothing: the audited step captures no graphs."""

    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the intended update, unless it will be skipped."""
        self._intended, sums, self._sums = {}, self._sums, {}
        step, scale = self.train, float(self.train.record.scale)
        for p in parameters:
            name = self.names.get(id(p), "")
            if name in sums and p.grad is not None and not p.grad.is_sparse:
                tally = self.recorder.tally_of(name, "weight gradient")
                tally.summed.add(p.grad, sums[name], form_of(p.grad))
        if not self.moves:
            return
        if any(p.is_complex() for p in parameters):
            self.moves = False
            self.notes.append("no rows of updates: parameters are complex")
            return
        gradients: dict[nn.Parameter, Tensor] = {}
        for p in parameters:
            assert p.grad is not None
            gradients[p] = float64_of(p.grad.to_dense() if p.grad.is_sparse else p.grad, copy=True)
        for together, limit in clipped_together(step.optimizer, step.clip_norm):
            some = [gradients[p] for p in together if p in gradients]
            norm = math.sqrt(sum(float(torch.linalg.vector_norm(g)) ** 2 for g in some)) / scale
            if not math.isfinite(norm):
                return
            factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            for gradient in some if factor != scale else ():
                gradient.mul_(factor / scale)
        try:
            precise = {p: precise_of(step.model, p).clone() for p in parameters}
            self._intended = intended(step.optimizer, precise, gradients)
        except Exception as error:  # of the user's optimizer
            self.moves = False
            name, first = type(step.optimizer).__name__, first_line(error)
            self.notes.append(f"no rows of updates: {name} cannot step in float64: {type(error).__name__}: {first}")

    def after_update(self, bad: Tensor) -> None:
        """Compare the update with the intended one."""
        intended, self._intended = self._intended, {}
        if not intended or bool(bad):
            return
        step = self.train
        store, strategy = store_of(step.model), step.policy.master
        owners = {p: one for one in members(step.optimizer) for p in stepped_by(one)}
        for p, change in intended.items():
            kind = type(owners[p]).__name__
            name = self.names.get(id(p), "")
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(module, kind, "update", name)
            low = store is not None and p in store
            tally.stochastic = low and strategy == "stochastic"
            form = FP32 if low and strategy in PRECISE else form_of(p)
            swallow(tally, change.before, change.after, precise_of(step.model, p), form)
            state = step.optimizer.state.get(p, {})
            for key, value in change.states.items():
                found = state.get(key)
                if isinstance(found, Tensor) and found.is_floating_point():
                    tally = self.recorder.tally(module, f"{kind}.{key}", "state", name)
                    tally.stochastic = LowStates.of(owners[p]) is not None
                    found = found.to(value.device)
                    tally.pace = pace_of(step.optimizer, p, key)
                    if key in change.low_states:
                        swallow(tally, change.low_states[key], value, found, form_of(found))
                        tally.whole.add(found, value.float(), form_of(found))
                    elif found.dtype not in BELOW_FP32:  # nothing to lose
                        tally.see(found)
