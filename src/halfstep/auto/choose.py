"""What policy="auto" chooses: candidates race on the model and the batch of a training step.

Note [candidates]: fp32 (O0), mixed, O2 and pure in the format that the device is fast in, eager; then the best of them
compiled, and if that is faster the second best compiled too. pure is left out where it lowers the same parameters as
O2, and low formats where the device has no units for them. They race (`Elimination`) in complete training steps on the
user's model and batch, which are taken back (`trial`).

Note [compilation]: code is compiled only if its predicted time is at most `BUDGET` seconds and at most what `PAYBACK`
eager steps take: a run of ten times as many, a tenth faster, earns it back. The second is compiled if the first left
enough of the budget. The prediction is `BEGIN` seconds and `PER_NODE` for each autograd node of the loss.

Note [ties]: a candidate replaces one that is preferred to it if it is faster by more than `MARGIN` with confidence: the
upper end of the interval of their paired ratio counts. It is dropped once the lower end shows that it is not. A pair
that the turns of the race leave undecided is decided by the median of their ratios and by the fastest time of each:
the preferred one stays unless both show it to be slower by `CLOSE`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.auto.trial import StepSnapshot, Team, TimedSteps
from halfstep.binding.bind import is_bound
from halfstep.binding.wrappers import unwrap
from halfstep.errors import StepError, first_line
from halfstep.policy.plan import resolve
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import device_types_of, resolved
from halfstep.scale.scaler import GradScaler
from halfstep.timing import Race, Ratio, Unfit
from halfstep.trees import graph_of

FP32, COMPILED = "fp32", " compiled"
POLICIES: Mapping[str, str] = {FP32: "O0", "mixed": "mixed", "O2": "O2", "pure": "pure"}
"""Candidates, the most precise first: it is preferred where others are not faster."""

EAGER_TURNS, FIRST_TURNS, TURNS = 9, 11, 13
"""Turns (`trial.STEPS`) until something is compiled, until a second candidate is, and of all: 40 steps at most."""

BUDGET = 120.0  # seconds of compilation
PAYBACK = 10_000  # steps
BEGIN, PER_NODE = 10.0, 0.1  # seconds
SETTINGS = "clip_norm clip_value accumulate scheduler retry update_in_backward state".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What policy="auto" has chosen; `ratios` and what follows are empty for a choice from a checkpoint."""

    policy: Policy  # as it could be given to TrainStep
    compiled: bool  # whether the step is compiled
    line: str  # what was logged: the choice, and why
    # candidate -> its time over that of fp32, or of the one chosen where fp32 did not run
    ratios: tuple[tuple[str, Ratio], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()  # candidate -> why it could not be chosen
    rounds: int = 0  # of the measurement
    seconds: float = 0.0  # that it took
    calls: int = 0  # how often `loss_fn` was called in it


def choose(step: Any, make: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Choice, Any]:
    """Measure the candidates of `step`, which `make` makes; return the choice, and the compiled loss or None."""
    model, team = unwrap(step.model), Team(step.model if isinstance(step.model, DistributedDataParallel) else None)
    if is_bound(model):
        raise StepError("policy='auto': the model was prepared after this step was built; build the step anew")
    begun, nodes = time.perf_counter(), list[int]()
    snapshot = StepSnapshot(model, step.optimizer)
    settings = {name: getattr(step, name) for name in SETTINGS} | {"blackbox": False, "scheduler": None}
    visits: dict[str, TimedSteps] = {}

    def add(name: str, compile: Any) -> str:
        loss_fn = step.loss_fn if compile is not False else _counting(step.loss_fn, nodes)

        def build(scaler: GradScaler | None) -> Any:
            policy = POLICIES[name.removesuffix(COMPILED)]
            return make(model, step.optimizer, loss_fn, policy=policy, scaler=scaler, compile=compile, **settings)

        visits[name] = TimedSteps(snapshot, build, (batch, named), step)
        return name

    def measure(name: str, number: int) -> float:
        try:
            return visits[name].visit()
        except Unfit:
            raise
        except Exception as error:
            if name == first and visits[name].first is None:
                raise  # loss_fn's own
            raise Unfit(f"{type(error).__name__}: {first_line(error)}") from error

    race = Elimination(partial(team.together, measure))
    wish = step.compile
    every = False if wish is None else wish
    mark = COMPILED if every is not False else ""
    names = [add(name + mark, every) for name in candidates(step)]
    first = names[0]
    race.eliminate(names, EAGER_TURNS if wish is None else TURNS)
    best = eager = race.best()
    if wish is None and best:
        left = [name for name in names if name not in {eager, *race.dropped}]
        others = {name: ratio.median for name in left if (ratio := race.over(name, eager)) is not None}
        spent = 0.0
        trials = zip((eager, *sorted(others, key=others.__getitem__)), (FIRST_TURNS, TURNS), strict=False)
        for name, most in trials:
            if any(team.largest(not pays(nodes, race.typical(eager), spent))):
                break
            pair = [best, add(name + COMPILED, True)]
            race.eliminate(pair if name == eager else sorted(pair, key=[one + COMPILED for one in names].index), most)
            spent += visits[name + COMPILED].first or 0.0
            if race.best() == best:
                break
            best = race.best()
    if not best:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in race.dropped.items())
        raise StepError(f"policy='auto': no candidate can be chosen on this batch. {reasons}")
    calls = sum(timed.calls for timed in visits.values())
    choice = concluded(race, best, device_types_of([model])[0], time.perf_counter() - begun, calls)
    return choice, visits[best].compiled if team.ddp is None else None  # its code is for a model without a wrapper


