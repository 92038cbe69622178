"""The state of a training step: what is saved, and what must be true before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.policy.policy import Policy
from halfstep.step.prepare import prepared_policy, unwrap
from halfstep.step.progress import LOAD
from halfstep.step.saved import check_model, check_optimizer, check_scheduler, check_step
from halfstep.step.undo import SchedulerCopy

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["load_rounding", "load_step", "refuse_window", "rounding", "save_step"]

KEYS = frozenset({"model", "optimizer", "scaler", "scheduler", "policy", "step"})
WEIGHTS = "weights"  # only there where a weight strategy has a state besides the fp32 weights


def refuse_window(step: TrainStep, what: str) -> None:
    """Refuse to save or copy `step` while gradients of an accumulation window wait for their update."""
    if step._window:
        raise StepError(
            f"{what} after {step._window} of {step.accumulate} micro-batches would lose their gradients; "
            "save between updates, or call step.flush() first"
        )


def save_step(step: TrainStep) -> dict[str, Any]:
    """Return the state of `step` as plain containers and tensors (torch.save, weights_only-safe)."""
    refuse_window(step, "state_dict()")
    policy = prepared_policy(step.model)
    assert policy is not None
    weights = rounding(step)
    return {
        **({WEIGHTS: weights} if weights else {}),
        "model": unwrap(step.model).state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "scaler": step.scaler.state_dict(),
        "scheduler": None if step.scheduler is None else step.scheduler.state_dict(),
        "policy": policy.to_toml(),
        "step": step._step,
    }


def rounding(step: TrainStep) -> dict[str, Any]:
    """Return the state of what rounds by chance: weights, optimizer states or both; {} for nothing."""
    if step._states is not None:
        return step._states.draws.state()
    return {} if step._store is None else step._store.state()


def load_rounding(step: TrainStep, state: dict[str, Any]) -> None:
    """Go on with the random bits that come after `state`, which `rounding` returned.

    Raises:
        WeightsError: it is no such state; nothing was changed.
        StepError: there is nothing that rounds by chance; nothing was changed.
    """
    if step._states is not None:
        step._states.draws.load_state(state)
    elif step._store is not None:
        step._store.load_state(state)
    elif state:
        raise StepError(f"weights: nothing is rounded by chance here, and the state has {sorted(map(str, state))}")


def load_step(step: TrainStep, state: object) -> None:
    """Load `state` into `step` after checking all of it.

    Optimizer, scheduler, scaler and rounding go first and are put back if a later piece fails. The weights go last;
    where they fail half way, which only a module with its own way to load can do, the step refuses to go on until
    another state is loaded.

    Raises:
        StepError: a piece is missing, unknown or malformed, by its path; nothing was changed.
        ScaleError, WeightsError: the same of 'scaler' and 'weights'.
    """
    number = _checked(step, state)
    assert isinstance(state, Mapping)
    undo = [_rounding_undo(step), _scaler_undo(step), _optimizer_undo(step.optimizer)]
    if step.scheduler is not None:
        undo.append(SchedulerCopy(step.scheduler, step.optimizer).put_back)
    model, progress = unwrap(step.model), step._progress
    before = (progress.phase, progress.cause)
    written = [(t, t._version) for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
    try:
        weights = state.get(WEIGHTS, {})
        if weights or rounding(step):  # this and the scaler first: they check for themselves before they change
            load_rounding(step, weights)
        step.scaler.load_state_dict(state["scaler"])
        step.optimizer.load_state_dict(state["optimizer"])
        if step.scheduler is not None:
            step.scheduler.load_state_dict(state["scheduler"])
        progress.phase = LOAD
        model.load_state_dict(state["model"])
        step._step, step._window, step._pending = number, 0, None
        step._statistics.open = []
        progress.forget()
    except BaseException as error:
        if step._store is not None:
            step._store.restore(write_back=False)
        for put_back in undo:
            put_back()
        if all(tensor._version == version for tensor, version in written):
            progress.phase, progress.cause = before
        else:
            progress.cause = f"{type(error).__name__} ({error}) "
        raise


def _checked(step: TrainStep, state: object) -> int:
    """Check all of `state` without changing anything; return its number of micro-batches."""
    if not isinstance(state, Mapping) or set(state) - {WEIGHTS} != KEYS:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StepError(f"a TrainStep state has the keys {sorted(KEYS)} and this has {got}")
    if not isinstance(state["policy"], str):
        kind = type(state["policy"]).__name__
        raise StepError(f"policy: a {kind}, expected the text that state_dict() saves (TOML); nothing was loaded")
    policy = prepared_policy(step.model)
    assert policy is not None
    saved = Policy.from_toml(state["policy"])
    if saved != policy:
        raise StepError(
            "the state was saved under another policy; build the TrainStep with the policy it was saved with, or load "
            f"its parts ('model', 'optimizer') by hand. They differ:\n{saved.diff(policy)}"
        )
    number = check_step(state["step"])
    for name in ("scaler", WEIGHTS):
        if not isinstance(state.get(name, {}), Mapping):
            raise StepError(f"{name}: a {type(state[name]).__name__}, expected a dict; nothing was loaded")
    check_scheduler(step.scheduler, state["scheduler"])
    check_optimizer(step.optimizer, state["optimizer"])
    check_model(unwrap(step.model), state["model"])
    return number


# ---------------------------------------------------------------------- putting back


def _rounding_undo(step: TrainStep) -> Callable[[], None]:
    before = rounding(step)
    return lambda: load_rounding(step, before) if before else None


def _scaler_undo(step: TrainStep) -> Callable[[], None]:
    before, rule = step.scaler.state_dict(), step.scaler.rule

    def put_back() -> None:
        if step.scaler.is_enabled() and (step.scaler.state_dict() != before or step.scaler.rule != rule):
            step.scaler.load_state_dict(before)

    return put_back


def _optimizer_undo(optimizer: Optimizer) -> Callable[[], None]:
    """Return what puts groups and states back; torch replaces these when it loads, and writes to no tensor of them."""
    groups, states = optimizer.param_groups, optimizer.state
    before = [dict(group, params=list(group["params"])) for group in groups]
    held = {parameter: dict(state) for parameter, state in states.items()}

    def put_back() -> None:
        for group, values in zip(groups, before, strict=True):
            group.clear()
            group.update(values)
        states.clear()
        states.update(held)
        optimizer.param_groups, optimizer.state = groups, states

    return put_back
