"""Rise: whether training is running away, from losses, gradients and weights of a run.

The black box asks for less evidence (`BAD`) than `Monitor` (`EARLY`), which sees runs that go on.

Note [run away]: on data of one kind a loss can rise only because updates have moved the weights. So two things are
asked for: the loss, or the norm of the gradients, is far above earlier ones and has stayed there, and the weights have
grown meanwhile. A bad batch raises the loss of its own step, whose weights are as before. A spike at the beginning of
training, or after a restart of the schedule, comes back; a loss that is large by nature was so before; that of a GAN,
or of a policy whose first reward has come, rises while the weights stay nearly as large as they were.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch.optim import Optimizer

LOSS, GRADIENTS, WEIGHTS = "loss", "gradients", "weights"
FLOORS = {LOSS: 30.0, GRADIENTS: 300.0}
"""So many times the largest earlier value is no fluctuation: losses of healthy runs vary by 10 at most, norms of
gradients by 100 from batch to batch."""

OUTLIER = 30.0  # times that the largest value of a batch is above those of the batches that were sampled before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """How much evidence to ask for.

    From update n to update 2n healthy weights grow by 2 at most at the beginning of training. From zero, while the
    learning rate warms up, they may grow as fast as any, and are 0.02 to 0.3 once they are trained.
    """

    digits: float  # decimal digits that values rose by, added up over the steps in a row above the floor
    grew: float  # times that the weights grew meanwhile
    burst: float  # the same where weights are the only evidence: no loss was finite after the update that was too large
    large: float  # how large the weights are then at least


BAD = Demand(digits=3.0, grew=2.0, burst=10.0, large=0.1)
"""Of a step that was not finite: one loss of 1,000 times the earlier ones, or two of 32 times."""

EARLY = Demand(digits=6.0, grew=5.0, burst=30.0, large=1.0)  # of training that is finite and may come back

Growth: TypeAlias = Callable[[int], "tuple[int, float, float] | None"]
"""The number of a step -> the last step until it at which the size of the weights is known, the size then, and now: the
root mean square, or the largest one."""

UNKNOWN = (0, math.nan, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A quantity that has run away."""

    what: str  # `LOSS`; `GRADIENTS`, their norm or the largest of them; `WEIGHTS`, their size
    first: int  # the last step before it rose
    last: int  # the last step that it is known of
    before: float  # its value at `first`
    after: float  # its value at `last`
    grew: float = math.nan  # times that the weights grew since `first`; inf: from zero, or to inf; nan: not known

    def __str__(self) -> str:
        """Return it as a clause with its numbers."""
        times = f" {self.after / self.before:.2g} times" if self.before else ""
        if self.what == WEIGHTS:  # known before a step, and now
            return f"the {self.what} rose{times} since step {self.first}, {self.before:.3g} to {self.after:.3g}"
        steps = f"{self.last - self.first} step{'s' * (self.last - self.first > 1)}"
        numbers = f"from {self.before:.3g} at step {self.first} to {self.after:.3g} at step {self.last}"
        grew = f"; the weights grew {self.grew:.2g} times" if math.isfinite(self.grew) else ""
        return f"the {self.what} rose{times} in {steps}, {numbers}{grew}"


def rise(rows: Sequence[tuple[int, float, float]], growth: Growth, demand: Demand) -> Rise | None:
    """Return what has run away, None if nothing has; see note [run away].

    Args:
        rows: (step, loss, norm of the gradients) of the updates that were applied, nan where one is not known, the
            oldest first; the last may be a step that was not applied.
        growth: of the weights.
        demand: how much evidence to ask for.
    """
    for what, place in ((LOSS, 1), (GRADIENTS, 2)):
        found, digits = _risen(what, [(row[0], abs(row[place])) for row in rows if math.isfinite(row[place])])
        if found is not None and digits >= demand.digits:
            _, before, now = growth(found.first) or UNKNOWN
            grew = now / before if before else math.inf if now else math.nan
            if grew >= demand.grew or (math.isnan(grew) and digits >= 2 * demand.digits):
                return replace(found, grew=grew)
    if rows:
        first, before, now = growth(rows[max(len(rows) // 2 - 1, 0)][0]) or UNKNOWN
        if before and math.isfinite(now) and now >= max(demand.burst * before, demand.large):
            return Rise(what=WEIGHTS, first=first, last=rows[-1][0], before=before, after=now)
    return None


def _risen(what: str, seen: Sequence[tuple[int, float]]) -> tuple[Rise | None, float]:
    """Return how far the last of `seen`, (step, magnitude), have risen above the first, and by how many digits in all.

    The first are as many as lead to the most digits: 1, 2, 4 and so on, up to half of them.
    """
    found, most, size = None, 0.0, 1
    while size <= len(seen) // 2:
        usual, begin, digits = max(value for _, value in seen[:size]), len(seen), 0.0
        while usual and begin > size and seen[begin - 1][1] >= FLOORS[what] * usual:
            begin -= 1
            digits += math.log10(seen[begin][1] / usual)
        if digits > most:
            (first, before), (last, after) = [pair for pair in seen[:begin] if pair[1] <= usual][-1], seen[-1]
            found, most = Rise(what=what, first=first, last=last, before=before, after=after), digits
        size *= 2
    return found, most


def outlier(inputs: Sequence[tuple[int, tuple[float, ...]]], found: Rise, step: int) -> str:
    """Return in words which value of a batch was an outlier, of an update in a rise before `step`; "" if none was.

    `inputs`: (step, largest magnitude of each floating tensor of its batch), the oldest first.
    """
    for number, largest in inputs:
        earlier = [values for other, values in inputs if other < number and len(values) == len(largest)]
        if not earlier or not found.first <= number < step:
            continue
        for place, value in enumerate(largest):
            usual = max((values[place] for values in earlier if math.isfinite(values[place])), default=0.0)
            if value > OUTLIER * usual > 0.0:
                times = f"{value / usual:.2g} times the largest one sampled before"
                return f"floating tensor {place} of the batch of step {number} holds {value:.3g}, {times}"
    return ""


def learning_rate(optimizer: Optimizer | None) -> float:
    """Return the largest learning rate; 0.0 if there is none."""
    groups = [] if optimizer is None else optimizer.param_groups
    return max((float(group.get("lr", 0.0)) for group in groups), default=0.0)