def candidates(step: Any) -> list[str]:
    """Return the names of candidates that differ for the model of `step`, the most precise first."""
    model = unwrap(step.model)
    device = device_types_of([model])[0]
    if resolved(Policy.of("mixed"), device).dtype == FP32:
        return [FP32]
    plans = (resolve(Policy.of(name), model, device) for name in ("O2", "pure"))
    low, pure = ([parameter.low for parameter in plan.parameters] for plan in plans)
    return [name for name in POLICIES if name != "pure" or low != pure]


def pays(nodes: list[int], seconds: float, spent: float) -> bool:
    """Return whether to compile a candidate after `spent` seconds of compilation, see note [compilation]."""
    predicted = max(spent, BEGIN + PER_NODE * sum(nodes))
    return predicted <= min(BUDGET - spent, PAYBACK * seconds)


def _counting(loss_fn: Callable[..., Any], nodes: list[int]) -> Callable[..., Any]:
    """Return `loss_fn`; its first call notes how many autograd nodes the loss has."""

    def counted(*args: Any, **named: Any) -> Any:
        returned = loss_fn(*args, **named)
        if not nodes:
            loss = returned[0] if isinstance(returned, tuple) else returned
            differentiable = isinstance(loss, Tensor) and loss.requires_grad
            nodes.append(len(list(graph_of(loss))) if differentiable else 0)
        return returned

    return counted


def described(policy: Policy, device: str, compiled: bool) -> str:
    """Return a policy in words, with the format that it has on this device."""
    dtype = resolved(policy, device).dtype
    name = FP32 if policy == Policy.of(POLICIES[FP32]) else f"{policy.name} in {dtype}"
    return f"{name}, compiled" if compiled else name


def _interval(ratio: Ratio) -> str:
    """Return the interval of a ratio, its ends rounded outwards; "" for that of one round, which has none."""
    low, high = math.floor(100 * ratio.low) / 100, math.ceil(100 * ratio.high) / 100
    return f"{low:.2f} to {high:.2f}" if ratio.low < ratio.high else ""


def _beside(name: str, ratio: Ratio, chosen: Ratio) -> str:
    # the interval alone where the median says that it is faster, which did not decide: note [ties]
    if round(ratio.median, 2) >= round(chosen.median, 2):
        return f"{name} {ratio.median:.2f}"
    return f"{name} not certain ({_interval(ratio) or 'one round'})"


def concluded(race: Elimination, best: str, device: str, seconds: float, calls: int) -> Choice:
    """Return the choice of candidate `best` in a race that is over, with the ratios behind it."""
    timed = [name for name in race.times if name not in race.dropped]
    base = timed[0] if timed[0].removesuffix(COMPILED) == FP32 else best
    own = race.over(best, base)
    assert own is not None
    # by way of the choice, in the rounds that both were in: medians of other rounds may contradict the choice
    ratios = {name: own.times(ratio) for name in timed if (ratio := race.over(name, best)) is not None}
    ratios |= {base: Ratio(median=1.0, low=1.0, high=1.0, rounds=own.rounds), best: own}
    policy, compiled = Policy.of(POLICIES[best.removesuffix(COMPILED)]), best.endswith(COMPILED)
    interval = f" ({found})" if (found := _interval(own)) else ""
    of_base = "" if best == base else f"{own.median:.2f} of {base}{interval}, "
    parts = [
        f"auto: {described(policy, device, compiled)}: {of_base}{1e3 * race.typical(best):.3g} ms a step, "
        f"{race.rounds} rounds, {calls} calls of loss_fn, {seconds:.1f} s",
        ", ".join(_beside(name, ratios[name], own) for name in timed if name in ratios and name not in {best, base}),
        *(f"{name} cannot be chosen: {reason}" for name, reason in race.dropped.items()),
    ]
    line, dropped = "; ".join(part for part in parts if part), tuple(race.dropped.items())
    return Choice(
        policy=policy, compiled=compiled, line=line, ratios=tuple(ratios.items()), dropped=dropped, rounds=race.rounds,
        seconds=seconds, calls=calls,
    )  # fmt: skip


