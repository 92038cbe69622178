"""Causes: why a step went wrong, where `diagnose` has found the place.

Inputs: the verdict on the place, the history of the run, suspicious values of the batch, and trials in fp32. Output:
the verdict with `cause`, `because`, `sure` and the history. The questions in their order: had training run away, does
the batch hold what cannot be trained on, would fp32 have helped.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from halfstep.lens.box.advice import UNTRAINED, lost_eps
from halfstep.lens.box.data import suspects, wrong_target
from halfstep.lens.box.diagnose import Subject
from halfstep.lens.box.divergence import poisoned, runaway
from halfstep.lens.box.replay import Attempt
from halfstep.lens.box.trials import Trials
from halfstep.lens.rise import BAD
from halfstep.lens.verdict import Verdict

__all__ = ["settle"]

BACK = 30.0
"""A loss at most so many times what it was before is back where it was; `rise.FLOORS` has the same bound."""

ROSE = 3.0
"""Times that a loss has to have risen where fp32 overflows too; else the formula is to blame."""

RISING = 1.5
"""Times that a loss rises within a trial, on the same batches, where training runs away."""

DRAWN = 64
"""Updates of the history that a verdict keeps."""


def settle(subject: Subject, verdict: Verdict, attempt: Attempt | None, trials: Trials | None) -> Verdict:
    """Return the verdict with its root cause, and with the history of the run.

    Args:
        subject: the step.
        verdict: the place.
        attempt: the replay that led to it; None: there was none.
        trials: run training under other policies, and are asked only where the answer depends on it; None: none can.
    """
    cause, because, sure = _cause(subject, verdict, attempt, trials)
    return replace(verdict, cause=cause, because=because, sure=sure, history=_history(subject))


def _cause(subject: Subject, verdict: Verdict, attempt: Attempt | None, trials: Trials | None) -> tuple[str, str, str]:
    """Return cause, evidence and how sure it is; "" for a cause that is not known."""
    found = suspects(subject, attempt)
    if verdict.kind == "bad_batch":
        return "data", found[0] if found else f"{verdict.parameter}: {verdict.detail or 'not finite'}", "shown"
    if verdict.kind == "not_reproducible":
        return "", "", ""
    if target := wrong_target(subject, attempt):
        return "data", target, "shown"
    if batch := poisoned(subject.signals, subject):
        return "data", batch, "shown"
    away = runaway(subject.signals, subject)
    if verdict.kind == "bad_state" and (lost := lost_eps(subject.optimizer, subject.model)):
        return "precision", lost, "likely"
    if attempt is None or trials is None or verdict.kind == "bad_state":
        return ("divergence", away, "likely") if away else ("", "", "")
    wide = trials.wide
    tried = wide.finite_once is False or wide.trained > 0  # a step that is not finite cannot be trained on
    if away and not (wide.trains and _is_back(trials)):
        return "divergence", f"{away}; in fp32: {wide.outcome}", "shown" if tried else "likely"
    if found:
        return "data", found[0], "shown" if tried and not wide.trains else "likely"
    if verdict.kind == "scale_too_high":
        return "scale", f"at a lower loss scale the step is finite; {verdict.detail}", "shown"
    if wide.trains and _rises(trials):
        return "divergence", f"the loss rises in fp32 too: {wide.outcome}", "likely"
    if wide.trains:
        return "precision", f"in fp32 the same steps are finite and train: {wide.outcome}", "shown"
    if wide.finite_once is None:
        return "", "", ""
    if not wide.finite_once and verdict.kind == "overflow" and (course := _off_course(subject, trials)):
        return "divergence", f"{course}; now fp32 overflows too", "likely"
    if not wide.finite_once:
        value = "value" if verdict.kind == "invalid" else "finite value"
        return "model", f"fp32 has no {value} there either", "shown" if verdict.kind == "invalid" else "likely"
    if not tried and not trials.before:  # the weights may be too large to train in any format
        return "", "", ""
    if not tried:
        why = wide.outcome.partition(": ")[2]
        return "precision", f"in fp32 the step is finite, and training had not run away before; {why}", "likely"
    if not trials.before and not _updated(subject):
        return "model", f"{UNTRAINED}, in fp32: {wide.outcome}; initial weights or inputs are too large", "likely"
    return "divergence", f"in fp32 the step is finite and training does not go on: {wide.outcome}", "likely"


def _updated(subject: Subject) -> bool:
    """Return whether the optimizer's state shows that there were updates, of a run that was resumed."""
    states = () if subject.optimizer is None else subject.optimizer.state.values()
    return any(bool(v.any()) for state in states for v in state.values() if isinstance(v, Tensor))


def _rises(trials: Trials) -> bool:
    """Return whether the loss of training in fp32 rises on the same batches, above all losses before."""
    losses = trials.wide.losses
    highest = max((abs(losses[0]), *trials.before)) if losses else 0.0
    return bool(trials.before) and abs(losses[-1]) > RISING * highest


def _off_course(subject: Subject, trials: Trials) -> str:
    """Return in words that losses rose or weights grew before the step; "" if they did not."""
    before = trials.before
    if before and max(before) >= ROSE * before[0]:
        return f"the loss was {before[0]:.3g} at first, {max(before):.3g} at most and {before[-1]:.3g} at last"
    steps = () if subject.signals is None else subject.signals.read().steps
    growth = subject.signals.growth(subject.model, steps[0]) if subject.signals is not None and steps else None
    if before and growth is not None and growth[2] >= BAD.grew * growth[1]:
        return f"the weights grew from {growth[1]:.3g} to {growth[2]:.3g} since step {growth[0]}"
    return ""


def _is_back(trials: Trials) -> bool:
    """Return whether training in fp32 comes back to losses like those before the step."""
    losses = trials.wide.losses
    return trials.usual is None or not losses or abs(losses[-1]) <= BACK * trials.usual


def _history(subject: Subject) -> tuple[tuple[int, float | None, float | None], ...]:
    if subject.signals is None:
        return ()
    seen = subject.signals.read()
    rows = list(zip(seen.steps, seen.losses, seen.gradients, strict=True))[-DRAWN:]
    return tuple((step, _known(loss), _known(norm)) for step, loss, norm in rows)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
