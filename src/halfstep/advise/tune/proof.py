"""Proof: does a policy train as fp32 does? Short trainings of both from the same starts, and a test of equivalence.

The order of the trainings keeps the test valid: fp32 is trained first, and fixes the margin before the candidate has a
result. Two one-sided tests (`tasks.measure.difference`) are made twice at most, and both looks share the 5 % of a test:
spending of alpha (Lan and DeMets 1983), summed by Bonferroni, so that it holds however the looks depend on one another.
The first, after `FIRST` pairs, spends `EARLY`: it ends the proof where pairs lie much closer together than the margin
is wide. Else the spread of `ENOUGH_SEEDS` pairs alone, not their mean, tells how many there will be; the second look,
at all of them, spends the rest. "worse" may be found with fewer, since ending there lets no policy pass.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.report import counted
from halfstep.tasks import Task
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.tasks.compare import evaluated, started, thinned
from halfstep.tasks.loops import Loop, Training, make_loop
from halfstep.tasks.machine import generators_kept
from halfstep.tasks.measure import ENOUGH_SEEDS, WITHIN, Difference, difference, finite_mean, student_quantile

POWER = 0.8  # chance with which the planned seeds show a policy to be equivalent that is exactly as good as fp32
LEVEL = 0.05  # of each of the two one-sided tests that `difference` makes, both looks together
FIRST, EARLY = 3, 0.005  # pairs at the first look, and its share of the level
GAIN = 4.0  # margins that fp32 must gain in a training: with less, a policy that learns nothing could pass
BASELINE = Candidate(label=FP32, dtype="fp32")
MOST_SEEDS = 1000  # more are never named: the policy lies at the margin, or the margin is too small for this task
LAST = 10  # the last tenth of the steps is the end of a training, the first tenth its start, where the loss is compared

PATIENCE = 20  # steps in a row without a finite loss that end a training: a loss scale recovers within them
FAILURES = (RuntimeError, ValueError, NotImplementedError, MemoryError)  # what a candidate may raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training, finished or given up."""

    policy: str  # TOML of the policy; "" for fp32
    compile: bool  # whether the loss function was compiled
    measure: str  # what `value` is, "metric" or "loss"
    steps: int  # that it was to have
    seed: int  # of weights, batches and random numbers
    start: float  # the metric before training (of fp32 only, else nan), or the mean loss over the first steps
    value: float  # the metric after training, or the mean training loss over the last steps; nan if not finite
    losses: tuple[float, ...]  # training loss, at most 200 points
    skipped: int  # steps that were not applied
    seconds: float  # that it took
    stopped: str = ""  # why it ended early, "" if it did not
    first_loss: float = math.nan  # mean training loss over the first tenth of the steps
    last_loss: float = math.nan  # over the last tenth; nan if not finite

    @property
    def key(self) -> tuple[object, ...]:
        """What a run is identified by."""
        return self.policy, self.compile, self.measure, self.steps, self.seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What short trainings of a policy and of fp32 show.

    Attributes:
        verdict: "equivalent" (the interval of the difference lies inside the margin), "better" or "worse" (outside it),
            "diverged" (not finite, or an error) or "undecided".
    """

    verdict: str
    reason: str  # the verdict in one sentence, with its numbers; of an undecided one what is missing
    measure: str  # what is compared, with its unit
    higher_is_better: bool  # whether a larger value is a better one
    margin: float  # largest difference that counts as none, in the unit of `measure`; nan before it was fixed
    margin_from: str  # where it is from, in words
    difference: Difference | None  # of the candidate from fp32, paired by seed; None without a pair
    fp32: tuple[float, ...]  # fp32's values, one a seed
    values: tuple[float, ...]  # the candidate's, with the same seeds in the same order; fewer if time was short
    seeds_more: int  # how many more seeds a verdict needs; 0 if there is one, -1 if more seeds cannot give one
    seconds_more: float  # about how long these would take; nan if unknown
    steps: int  # of a training
    loss_steps: tuple[float, ...]  # where the points of the curves lie
    fp32_losses: tuple[float, ...]  # training loss, the mean over the seeds that the candidate has, or over all
    losses: tuple[float, ...]  # that of the candidate; () without a run
    skipped: tuple[int, ...]  # steps of the candidate that were not applied, one number a seed

    @property
    def holds(self) -> bool:
        """Whether the policy was shown to be no worse than fp32."""
        return self.verdict in {"equivalent", "better"}


def seeds_needed(spread: float, margin: float, mean: float = 0.0, *, level: float = LEVEL) -> int:
    """Return how many pairs of runs decide with a chance of `POWER`, from `ENOUGH_SEEDS` to `MOST_SEEDS`.

    `spread` is the standard deviation of the difference of a pair, and `mean` the true difference: what has to be shown
    is on which side of the margin it lies, at `level`.
    """
    room = abs(margin - abs(mean))
    if not room > 0.0:
        return MOST_SEEDS
    beyond = statistics.NormalDist().inv_cdf(0.5 + POWER / 2)
    normal = statistics.NormalDist().inv_cdf(1.0 - level) + beyond  # Student's quantile is larger
    count = max(ENOUGH_SEEDS, math.floor(min((normal * spread / room) ** 2, MOST_SEEDS)))
    while count < MOST_SEEDS and (student_quantile(1.0 - level, count - 1) + beyond) * spread > room * math.sqrt(count):
        count += 1
    return count


def prove(task: Task, candidate: Candidate, *, seeds: int = 0, **options: Any) -> Proof:
    """Train `candidate` and fp32 from the same starts and test whether they end alike.

    What is compared, and its margin: the task's metric within the task's margin, if it has one and `max_loss_rise` is
    None; else the mean training loss over the last tenth of the steps, within `max_loss_rise` of fp32's, or within the
    standard deviation that fp32's own has from seed to seed.

    Equal arguments give equal results, whatever was interrupted in between, if the task is repeatable and the time
    suffices: `runs` are what earlier calls handed to `on_run`, and no training is begun that would not end in time.
    At least `seeds` pairs are trained and looked at once; 0: as many as the spread of the pairs asks for. More seeds
    after an undecided result are a second test: the two together pass a policy at the margin with up to 10 % instead of
    5 %. `options` as `_Pairs` takes them.
    """
    pairs = _Pairs(task, candidate, **options)
    fp32 = pairs.reference
    fewest = FIRST if pairs.by_metric or pairs.bound is not None else ENOUGH_SEEDS  # their spread is the margin
    while len(fp32) < fewest and pairs.add_to(fp32, BASELINE):
        if not math.isfinite(fp32[-1].value):
            why = fp32[-1].stopped or "the end of the training"
            return pairs.undecided(f"fp32 itself does not end with a finite {pairs.measure}: {why}", -1)
    if len(fp32) < fewest:
        return pairs.undecided(f"the time was up after {counted(len(fp32), 'training')} of fp32", ENOUGH_SEEDS)
    pairs.fix_margin(fewest)
    if flaw := pairs.flaw():
        return pairs.undecided(flaw, -1)
    pairs.planned = max(ENOUGH_SEEDS, seeds)
    while len(pairs.own) < pairs.planned and pairs.add():
        if not math.isfinite(pairs.own[-1].value):
            break
        if len(pairs.own) == FIRST and not seeds and pairs.spread() > 0.0:  # equal ones tell nothing about chance
            pairs.level = EARLY
            if pairs.difference().verdict != "undecided":
                pairs.planned = FIRST
                break
            pairs.level = LEVEL - EARLY
        if len(pairs.own) == ENOUGH_SEEDS:
            pairs.planned = max(pairs.planned, seeds_needed(pairs.spread(), pairs.margin, level=pairs.level))
            missing = pairs.seconds(pairs.planned - ENOUGH_SEEDS)
            if pairs.difference().verdict == "worse" or (missing and missing > pairs.end - pairs.clock()):
                break
    return pairs.result()


def trainings(task: Task, candidate: Candidate, count: int, **options: Any) -> list[Run]:
    """Return trainings with the first `count` seeds, fewer if the time is short; `options` as `_Pairs` takes them."""
    pairs = _Pairs(task, candidate, **options)
    while len(pairs.own) < count and pairs.add_to(pairs.own, candidate):
        pass
    return pairs.own


class _Pairs:
    """The trainings of a proof so far, pairs with the same seed; what was trained before is taken as it was."""

    def __init__(
        self, task: Task, candidate: Candidate, *, device: str = "cpu", steps: int = 0,
        max_loss_rise: float | None = None, seed: int = 0, seconds: float = math.inf, runs: Sequence[Run] = (),
        on_run: Callable[[Run], None] = lambda run: None, clock: Callable[[], float] = time.monotonic,
        on_loop: Callable[[Loop], None] = lambda loop: None,
    ) -> None:  # fmt: skip
        self.task, self.candidate, self.device, self.seed = task, candidate, device, seed
        self.steps = steps or task.excerpt_steps
        self.clock, self.end, self.on_run = clock, clock() + seconds, on_run
        self.on_loop = on_loop  # given the loop of a training with the first seed, at its end
        self.bound, self.by_metric = max_loss_rise, task.metric is not None and max_loss_rise is None
        self.higher = self.by_metric and task.higher_is_better
        self.measure = task.metric_name if self.by_metric else "training loss"
        self.kind = "metric" if self.by_metric else "loss"
        self.reference: list[Run] = []
        self.own: list[Run] = []
        self.margin, self.margin_from = math.nan, ""
        self.planned, self.level = ENOUGH_SEEDS, LEVEL  # of the last look
        self._known = {run.key: run for run in runs}
        self._policies = {BASELINE: "", candidate: "" if candidate.policy is None else candidate.policy.to_toml()}

    def fix_margin(self, count: int) -> None:
        values = [r.value for r in self.reference[:count]]
        if self.by_metric:
            self.margin, self.margin_from = self.task.margin_around(statistics.fmean(values)), "the task's own margin"
        elif self.bound is not None:
            self.margin = self.bound * abs(statistics.fmean(values))
            self.margin_from = f"max_loss_rise: {self.bound:g} of fp32's {self.measure} over the last steps"
        else:
            self.margin = statistics.stdev(values)
            self.margin_from = f"the standard deviation of fp32's own {self.measure} over {len(values)} seeds"

    def flaw(self) -> str:
        """Return why fp32's runs cannot be a reference, "" if they can."""
        gain = statistics.fmean((r.value - r.start) * (1 if self.higher else -1) for r in self.reference)
        if not self.margin > 0.0:
            return "fp32 ends alike with every seed, so that its spread gives no margin; give max_loss_rise"
        if not gain >= GAIN * self.margin:
            return (
                f"fp32 gains {gain:.3g} in {counted(self.steps, 'step')} and the margin is {self.margin:.3g}: a "
                f"policy that learns nothing could pass for equivalent; train longer (steps) or give a narrower margin"
            )
        return ""

    def add(self) -> bool:
        ready = len(self.own) < len(self.reference) or self.add_to(self.reference, BASELINE)
        return ready and self.add_to(self.own, self.candidate)

    def add_to(self, runs: list[Run], candidate: Candidate) -> bool:
        key = self._key(candidate, self.seed + len(runs))
        if key not in self._known:
            alike = [run.seconds for run in self._known.values() if run.key[:-1] == key[:-1]]
            if max(alike, default=0.0) >= self.end - self.clock():
                return False
            with generators_kept():
                run = self._known[key] = self._train(candidate, self.seed + len(runs))
            self.on_run(run)
        runs.append(self._known[key])
        return True

    def _key(self, candidate: Candidate, seed: int) -> tuple[object, ...]:
        return self._policies[candidate], candidate.compile, self.kind, self.steps, seed

    def _train(self, candidate: Candidate, seed: int) -> Run:
        begun, window = self.clock(), max(1, self.steps // LAST)
        start = value = math.nan
        losses: list[float] = []
        skipped, stopped = 0, ""
        try:
            loop = make_loop(candidate, self.task, started(self.task, seed, self.device), self.steps)
            if self.by_metric and candidate.policy is None:
                start = evaluated(self.task, loop, seed)
            training = Training(self.task, {FP32: loop}, device=self.device, seed=seed)
            while len(losses) < self.steps and not stopped:
                training.step(FP32, len(losses))
                losses.append(float(loop.loss))
                if len(losses) >= PATIENCE and not any(map(math.isfinite, losses[-PATIENCE:])):
                    stopped = f"the loss of the {PATIENCE} steps up to step {len(losses)} is not finite"
            skipped = len(loop.skipped())
            if not stopped:
                value = evaluated(self.task, loop, seed) if self.by_metric else finite_mean(losses[-window:])
                if seed == self.seed:
                    self.on_loop(loop)
        except FAILURES as error:
            if candidate.policy is None:
                raise
            stopped = error_line(error)
        missing = [math.nan] * (self.steps - len(losses))  # every curve has the same points
        return Run(
            policy=self._policies[candidate], compile=candidate.compile, measure=self.kind, steps=self.steps,
            seed=seed, start=start if self.by_metric else finite_mean(losses[:window]), value=value,
            first_loss=finite_mean(losses[:window]), last_loss=math.nan if stopped else finite_mean(losses[-window:]),
            losses=thinned([*losses, *missing]), skipped=skipped, seconds=self.clock() - begun, stopped=stopped,
        )  # fmt: skip

    def difference(self) -> Difference:
        values = [r.value for r in self.own]
        fp32 = [r.value for r in self.reference[: len(values)]]
        return difference(values, fp32, self.margin, higher=self.higher, confidence=1.0 - 2.0 * self.level)

    def spread(self) -> float:
        return statistics.stdev(a.value - b.value for a, b in zip(self.own, self.reference, strict=False))

    def seconds(self, more: int) -> float:
        """Return about how long so many more pairs take, without the trainings that are there already."""
        fp32 = max((r.seconds for r in self.reference), default=math.nan)
        own = max((r.seconds for r in self.own), default=fp32)
        seeds = range(self.seed + len(self.own), self.seed + len(self.own) + more)
        sides = ((BASELINE, fp32), (self.candidate, own))
        return sum(cost for seed in seeds for side, cost in sides if self._key(side, seed) not in self._known)

    def undecided(self, why: str, more: int, found: Difference | None = None) -> Proof:
        if more > 0:
            count = f"more than {more} more seeds" if more >= MOST_SEEDS - len(self.own) else counted(more, "more seed")
            why += f"; a verdict needs {count}"
        return self._proof("undecided", why, more, found)

    def result(self) -> Proof:
        missing = self.planned - len(self.own)
        if not self.own:
            return self.undecided("the time was up before the policy was trained", missing)
        found = self.difference()
        if found.verdict == "diverged":
            last = self.own[-1]
            why = last.stopped or f"its {self.measure} is not finite"
            return self._proof("diverged", f"{why} (seed {last.seed})", 0, found)
        if found.low is None or found.high is None:
            return self.undecided("the time was up after one pair of trainings", missing, found)
        numbers = (
            f"{self.measure} minus fp32's: {found.mean:+.3g}, {100.0 - 200.0 * self.level:.3g} % interval "
            f"[{found.low:+.3g}, {found.high:+.3g}], margin {self.margin:.3g}, {counted(len(self.own), 'seed')}"
        )
        if found.verdict == "worse" and found.enough:
            return self._proof("worse", numbers, 0, found)
        if missing > 0:
            return self.undecided(numbers, missing, found)
        if found.verdict == "undecided":
            needed = seeds_needed(self.spread(), self.margin, found.mean, level=self.level)
            return self.undecided(numbers, max(1, needed - len(self.own)), found)
        return self._proof("equivalent" if found.verdict == WITHIN else found.verdict, numbers, 0, found)

    def _proof(self, verdict: str, reason: str, more: int, found: Difference | None) -> Proof:
        pairs = self.reference[: len(self.own) or None]
        return Proof(
            verdict=verdict, reason=reason, measure=self.measure, higher_is_better=self.higher, margin=self.margin,
            margin_from=self.margin_from, difference=found, fp32=tuple(r.value for r in self.reference),
            values=tuple(r.value for r in self.own), seeds_more=more, seconds_more=self.seconds(more) if more else 0.0,
            steps=self.steps, loss_steps=thinned(range(1, self.steps + 1)), fp32_losses=_curve(pairs),
            losses=_curve(self.own), skipped=tuple(r.skipped for r in self.own),
        )  # fmt: skip


def _curve(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(finite_mean(points) for points in zip(*(r.losses for r in runs), strict=True))


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
