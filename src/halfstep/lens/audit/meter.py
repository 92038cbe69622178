"""Meter: what an update was meant to do, what of it the formats have swallowed, and what gradients add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from halfstep.lens.audit.record import Recorder
from halfstep.lens.audit.reference import BELOW_FP32
from halfstep.lens.audit.rows import form_of
from halfstep.lens.audit.updates import Intended, pace_of, stored_form, swallow
from halfstep.lens.audit.watch import Call
from halfstep.lens.values import LOWS
from halfstep.step.train_step import TrainStep
from halfstep.weights import WeightStore
from halfstep.weights.states import LowStates

__all__ = ["AuditedStep", "Listener", "Meter"]


class Listener(Protocol):
    """Who wants to know of backward passes.

    Attributes:
        looks: whether at this one.
    """

    looks: bool

    def backward_begins(self) -> None:
        """Start the clock."""

    def backward_ended(self, scale: float) -> None:
        """Look at gradients, which carry the factor `scale`."""


class AuditedStep(TrainStep):
    """A training step that says when its backward pass begins and is over, and what stands behind its weights."""

    listener: Listener

    def precise(self, parameter: nn.Parameter) -> Tensor:
        """Return the precise value of `parameter`, for reading: it may be the parameter's own memory."""
        if (store := WeightStore.behind(parameter)) is not None:
            return store.read(parameter)
        value = parameter.detach()
        return value.float() if value.dtype in LOWS else value

    def is_low(self, parameter: nn.Parameter) -> bool:
        """Return whether there are precise values behind `parameter`."""
        return WeightStore.behind(parameter) is not None

    def run_backward(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Run the backward pass between two calls of the listener."""
        if not self.listener.looks:
            return super().run_backward(loss)
        self.listener.backward_begins()
        scale, seed = super().run_backward(loss)
        self.listener.backward_ended(float(scale) / self.accumulate)
        return scale, seed


class Meter:
    """Watches the updates of an audited step.

    Args:
        step: the audited step.
        recorder: keeps the tallies.
        names: id -> name of the parameters.
        moves: whether there is an optimizer to look at.

    Attributes:
        notes: what could not be looked at.
    """

    def __init__(self, step: AuditedStep, recorder: Recorder, names: dict[int, str], *, moves: bool) -> None:
        self.train, self.recorder, self.names, self.moves = step, recorder, names, moves
        self.notes: list[str] = []
        self._intended: Intended | None = None
        self._sums: dict[str, Tensor] = {}  # fp32 sums of the gradients of low parameters over a window
        step.watchers.append(self)
        if step.accumulate > 1:
            for name, parameter in step.model.named_parameters():
                if parameter.requires_grad and parameter.dtype in BELOW_FP32:
                    parameter.register_hook(partial(self._add, name))

    def begin(self) -> None:
        """Begin a window of micro-batches."""
        self._sums = {}

    def _add(self, name: str, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            held = self._sums.get(name)
            self._sums[name] = gradient.float() if held is None else held.add_(gradient)

    def wants_update(self) -> bool:
        """Say that every update is one to look at."""
        return True

    def pass_update(self) -> None:
        """Do nothing: there is no update that it does not see."""

    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note what the update is meant to do, unless it will be skipped or cannot be foreseen."""
        self._intended = None
        step, scale = self.train, float(self.train.record.scale)
        self._compare_sums(parameters)
        if not self.moves:
            return
        if any(p.is_complex() for p in parameters):
            self.moves = False
            self.notes.append("no rows of updates: parameters are complex")
            return
        gradients: dict[nn.Parameter, Tensor] = {}
        for p in parameters:
            assert p.grad is not None
            gradients[p] = (p.grad.to_dense() if p.grad.is_sparse else p.grad).to(torch.float64, copy=True)
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(g)) ** 2 for g in gradients.values())) / scale
        if not math.isfinite(norm):
            return
        factor = 1.0 if step.clip_norm is None else min(1.0, step.clip_norm / (norm + 1e-6))
        for gradient in gradients.values() if factor != scale else ():
            gradient.mul_(factor / scale)
        try:
            self._intended = Intended(step.optimizer, {p: step.precise(p).clone() for p in parameters}, gradients)
        except Exception as error:  # of somebody's optimizer
            self.moves = False
            name, first = type(step.optimizer).__name__, (str(error).splitlines() or [""])[0]
            self.notes.append(f"no rows of updates: {name} cannot step in float64: {type(error).__name__}: {first}")

    def _compare_sums(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compare the gradients of a window with fp32 sums of the same gradients."""
        for p in parameters:
            name = self.names.get(id(p), "")
            held = self._sums.get(name)
            if held is None or p.grad is None or p.grad.is_sparse:
                continue
            tally = self.recorder.tally_of(name, "weight gradient")
            tally.summed.add(p.grad, held, form_of(p.grad))

    def after_update(self, bad: Tensor) -> None:
        """Compare what the update has done with what it was meant to do."""
        intended, self._intended = self._intended, None
        if intended is None or bool(bad):
            return
        step = self.train
        kind = type(step.optimizer).__name__
        strategy = step.policy.master
        managed = LowStates.of(step.optimizer) is not None
        for p, before in intended.before.items():
            name = self.names.get(id(p), "")
            module = name.rpartition(".")[0]
            tally = self.recorder.tally(Call(module, kind, 0, ""), "update", name)
            low = step.is_low(p)
            form = stored_form(p, strategy if low else "none")
            tally.stochastic = low and strategy == "stochastic"
            swallow(tally, before, intended.after[p], step.precise(p), form)
            old, new = intended.states[p]
            state = step.optimizer.state.get(p, {})
            for key, value in new.items():
                found = state.get(key)
                if isinstance(found, Tensor) and found.is_floating_point():
                    tally = self.recorder.tally(Call(module, f"{kind}.{key}", 0, ""), "state", name)
                    tally.stochastic = managed
                    tally.pace = pace_of(step.optimizer, p, key)
                    if key in old:
                        swallow(tally, old[key], value, found, form_of(found))
                        tally.whole.add(found, value.float(), form_of(found))
                    elif found.dtype not in BELOW_FP32:  # nothing to lose
                        tally.see(found)