# ------------------------------------------------------------------ the race

MARGIN = 0.01  # a smaller gain does not pay for less precise numbers, or for code that is compiled again
CLOSE = 0.03  # a larger gain does, if it is only likely
CLEAR = {1: 4.0, 2: 0.5, 3: 0.2, 4: 0.1}
"""Rounds -> how far all ratios must lie beyond the margin: one time may be disturbed by anything. With five rounds the
interval is the range of the ratios, and those of equal candidates lie on one side of 1 in one case of 16."""

FINAL = 2  # candidates that are left to race on; of more, each round drops one at least


class Elimination(Race):
    """A race with preferences, all of whose rounds are timed."""

    def __init__(self, measure: Callable[[str, int], float]) -> None:
        super().__init__(measure)
        self.names: list[str] = []  # the candidates that are left, in the order of preference
        self.rounds = self.turns = 0  # a turn is that of one candidate in one round

    def eliminate(self, names: Sequence[str], most: int) -> None:
        """Race a round or more until one, the preferred first, is left, or another would pass `most` turns in all."""
        self.names, least = [name for name in names if name not in self.dropped], self.rounds + 1
        while self.rounds < least or len(self.names) > 1:
            if self.rounds >= least and self.turns + len(self.names) > most:
                return
            self.turns += len(self.names)
            self.round(self.names, self.rounds)
            self.names = [name for name in self.names if name not in self.dropped]
            self.rounds += 1
            self._drop_slower()

    def order(self, names: list[str], number: int) -> list[str]:
        """Return each candidate in each place in turn, the preferred one first in the first round."""
        shift = number % max(1, len(names))
        return [*names[shift:], *names[:shift]]

    def faster(self, name: str, preferred: str) -> bool | None:
        """Return whether `name` replaces `preferred`, see note [ties]; None if that is not known."""
        if (ratio := self.ratio(name, preferred)) is None:
            return None
        clear = 1.0 + CLEAR.get(ratio.rounds, 0.0)
        if ratio.high < (1.0 - MARGIN) / clear:
            return True
        return False if ratio.low > (1.0 - MARGIN) * clear else None

    def over(self, name: str, base: str, seen: tuple[str, ...] = ()) -> Ratio | None:
        """Return the ratio of two candidates' steps, by way of others if they shared no round; None: there is none."""
        if (direct := self.ratio(name, base)) is not None:
            return direct
        for other in (one for one in self.times if one not in {name, base, *seen}):
            one, rest = self.ratio(name, other), self.over(other, base, (*seen, name))
            if one is not None and rest is not None:
                return one.times(rest)
        return None

    def best(self) -> str:
        """Return the candidate that replaces all that are preferred to it; "" if none is left."""
        best = ""
        for name in self.names:
            if not best or self._replaces(name, best):
                best = name
        return best

    def _replaces(self, name: str, preferred: str) -> bool:
        faster, ratio = self.faster(name, preferred), self.ratio(name, preferred)
        if faster is not None or ratio is None:
            return bool(faster)
        fastest = min(self.times[name].values()) / min(self.times[preferred].values())
        return max(ratio.median, fastest) < 1.0 - CLOSE

    def _drop_slower(self) -> None:
        """Drop candidates that another one replaces, or that do not replace one that is preferred; see `FINAL`."""
        slower = set()
        for place, preferred in enumerate(self.names):
            for name in self.names[place + 1 :]:
                if (faster := self.faster(name, preferred)) is not None:
                    slower.add(preferred if faster else name)
        if not slower and len(self.names) > FINAL:
            slower = {max(reversed(self.names), key=self.typical)}
        if len(slower) < len(self.names):  # else ratios of different rounds contradict one another
            self.names = [name for name in self.names if name not in slower]
