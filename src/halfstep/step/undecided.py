"""policy="auto": a training step that measures policies in its first call and runs under the best from then on.

In: a TrainStep made with ``policy="auto"`` and its first batch, or a checkpoint. Out: the same object as a TrainStep
under the policy that was chosen, with `choice`; bit for bit as if it had been made with that policy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from halfstep.auto.choose import FP32, POLICIES, SETTINGS, Choice, choose, described
from halfstep.auto.trial import Ground
from halfstep.binding.bind import binding_of, is_bound
from halfstep.binding.fsdp import is_distributed
from halfstep.binding.prepare import unwrap
from halfstep.cast.rules.recipe import recipe_for, run_eagerly
from halfstep.errors import StepError
from halfstep.meeting import processes
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of
from halfstep.scale.scaler import GradScaler
from halfstep.step.compiled import compile_options, uses_graphs
from halfstep.step.evaluate import evaluate
from halfstep.step.parts.record import Record
from halfstep.step.state import CHOICE, check_state
from halfstep.step.train_step import TrainStep

if TYPE_CHECKING:
    from halfstep.events import StepResult
    from halfstep.step.compiled import CompiledLoss

__all__ = ["Undecided", "undecide"]

LOG = logging.getLogger("halfstep")


class NotChosen(StepError, AttributeError):
    """Something that a step with policy="auto" does not have before its first call."""


class Undecided(TrainStep):
    """A TrainStep with policy="auto" before its first call; its class is its own again when the choice is made."""

    _blackbox: Any

    def __call__(self, *batch: Any, **named: Any) -> StepResult:
        """Choose a policy by measuring on this micro-batch, then train on it under that policy.

        Raises:
            StepError: no candidate made a finite step; or the model was prepared since the step was built.
        """
        choice, compiled = choose(self, batch, named)
        self._become(choice, compiled)
        return self(*batch, **named)

    def _become(self, choice: Choice, compiled: CompiledLoss | None = None) -> None:
        """Be the training step that was chosen; if that fails, stay what it is."""
        before, kind = dict(vars(self)), type(self)
        settings = {name: getattr(self, name) for name in SETTINGS}
        compile = (self.compile or True) if choice.compiled else False
        self.__class__ = kind.__bases__[1]
        try:
            TrainStep.__init__(
                self,
                self.model,
                self.optimizer,
                self.loss_fn,
                policy=choice.policy,
                compile=compile,
                blackbox=self._blackbox,
                **settings,
            )
        except BaseException:
            _put(self, before, kind)
            raise
        self._metrics, record = before["_metrics"], before["_record"]
        self.record.saving, self.record.preemption = record.saving, record.preemption
        self._choice = choice
        if compiled is not None:
            self._compiled = compiled
        LOG.warning("%s", choice.line)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotChosen(
            f"step.{name}: policy='auto' chooses in the first call of the step, which has not come yet; call "
            "step(*batch), or load a checkpoint, before"
        )

    def flush(self) -> StepResult | None:
        """Return None: there is nothing to update with."""
        return None

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """Return what `loss_fn` returns for a batch in fp32, without gradients."""
        recipe = recipe_for(Policy.of(POLICIES[FP32]), device_types_of([self.model]))
        return evaluate(self.model, self.loss_fn, recipe, batch, named)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a step that has not chosen, and chooses after it is loaded too."""
        return {
            CHOICE: None,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": GradScaler(enabled=False).state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "policy": Policy.of(POLICIES[FP32]).to_toml(),
            "step": 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and take the policy it was saved under without measuring.

        Raises:
            StepError: as `TrainStep.load_state_dict`; nothing was changed.
        """
        check_state(self, state)
        if CHOICE in state and state[CHOICE] is None:  # it had not chosen
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict({**state["optimizer"], "state": dict(state["optimizer"]["state"])})
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            return
        policy, saved = Policy.from_toml(state["policy"]), state.get(CHOICE, {})
        compiled = bool(saved.get("compiled", False) if self.compile is None else self.compile is not False)
        line = f"auto: {described(policy, device_types_of([self.model])[0], compiled)}, as in the checkpoint"
        before, kind, ground = dict(vars(self)), type(self), Ground(self.model, self.optimizer)
        self._become(Choice(policy=policy, compiled=compiled, line=line))
        try:
            self.load_state_dict(state)
        except BaseException:
            if not self._moments.phase:  # else it refuses to go on until another state is loaded
                ground.restore()
                _put(self, before, kind)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle: a new step of the copied model and optimizer, which chooses for itself."""
        named = {name: getattr(self, name) for name in (*SETTINGS, "compile")} | {"blackbox": self._blackbox}
        return _rebuild, (type(self).__bases__[1], self.model, self.optimizer, self.loss_fn, named)


run_eagerly(Undecided.__call__)


def _put(step: TrainStep, values: Mapping[str, Any], kind: type[TrainStep]) -> None:
    vars(step).clear()
    vars(step).update(values)
    step.__class__ = kind


def _rebuild(kind: type[TrainStep], model: Any, optimizer: Any, loss_fn: Any, named: dict[str, Any]) -> TrainStep:
    return kind(model, optimizer, loss_fn, policy="auto", **named)


@cache
def _undecided(kind: type[TrainStep]) -> type[TrainStep]:
    """Return the class of a step of class `kind` before its choice."""
    return type(kind.__name__, (Undecided, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def undecide(step: TrainStep, scaler: object, blackbox: object) -> None:
    """Make of a training step that is being built, and has the user's arguments, one that has not chosen.

    Raises:
        StepError: what does not go together with policy="auto".
        BindError, PolicyError, UnbuiltError: as for a step in fp32.
    """
    model, optimizer = step.model, step.optimizer
    options = compile_options(step.compile, accumulate=step.accumulate, cuda_graph=False)
    remedy = ""
    if scaler is not None:
        remedy = "scaler=: the policy that is chosen brings its own loss scale; leave scaler out"
    elif step.cuda_graph or (options is not None and uses_graphs(options)):
        remedy = "CUDA graphs are captured under one policy; leave them out, or give the policy that was chosen"
    elif is_distributed(model) or processes()[1] > 1:
        remedy = (
            "each of several processes would choose for itself; choose in one process, and give all of them the policy "
            "that step.choice names"
        )
    elif is_bound(model):
        binding = binding_of(unwrap(model))
        name = "another policy" if binding is None else repr(binding.wanted.name)
        remedy = f"the model is prepared with {name} already; leave policy out, or call hs.unprepare(model) before"
    elif unwrap(model) is not model:
        remedy = f"the model is wrapped in {type(model).__name__}; give the model in it (compile= compiles it)"
    elif lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        remedy = f"parameter {lazy[0]} has no values yet; run one batch before"
    if remedy:
        raise StepError(f"policy='auto': {remedy}")
    settings = {name: getattr(step, name) for name in SETTINGS}
    with Ground(model, optimizer).returning(copied=False):  # raises here what the first call would raise
        TrainStep(model, optimizer, step.loss_fn, policy=POLICIES[FP32], blackbox=False, **settings)
    step._metrics = None
    step._record = Record(model, replayable=False)
    kind: Any = type(step)  # hashable, which a class with Tensors in it is not to mypy
    step.__class__ = _undecided(kind)
    vars(step)["_blackbox"] = blackbox
