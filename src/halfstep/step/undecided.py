"""policy="auto": a training step that measures policies in its first call and runs under the best from then on.

It is then, bit for bit, as if it had been made with the policy that was chosen, or was loaded from a checkpoint.
"""

from __future__ import annotations

import logging
import weakref
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from halfstep.auto.choose import FP32, POLICIES, SETTINGS, Choice, choose, described
from halfstep.auto.trial import StepSnapshot
from halfstep.binding.bind import binding_of, is_bound
from halfstep.binding.fsdp import is_distributed
from halfstep.binding.prepare import prepare_with, unchanged_on_failure
from halfstep.binding.wrappers import unwrap
from halfstep.cast.rules.recipe import recipe_for
from halfstep.errors import StepError
from halfstep.meeting import processes
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of
from halfstep.step.loss import compile_options, uses_graphs
from halfstep.step.moments import Moments, Phase
from halfstep.step.parts.record import Record
from halfstep.step.state import CHOICE, check_state
from halfstep.torch_private.distributed import comm_hooks, renew_reducer
from halfstep.update.updater import Deferral

if TYPE_CHECKING:
    from halfstep.step.loss import CompiledLoss
    from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep")


class Undecided(Moments):
    """The place of `Moments` in a training step with policy="auto", before its first call."""

    def __init__(self, step: TrainStep, make: type[TrainStep]) -> None:
        super().__init__((), bool)
        self.phase, self._step, self._make = Phase.UNDECIDED, weakref.ref(step), make
        given: Any = step._given
        _refuse(given)
        snapshot = StepSnapshot(unwrap(given.model), given.optimizer)
        with snapshot.returning(Deferral()):  # raises here what the first call would raise
            settings = {name: getattr(given, name) for name in SETTINGS}
            make(given.model, given.optimizer, given.loss_fn, policy=POLICIES[FP32], blackbox=False, **settings)
        step._record = Record(given.model, replayable=False)
        fp32: Any = SimpleNamespace(recipe=recipe_for(Policy.of(POLICIES[FP32]), device_types_of([given.model])))
        step._binding = fp32

    @property
    def step(self) -> TrainStep:
        """The training step."""
        step = self._step()
        assert step is not None
        return step

    def refuse(self, done: int) -> None:
        """Refuse nothing: no call was cut off."""

    def choose(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Choose a policy by measuring on a micro-batch, and build the step under it."""
        self._build(*choose(self.step, self._make, batch, named))

    def _build(self, choice: Choice, compiled: CompiledLoss | None = None) -> None:
        """Build the step under what was chosen; if that fails, it stays undecided."""
        step = self.step
        before, saving = dict(vars(step)), step.record.saving
        given: Any = copy(step._given)
        given.policy, given.compile = choice.policy, (given.compile or True) if choice.compiled else False
        step._given = given
        ddp = given.model if isinstance(given.model, DistributedDataParallel) else None
        try:
            with unchanged_on_failure(given.model, given.optimizer):
                if ddp is not None:  # its hooks are those of parameters in the formats that it was made for
                    prepare_with(ddp.module, given.optimizer, choice.policy)
                    renew_reducer(ddp)
                step._build()
        except BaseException:
            vars(step).clear()
            vars(step).update(before)
            raise
        step.record.saving, given.choice = saving, choice
        for part in self.parts:
            step._moments.add(part)
        if compiled is not None:
            step._compiled = compiled
        LOG.warning("%s", choice.line)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `TrainStep.state_dict` returned, and take its policy without measuring."""
        step = self.step
        given = step._given
        check_state(step, state)
        if CHOICE in state and state[CHOICE] is None:  # it had not chosen
            unwrap(given.model).load_state_dict(state["model"])
            given.optimizer.load_state_dict({**state["optimizer"], "state": dict(state["optimizer"]["state"])})
            if given.scheduler is not None:
                given.scheduler.load_state_dict(state["scheduler"])
            return
        policy, saved = Policy.from_toml(state["policy"]), state.get(CHOICE, {})
        compiled = bool(saved.get("compiled", False) if given.compile is None else given.compile is not False)
        line = f"auto: {described(policy, device_types_of([given.model])[0], compiled)}, as in the checkpoint"
        before = dict(vars(step))
        snapshot = StepSnapshot(unwrap(given.model), given.optimizer)
        self._build(Choice(policy=policy, compiled=compiled, line=line))
        try:
            step.load_state_dict(state)
        except BaseException:
            if step._moments.phase is Phase.REST:  # else it refuses to go on until another state is loaded
                snapshot.restore()
                vars(step).clear()
                vars(step).update(before)
            raise


def _refuse(given: Any) -> None:
    model, inner = given.model, unwrap(given.model)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    options = compile_options(given.compile, accumulate=given.accumulate, cuda_graph=False)
    remedy = ""
    if given.scaler is not None:
        remedy = "scaler=: the policy that is chosen brings its own loss scale; leave scaler out"
    elif given.cuda_graph or (options is not None and uses_graphs(options)):
        remedy = "CUDA graphs are captured under one policy; leave them out, or give the policy that was chosen"
    elif is_distributed(inner) or (ddp is None and processes()[1] > 1):
        remedy = (
            "processes choose together under DistributedDataParallel alone; wrap the model in it, or choose in one "
            "process, and give all of them the policy that step.choice names"
        )
    elif ddp is not None and comm_hooks(ddp):
        remedy = "a communication hook is registered for gradients in other formats; leave it out, or give the policy"
    elif any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        remedy = "SyncBatchNorm waits for other processes, which measure other numbers of steps; give the policy"
    elif is_bound(inner):
        binding = binding_of(inner)
        name = "another policy" if binding is None else repr(binding.wanted.name)
        remedy = f"the model is prepared with {name} already; leave policy out, or call hs.unprepare(model) before"
    elif inner is not (model if ddp is None else ddp.module):
        remedy = f"the model is wrapped in {type(model).__name__}; give the model in it (compile= compiles it)"
    elif lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        remedy = f"parameter {lazy[0]} has no values yet; run one batch before"
    if remedy:
        raise StepError(f"policy='auto': {remedy}")
