"""The state of a training step: what is saved, and what must be true before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from halfstep.auto.choose import FP32, POLICIES
from halfstep.binding.prepare import prepared_policy
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.schema import check
from halfstep.snapshot import Snapshot, optimizer_state, scheduler_state
from halfstep.step.moments import Phase, one_thread
from halfstep.step.parts.host_state import wait_for
from halfstep.step.saved import STATE, check_model, check_optimizer, check_scheduler
from halfstep.step.settings import Settings
from halfstep.update.updater import Updater

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

WEIGHTS, CHOICE, REFERENCE = "weights", "choice", "reference"  # the keys that may be absent


def rounding(updater: Updater) -> dict[str, Any]:
    """Return the state of stochastic rounding: of weights, optimizer states or both; {} for nothing."""
    draws = updater.draws
    return {} if draws is None else draws.state()


def load_rounding(updater: Updater, state: dict[str, Any]) -> None:
    """Continue with the random bits that come after `state`, which `rounding` returned."""
    if (draws := updater.draws) is not None:
        draws.load_state(state)
    elif state:
        raise StepError(f"weights: nothing is rounded by chance here, and the state has {sorted(map(str, state))}")


def rebuild(kind: type[TrainStep], named: dict[str, Any], done: int, weights: dict[str, Any], choice: Any) -> TrainStep:
    """Make the copy of a training step: `Stateful.__reduce__` returns the arguments."""
    made = kind(**named)
    if weights:
        load_rounding(made._updater, weights)
    made.record.done, made._given.choice = done, choice
    return made


def check_state(step: Settings, state: object, *, tensors: bool = True) -> int:
    """Check all of `state`, or all but its tensors, and change nothing; return its number of micro-batches."""
    check(state, STATE, "state", StepError)
    assert isinstance(state, Mapping)
    policy = prepared_policy(step.model)
    saved = Policy.from_toml(state["policy"])
    if policy is not None and saved != policy:  # a step that has not chosen takes the state's
        raise StepError(
            "the state was saved under another policy; build the TrainStep with the policy it was saved with, or load "
            f"its parts ('model', 'optimizer') by hand. They differ:\n{saved.diff(policy)}"
        )
    check_scheduler(step.scheduler, state["scheduler"])
    check_optimizer(step.optimizer, state["optimizer"], groups_alone=not tensors)
    if tensors:
        check_model(unwrap(step.model), state["model"])
    return int(state["step"])


def _scaler(step: Settings) -> Callable[[], None]:
    before, rule = step.scaler.state_dict(), step.scaler.rule

    def restore() -> None:
        if step.scaler.is_enabled() and (step.scaler.state_dict() != before or step.scaler.rule != rule):
            step.scaler.load_state_dict(before)

    return restore


class Stateful(Settings):
    """What is saved, copied and loaded of a `TrainStep`."""

    @one_thread
    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs to continue bit for bit; fp32 weights. Reads the last verdict.

        Plain containers and tensors (torch.save, weights_only-safe).

        Raises:
            StepError: in the middle of an accumulation window (gradients are not part of the state).
        """
        state: dict[str, Any] = {}
        if self._moments.phase is Phase.UNDECIDED:  # after it is loaded the step chooses too
            policy, scaler = Policy.of(POLICIES[FP32]), GradScaler(enabled=False)
            state[CHOICE] = None
        else:
            self._settle("state_dict()")
            policy, scaler = self._binding.wanted, self.scaler
            if weights := rounding(self._updater):
                state[WEIGHTS] = weights
            if (weighing := self._weighing()) is not None:
                state[REFERENCE] = weighing.reference
            if self.choice is not None:
                state[CHOICE] = {"compiled": self.choice.compiled, "line": self.choice.line}
        return {
            **state,
            "model": unwrap(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "policy": policy.to_toml(),
            "step": self.record.done,
        }

    @one_thread
    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle: a new step of the copied model and optimizer. Reads the last verdict."""
        named = {name: value for name, value in vars(self._given).items() if name not in {"evidence", "choice"}}
        weights: dict[str, Any] = {}
        if self._moments.phase is not Phase.UNDECIDED:  # else the copy chooses for itself
            self._settle("a copy")
            named |= {"policy": self._binding.wanted, "scaler": self.scaler}
            weights = rounding(self._updater)
        return rebuild, (type(self), named, self.record.done, weights, self.choice)

    @one_thread
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; all of it is validated before anything changes.

        A step that was cut off, and refuses to go on, goes on from there. Weights are loaded last; where they fail half
        way, which only a module with its own way to load can do, the step refuses to go on until another state is
        loaded.

        Raises:
            StepError: a piece that is missing, unknown or malformed, by its path, or a state of another policy.
            ScaleError, WeightsError, PolicyError: what their pieces say of themselves.
        """
        if self._moments.phase is Phase.UNDECIDED:
            self._moments.load_state_dict(state)
            return
        self._moments.cut_off()
        updater, moments = self._updater, self._moments
        number = check_state(self, state)
        bits = rounding(updater)
        parts: list[Callable[[], None]] = [partial(load_rounding, updater, bits)] if bits else []
        parts += [_scaler(self), optimizer_state(self.optimizer)]
        if self.scheduler is not None:
            parts.append(scheduler_state(self.scheduler, self.optimizer))
        snapshot = Snapshot(*parts)
        model = unwrap(self.model)
        before = (moments.phase, moments.cause)
        written = [(t, t._version) for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
        try:
            weights = state.get(WEIGHTS, {})
            if weights or bits:  # this and the scaler first: they check for themselves before they change
                load_rounding(updater, weights)
            self.scaler.load_state_dict(state["scaler"])
            saved = state["optimizer"]  # of which ZeroRedundancyOptimizer drops what other ranks have
            self.optimizer.load_state_dict({**saved, "state": dict(saved["state"])})
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            moments.phase = Phase.LOAD
            model.load_state_dict(state["model"])
            self.record.done, self.record.micro_batches, self.record.bad = number, 0, None
            self.record.signals.forget()
            self._statistics.open = []
            if REFERENCE in state:
                self._weigh(state[REFERENCE])
            moments.forget()
        except BaseException as error:
            if updater.store is not None:
                updater.store.restore(write_back=False)
            snapshot.restore()
            if all(tensor._version == version for tensor, version in written):
                moments.phase, moments.cause = before
            else:
                moments.cause = f"{type(error).__name__} ({error}) "
            raise
        if self._graphs is not None:
            self._graphs.reset()

    def _settle(self, what: str) -> None:
        """Refuse `what` of a step that was cut off, or in a window; read the last verdict."""
        self._moments.refuse(self.record.done)
        self._verdicts.settle(wait=True)
        self._refuse_window(what)
        if self.state == "host":
            wait_for(self.optimizer)
