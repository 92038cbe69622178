"""Divergence: whether training had run away before a step, from the history of the run.

Inputs: the history (`step.signals`), and for a bad step its loss and the weights it had. Output: one sentence of
evidence with its numbers, "" where there is none.

Note [run away]: on data of one kind a loss can rise only because updates have moved the weights. So two things are
asked for: the loss, or the norm of the gradients, is far above all earlier ones and has stayed there, and the norm of
the weights has grown meanwhile. A bad batch raises the loss of its own step, whose weights are as before. A spike at
the beginning of training, or after a restart of the schedule, comes back; a loss that is large by nature was so before;
that of a GAN, or of a policy whose first reward has come, rises while the weights stay nearly as large as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from halfstep.lens.box.diagnose import Subject
from halfstep.step.signals import Signals

__all__ = ["EARLY", "Rise", "rise", "runaway"]

LOSS, GRADIENTS, WEIGHTS = "loss", "norm of the gradients", "norm of the weights"
FLOORS = {LOSS: 30.0, GRADIENTS: 300.0}
"""So many times the largest value of the older half of the history is no fluctuation: losses of healthy runs vary by 10
at most after their beginning, norms of gradients by 100 from batch to batch."""

EVIDENCE = 3.0
"""Of a bad step: decimal digits that the values rose by, added up over the steps in a row above the floor: one step at
1,000 times, or two at 32 times."""

EARLY = 6.0
"""The same while training is finite and may come back."""

GREW = 2.0
"""Times that the norm of the weights grew meanwhile. From update n to update 2n a healthy one grows by that at most, at
the beginning of training and from weights that begin at zero."""

BURST = 30.0
"""The same where weights are the only evidence: no loss was finite after the update that was too large."""

UNKNOWN = (0, math.nan, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A quantity that has run away.

    Attributes:
        what: "loss", "norm of the gradients" or "norm of the weights".
        first: the last step before it rose.
        last: the last step that it is known of.
        before: its value at `first`.
        after: its value at `last`.
        grew: times that the norm of the weights grew since `first`; inf: from zero, or to inf; nan: not known.
    """

    what: str
    first: int
    last: int
    before: float
    after: float
    grew: float = math.nan

    def __str__(self) -> str:
        """Return it as a clause with its numbers."""
        times = f" {self.after / self.before:.2g} times" if self.before else ""
        numbers = f"{self.before:.3g} to {self.after:.3g}"
        if self.what == WEIGHTS:  # known before a step, and now
            return f"the {self.what} rose{times} since step {self.first}, {numbers}"
        grew = f"; the norm of the weights grew {self.grew:.2g} times" if math.isfinite(self.grew) else ""
        return f"the {self.what} rose{times} from step {self.first} to step {self.last}, {numbers}{grew}"


def runaway(signals: Signals | None, subject: Subject) -> str:
    """Return the evidence that training had run away before the step of `subject`, in one sentence; "" for none.

    Args:
        signals: the history of the run; None: there is none.
        subject: a step that was not finite; the norm of its model's weights is taken.
    """
    if signals is None:
        return ""
    window = subject.replay.window
    loss = window[-1].loss if window else None
    own = math.nan if loss is None or loss.numel() != 1 else float(loss)
    found = rise(signals, subject.model, enough=EVIDENCE, last=(subject.step, own))
    if found is None:
        return ""
    rate = _rate(subject.optimizer)
    return f"{found}" + (f"; the learning rate is {rate:.3g}" if rate else "")


def rise(signals: Signals, model: nn.Module, *, enough: float, last: tuple[int, float] | None = None) -> Rise | None:
    """Return what has run away, None if nothing has; waits for the device; see note [run away].

    Args:
        signals: the history of the run.
        model: whose weights are trained.
        enough: how much evidence to ask for, `EVIDENCE` or `EARLY`.
        last: number and loss of the last step, which was not applied; None: it was.
    """
    history = signals.read()
    rows = zip(history.steps, history.losses, history.gradients, history.applied, strict=True)
    updates = [(step, loss, norm) for step, loss, norm, applied in rows if applied and (last is None or step < last[0])]
    updates += [] if last is None else [(*last, math.nan)]
    for what, place in ((LOSS, 1), (GRADIENTS, 2)):
        found, digits = _risen(what, [(row[0], abs(row[place])) for row in updates if math.isfinite(row[place])])
        if found is not None and digits >= enough:
            _, before, now = signals.growth(model, found.first) or UNKNOWN
            grew = now / before if before else math.inf if now else math.nan
            if grew >= GREW or (math.isnan(grew) and digits >= 2 * enough):
                return replace(found, grew=grew)
    if updates:
        first, before, now = signals.growth(model, updates[max(len(updates) // 2 - 1, 0)][0]) or UNKNOWN
        if before and math.isfinite(now) and now >= BURST * before:
            return Rise(what=WEIGHTS, first=first, last=updates[-1][0], before=before, after=now)
    return None


def _risen(what: str, seen: Sequence[tuple[int, float]]) -> tuple[Rise | None, float]:
    """Return how far the last of `seen`, (step, magnitude), have risen above the older half, and by how many digits."""
    half = len(seen) // 2
    usual = max((value for _, value in seen[:half]), default=0.0)
    first, digits = len(seen), 0.0
    while usual and first > half and seen[first - 1][1] >= FLOORS[what] * usual:
        first -= 1
        digits += math.log10(seen[first][1] / usual)
    if not digits:
        return None, 0.0
    (begin, before), (end, after) = seen[first - 1], seen[-1]
    return Rise(what=what, first=begin, last=end, before=before, after=after), digits


def _rate(optimizer: Optimizer | None) -> float:
    """Return the largest learning rate; 0.0 if there is none."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max((float(group.get("lr", 0.0)) for group in groups), default=0.0)
