"""Divergence: whether training had run away before a step that was not finite, or after a bad batch was applied.

Inputs: the history of the run (`step.signals`), the loss of the step and the weights it had. Output: one sentence of
evidence with its numbers, "" where there is none.
"""

from __future__ import annotations

import math
from functools import partial

from halfstep.lens.box.diagnose import Subject
from halfstep.lens.rise import BAD, WEIGHTS, Rise, learning_rate, outlier, rise
from halfstep.step.parts.signals import Signals

__all__ = ["poisoned", "runaway"]

MARGIN = 10.0  # times that weights may have moved farther than a plain update does: a momentum of 0.9 adds up to that


def runaway(signals: Signals | None, subject: Subject) -> str:
    """Return the evidence that training had run away before the step of `subject`, in one sentence; "" for none.

    Args:
        signals: the history of the run; None: there is none.
        subject: a step that was not finite; the norm of its model's weights is taken.
    """
    found, batch = _before(signals, subject)
    if found is None or batch or not _reachable(found, subject):
        return ""
    rate = learning_rate(subject.optimizer)
    return f"{found}" + (f"; the learning rate is {rate:.3g}" if rate else "")


def _reachable(found: Rise, subject: Subject) -> bool:
    """Return whether updates can have moved the weights so far; else they were loaded or edited.

    An update of SGD moves them by the learning rate times the gradient, one of Adam each by about the learning rate.
    """
    if found.what != WEIGHTS or subject.optimizer is None or subject.signals is None:
        return True
    updates = subject.signals.read().updates(until=subject.step)
    norms = [norm for step, _, norm in updates if step >= found.first and math.isfinite(norm)]
    size = math.sqrt(sum(p.numel() for p in subject.model.parameters() if p.requires_grad))
    moved = learning_rate(subject.optimizer) * max(sum(norms), len(updates) * size)
    return (found.after - found.before) * size <= MARGIN * moved  # a root mean square times its root is a norm


def poisoned(signals: Signals | None, subject: Subject) -> str:
    """Return the evidence that training had run away after the update of a bad batch, as `runaway`; "" for none."""
    found, batch = _before(signals, subject)
    return f"{batch}, and its update was applied: {found}" if batch else ""


def _before(signals: Signals | None, subject: Subject) -> tuple[Rise | None, str]:
    """Return what had run away before a step, and the outlier of the batch with which that began, "" for none."""
    if signals is None:
        return None, ""
    history, window = signals.read(), subject.replay.window
    loss = window[-1].loss if window else None
    own = math.nan if loss is None or loss.numel() != 1 else float(loss)
    rows = [*history.updates(until=subject.step), (subject.step, own, math.nan)]
    found = rise(rows, partial(signals.growth, subject.model), BAD)
    return found, "" if found is None else outlier(history.inputs, found, subject.step)
