"""The state of a training step: what is saved, and what must be true before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.policy.policy import Policy
from halfstep.step.prepare import prepared_policy, unwrap

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
    """
    if step._states is not None:
        step._states.draws.load_state(state)
    elif step._store is not None:
        step._store.load_state(state)


def load_step(step: TrainStep, state: dict[str, Any]) -> None:
    """Load `state` into `step` after checking all of it that can be checked without changing anything."""
    if not isinstance(state, dict) or set(state) - {WEIGHTS} != KEYS:
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise StepError(f"a TrainStep state has the keys {sorted(KEYS)} and this has {got}")
    policy = prepared_policy(step.model)
    assert policy is not None
    saved = Policy.from_toml(state["policy"])
    if saved != policy:
        raise StepError(
            "the state was saved under another policy; build the TrainStep with the policy it was saved with, or load "
            f"its parts ('model', 'optimizer') by hand. They differ:\n{saved.diff(policy)}"
        )
    if (state["scheduler"] is None) is not (step.scheduler is None):
        raise StepError("the state was saved with a scheduler and this TrainStep has none, or the other way round")
    model = unwrap(step.model)
    have, want = model.state_dict(), state["model"]
    wrong = sorted(set(have) ^ set(want)) or [
        n for n, t in have.items() if hasattr(t, "shape") and t.shape != want[n].shape
    ]
    if wrong:
        raise StepError(
            f"the saved model does not fit this one: {wrong[0]!r} is missing on one side or differs in shape"
        )
    _check_groups(step.optimizer, state["optimizer"])
    weights = state.get(WEIGHTS, {})
    if weights or rounding(step):  # this and the scaler first: they check for themselves before they change
        load_rounding(step, weights)
    step.scaler.load_state_dict(state["scaler"])
    model.load_state_dict(want)
    step.optimizer.load_state_dict(state["optimizer"])
    if step.scheduler is not None:
        step.scheduler.load_state_dict(state["scheduler"])
    step._step, step._window = int(state["step"]), 0


def _check_groups(optimizer: Optimizer, state: Any) -> None:
    """Refuse an optimizer state whose groups are not those of `optimizer`."""
    saved = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(saved, list) or "state" not in state:
        raise StepError("the saved optimizer is not what state_dict() of a torch optimizer returns")
    have, want = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved))
    if have != want:
        raise StepError(
            f"the saved optimizer does not fit this one: its groups have {want} parameters, and here they have {have}; "
            "build the optimizer with the groups it was saved with"
        )
