"""Lab: everything that a search measures, on this machine, within its time: races, audits, counted bytes.

Each measurement has a key that says what was measured, and is kept in the journal: a JSON file, so that an interrupted
search goes on where it was. A search is a function of what it measures: run again, it asks for the same measurements in
the same order. Floats that JSON lacks are written as Python's json does: NaN, Infinity.

Note [race]: candidates and fp32 train in turns from the same weights on the same batches; each step is timed. A round
is one step of every candidate still in the race (`Training`). fp32 runs twice: what the two differ by cannot be
resolved here. Changes of one candidate are compared with it alone. A candidate that raises, runs out of memory, or is
clearly slower than the race is for leaves it, and the others go on; where one is to be picked, those that are clearly
slower than the first leave too, with their times. A loss is judged by a candidate's first training of the proof.
"""

import copy
import dataclasses
import gc
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, calibration_of, gradient_error, gradients
from halfstep.advise.tune.proof import BASELINE, FIRST, Proof, Run, error_line, prove, trainings
from halfstep.advise.tune.result import TuneError, Tuning
from halfstep.arguments import number
from halfstep.errors import TaskError
from halfstep.report import plain
from halfstep.schema import Each, read_json
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.tasks.compare import probed, started
from halfstep.tasks.loops import Loop, TorchLoop, Training, make_loop
from halfstep.tasks.machine import machine
from halfstep.tasks.measure import student_quantile
from halfstep.tasks.task import Task
from halfstep.timing import WARM_UP, Ratio, Unfit
from halfstep.trees import tensors

T = TypeVar("T")
TWIN = Candidate(label="fp32 again", dtype="fp32")
LOOKS = 25  # timed rounds that show what a candidate costs
LOOK = 5  # timed rounds before a candidate may leave, and between two looks
KNOWN = "its time is known"  # why one leaves that another one has beaten


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """What one candidate did in a race; plain values."""

    time: Ratio | None = None  # its step time over fp32's in the same rounds; None if no round was timed
    beside: Ratio | None = None  # its step time over that of the race's base in the same rounds
    milliseconds: float = math.nan  # median time of a step
    dropped: bool = False  # whether it left because it was clearly slower
    failed: str = ""  # the error that it left with, "" for none


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceResult:
    """The laps of a race by label; plain values."""

    laps: Mapping[str, Lap]
    control: Ratio | None  # fp32 over fp32; None if no round of it was timed
    repeatable: bool  # whether the two had the same loss in every step
    finished: bool  # whether nothing was left to race; not where the clock ended it


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """fp32's short trainings, one a seed."""

    start: tuple[float, ...]  # mean training loss over the first steps, one a seed
    end: tuple[float, ...]  # over the last steps

    @property
    def noise(self) -> float:
        """Standard deviation of the end from seed to seed, as a fraction of its mean."""
        mean = abs(statistics.fmean(self.end))
        return statistics.stdev(self.end) / mean if mean else math.inf

    @property
    def finite(self) -> bool:
        """Whether all losses are."""
        return all(map(math.isfinite, (*self.start, *self.end)))

    def flaw(self, bound: float | None) -> str:
        """Return why no loss can be compared with these, "" if it can.

        The loss has to fall by a one-sided t test at the 5 % level, and by more than the bound lets it rise: else a
        policy that learns nothing could pass.
        """
        if not self.finite:
            return (
                "the loss of fp32 is not finite; no precision helps: lower the learning rate, or look at the data "
                "(hs.TrainStep(...).explain() names the operator)"
            )
        falls = [a - b for a, b in zip(self.start, self.end, strict=True)]
        mean, error = statistics.fmean(falls), statistics.stdev(falls) / math.sqrt(len(falls))
        shown = ", ".join(f"{a:.4g} -> {b:.4g}" for a, b in zip(self.start, self.end, strict=True))
        if not mean > student_quantile(0.95, len(falls) - 1) * error:
            return (
                f"the loss does not fall in fp32 ({shown}, one a seed), so that no policy can be judged by it; train "
                "longer (excerpt_steps), raise the learning rate, or look at the task"
            )
        allowed = (self.noise if bound is None else bound) * abs(statistics.fmean(self.end))
        if not mean > allowed:
            return (
                f"the loss falls by {mean:.3g} in fp32 ({shown}, one a seed), and a rise by {allowed:.3g} would be "
                "allowed, so that a policy that learns nothing could pass; train longer (excerpt_steps), or give a "
                "smaller max_loss_rise"
            )
        return ""


class _Race(Training):
    def step(self, label: str, number: int) -> float:
        with failing(label):
            return super().step(label, number)

    def leave(self) -> None:
        if gone := self.loops.keys() & self.dropped.keys():
            for label in gone:
                del self.loops[label]
            gc.collect()
            if self.device != "cpu":
                torch.accelerator.empty_cache()


@contextmanager
def failing(label: str) -> Iterator[None]:
    """What a candidate raises in the block makes it `Unfit`, unless it is fp32."""
    try:
        yield
    except Exception as error:  # of the user's model, of torch, or no memory
        if label in {BASELINE.label, TWIN.label}:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            what = "the task does not train in fp32, with which everything is compared"
            raise TuneError(f"{what}: {error_line(error)}") from error
        raise Unfit(error_line(error)) from error


def race(
    task: Task, candidates: Sequence[Candidate], *, device: str, seed: int, rounds: int = LOOKS, base: str = FP32,
    limit: float = math.inf, pick: bool = False, alone: bool = False, deadline: float = math.inf,
    clock: Callable[[], float] = time.perf_counter, on_round: Callable[[int], None] = lambda done: None,
) -> RaceResult:  # fmt: skip
    """Race `candidates` over `rounds` timed rounds, beside fp32 and its twin unless `alone`.

    A candidate leaves when its step time is, for certain, more than `limit` times that of the candidate called `base`,
    and under `pick` when the fastest beats it by more than fp32 differs from its twin; once that one is alone, `LOOKS`
    rounds are enough. No round begins after `deadline`, a value of `clock`; `on_round` is given the number of rounds.
    """
    model = started(task, seed, device)
    running = _Race(task, {}, device=device, seed=seed, clock=clock)
    everyone = (*(() if alone else (BASELINE, TWIN)), *candidates)
    labels, steps = [candidate.label for candidate in everyone], WARM_UP + rounds
    for candidate in everyone:
        running.losses[candidate.label] = []
        try:
            with failing(candidate.label):
                running.loops[candidate.label] = make_loop(candidate, task, copy.deepcopy(model), steps)
        except Unfit as reason:
            running.dropped[candidate.label] = str(reason)
    del model

    def slower(label: str, than: str, times: float) -> bool:
        ratio = running.ratio(label, than)
        return ratio is not None and ratio.low > times

    others = {candidate.label for candidate in candidates} - {base}
    done, over = 0, False
    while done < steps and not over and clock() < deadline:
        running.round(labels, done, timed=done >= WARM_UP)
        done += 1
        if done > WARM_UP and (done - WARM_UP) % LOOK == 0:
            there = sorted(others - running.dropped.keys())
            first = min(there, key=running.typical, default=base)
            control = running.ratio(TWIN.label, FP32) if pick else None
            for label in there:
                if control and label != first and slower(label, first, 1.0 + control.resolution):
                    running.dropped[label] = KNOWN
                if base not in running.dropped and slower(label, base, limit):
                    running.dropped[label] = ""
        running.leave()
        on_round(done)
        over = bool(others) and len(others - running.dropped.keys()) <= pick and (alone or done >= WARM_UP + LOOKS)
    laps = {label: _lap(running, label, base) for label in labels if label != TWIN.label}
    alike = alone or repr(running.floats(FP32)) == repr(running.floats(TWIN.label))
    return RaceResult(
        laps=laps, control=running.ratio(TWIN.label, FP32), repeatable=alike, finished=over or done == steps
    )


def _lap(running: Training, label: str, base: str) -> Lap:
    why = running.dropped.get(label, KNOWN)
    return Lap(
        time=running.ratio(label, FP32), beside=running.ratio(label, base),
        milliseconds=1e3 * running.typical(label), dropped=why == "", failed="" if why == KNOWN else why,
    )  # fmt: skip


SEEDS = FIRST  # trainings of fp32 that show whether its loss falls, and how far apart it ends by chance
FEWEST = 20  # steps of a short training; with fewer, neither a time nor a loss says much

SHARE = 20  # short trainings that a search takes, roughly: 3 of the reference, 8 more of a proof, and races
AUDITED = 2  # steps of an audit, on weights that fp32 has trained
VERSION = 5  # of the journal
MOST_BYTES = 1 << 26  # of its file: a race is a few KB
CONTENT = {"version": Any, "about": Any, "seconds": number(0.0), "entries": Each(str, Any)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a search has come."""

    phase: str  # what is being measured, in words
    share: float  # of the time of the search that has passed, from 0 to 1
    note: str = ""  # a result, in one line; "" between results
    found: Tuning | None = None  # what stands so far, when a candidate was shown to train as fp32 does


class Lab:
    """Measures candidates of one task: within `seconds`, all with one seed, timed by `clock`."""

    def __init__(
        self, task: Task, device: str, *, seed: int, seconds: float, path: Path | None = None,
        clock: Callable[[], float] = time.perf_counter, on_progress: Callable[[Progress], None] = lambda p: None,
    ) -> None:  # fmt: skip
        self.task, self.device, self.seed, self.seconds = task, device, seed, seconds
        self.clock, self.on_progress = clock, on_progress
        self.begun = clock()
        self.deadline = self.begun + seconds
        self.path, self.about = path, _about(task, device, seed)
        self.entries: dict[str, Any] = {}  # of the journal
        self.before = 0.0  # seconds that measuring took before this process
        if path is not None and path.exists():
            self._read(path)
        self._trained: list[Loop] = []  # fp32 after the first training of the reference
        self._wide: list[Tensor] | None = None  # its gradients in fp32

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.deadline - self.clock()

    @property
    def spent(self) -> float:
        """Seconds that were spent, those before an interruption included."""
        return self.before + self.clock() - self.begun

    def say(self, note: str = "", phase: str = "", found: Tuning | None = None) -> None:
        """Report a result, or what is being measured."""
        share = min(1.0, (self.clock() - self.begun) / self.seconds) if self.seconds > 0 else 1.0
        self.on_progress(Progress(phase=phase, share=share, note=note, found=found))

    def pace(self) -> float:
        """Return the seconds of a step in fp32."""

        def measure() -> float:
            found = race(self.task, (), device=self.device, seed=self.seed, rounds=5, clock=self.clock)
            return found.laps[FP32].milliseconds / 1e3

        return float(self._remember("pace", measure))

    def steps(self) -> int:
        """Return the steps of a short training: the excerpt's, or fewer if time is short; never fewer than before."""
        affordable = int(self.seconds / (SHARE * max(self.pace(), 1e-9)))
        before = int(self.entries.get("steps", 0))
        steps = max(FEWEST, before, min(self.task.excerpt_steps, affordable))
        self._keep("steps", steps)
        return steps

    def reference(self, steps: int, bound: float | None) -> Reference | None:
        """Train fp32 with `SEEDS` seeds, as the proof would; None if the time is too short."""
        self.say(phase="fp32, the reference")
        options = self._trainings(steps, bound, "fp32, the reference")
        with failing(FP32):
            runs = trainings(self.task, BASELINE, SEEDS, on_loop=self._trained.append, **options)
        if len(runs) < SEEDS:
            return None
        return Reference(start=tuple(run.first_loss for run in runs), end=tuple(run.last_loss for run in runs))

    def training(self, candidate: Candidate, steps: int, bound: float | None, *, reserve: float) -> Run | None:
        """Return a candidate's first training of a proof; None if no more than `reserve` seconds are left."""
        options = self._trainings(steps, bound, f"training of {candidate.label}", reserve)
        return next(iter(trainings(self.task, candidate, 1, **options)), None)

    def race(
        self, candidates: Sequence[Candidate], *, rounds: int = LOOKS, seed: int | None = None, reserve: float = 0.0,
        phase: str = "", **options: Any,
    ) -> RaceResult | None:  # fmt: skip
        """Race candidates. None if `reserve` seconds would not be left. One that the clock ends is not kept."""
        options |= {"rounds": rounds, "seed": self.seed if seed is None else seed}
        key = f"race {_digest([[c.label, _key(c)] for c in candidates])} {sorted(options.items())}"
        if key in self.entries:
            return revived(RaceResult, self.entries[key])
        if (len(candidates) + 2) * (WARM_UP + rounds) * self.pace() > self.left - reserve:
            return None
        found = race(
            self.task, candidates, device=self.device, deadline=self.deadline, clock=self.clock,
            on_round=lambda done: self.say(phase=phase), **options,
        )  # fmt: skip
        if found.finished:
            self._keep(key, found)
        return found

    def bytes(self, candidate: Candidate) -> tuple[int, int]:
        """Return (bytes between steps, bytes saved for backward) of a candidate; (0, 0) if it cannot make a step."""

        def count() -> list[int]:
            with suppress(Exception):  # the race that follows reports it
                return list(probed(self.task, candidate, self.device, self.clock)[:2])
            return [0, 0]

        state, saved = self._remember(f"bytes {_key(candidate)}", count)
        return state, saved

    def calibration(self, candidate: Candidate, steps: int) -> Calibration:
        """Audit a candidate's policy, on weights that fp32 has trained for `steps` steps; without time an empty one."""

        def audit() -> Calibration:
            loop = self._loop(steps)
            batches = [self.task.batch_on(self.device, self.seed, steps + n) for n in range(AUDITED)]
            try:
                found = hs.audit(
                    loop.model, batches, self.task.loss_fn, candidate.policy, loop.optimizer, steps=AUDITED,
                    clip_norm=self.task.clip_norm,
                )  # fmt: skip
            except Exception as error:  # of the user's model, of torch, or no memory
                return Calibration(failed=error_line(error))
            return calibration_of(found)

        key = f"audit {_key(candidate)} {steps}"
        if key not in self.entries and self.left <= 0.0:
            return Calibration(failed="the time was up")
        self.say(phase=f"audit of {candidate.label}")
        return revived(Calibration, self._remember(key, audit))

    def probe(self, policy: hs.Policy, steps: int, *, reserve: float) -> float:
        """Return the error of the gradients on the weights of the audits; nan if no more than `reserve` s are left."""

        def measure() -> float:
            loop = self._loop(steps)
            batch = self.task.batch_on(self.device, self.seed, steps)
            if self._wide is None:
                self._wide = gradients(self.task, loop.model, batch, None)
            try:
                return gradient_error(self.task, loop.model, batch, policy, self._wide)
            except Exception:  # of the user's model, of torch, or no memory: a policy that is no use
                return 1.0

        key = f"probe {_digest(policy.replace(name='').to_toml())} {steps}"
        if key not in self.entries and self.left <= reserve:
            return math.nan
        return float(self._remember(key, measure))

    def _loop(self, steps: int) -> TorchLoop:
        if not self._trained:  # the reference is from an earlier search
            again = {**self._trainings(steps, 0.0, ""), "runs": (), "on_run": lambda run: None, "seconds": math.inf}
            trainings(self.task, BASELINE, 1, on_loop=self._trained.append, **again)
        (loop,) = self._trained
        assert isinstance(loop, TorchLoop)
        return loop

    def prove(self, candidate: Candidate, steps: int, *, bound: float | None, seeds: int) -> Proof:
        """Test whether a candidate trains as fp32 does; the trainings are kept one by one."""
        trainings = self._trainings(steps, bound, f"equivalence of {candidate.label}")
        return prove(self.task, candidate, seeds=seeds, **trainings)

    def _trainings(self, steps: int, bound: float | None, phase: str, reserve: float = 0.0) -> dict[str, Any]:
        def keep(run: Run) -> None:
            self._keep(f"run {len(self.entries)}", run)
            self.say(phase=phase)

        runs = [revived(Run, value) for key, value in self.entries.items() if key.startswith("run ")]
        return {
            "device": self.device, "steps": steps, "max_loss_rise": bound, "seed": self.seed,
            "seconds": self.left - reserve, "runs": runs, "on_run": keep, "clock": self.clock,
        }  # fmt: skip

    def _remember(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.entries:
            self._keep(key, make())
        return self.entries[key]

    def _keep(self, key: str, value: Any) -> None:
        """Keep a measurement and write the file; a kill leaves the last one whole."""
        self.entries[key] = plain(value)
        if self.path is None:
            return
        values = {"version": VERSION, "about": self.about, "seconds": self.spent, "entries": self.entries}
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def _read(self, path: Path) -> None:
        rest = "delete it, or search without resuming"
        try:
            values = read_json(path, TuneError, CONTENT, MOST_BYTES)
        except TuneError as error:
            raise TuneError(f"{str(path)!r} holds no measurements of a search ({error}); {rest}") from error
        version, about = values["version"], values["about"]
        self.entries, self.before = values["entries"], values["seconds"]
        wanted = json.loads(json.dumps(self.about))
        if version != VERSION or about != wanted:
            other = [key for key in wanted if about.get(key) != wanted[key]] if isinstance(about, dict) else []
            differs = "; ".join(f"{key}: {about.get(key)!r} there, {wanted[key]!r} here" for key in other)
            raise TuneError(f"{str(path)!r} belongs to another search ({differs or f'version {version}'}); {rest}")


def revived(kind: type[T], value: Any) -> T:
    """Return a value of the type `kind` from what `plain` and JSON made of it."""
    made, parts = value, get_args(kind)
    if dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        made = kind(**{name: revived(kinds[name], item) for name, item in value.items()})
    elif get_origin(kind) is tuple:
        made = tuple(revived(parts[0], item) for item in value)
    elif get_origin(kind) is Mapping:
        made = {key: revived(parts[1], item) for key, item in value.items()}
    elif NoneType in parts and value is not None:
        made = revived(parts[0], value)
    found: T = made
    return found


def _key(candidate: Candidate) -> str:
    text = "" if candidate.policy is None else candidate.policy.replace(name="").to_toml()
    return _digest([text, candidate.compile])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _about(task: Task, device: str, seed: int) -> dict[str, Any]:
    """Return what measurements belong to; the sums tell other weights and other data apart."""
    model = started(task, seed, "cpu")
    first, again = (_sum(task.batches(seed, 0)) for _ in range(2))
    if first != again:
        raise TaskError(
            f"task {task.name!r}: batches({seed}, 0) gave other numbers when it was called again; equal arguments must "
            "give equal batches: draw them with a generator seeded by seed and step"
        )
    here = machine()
    shown = {name: here[name] for name in ("cpu", "cores", "accelerator", "torch", "torch_threads")}
    return {
        "task": task.name, "weights": _sum(list(model.parameters())), "first batch": first, "device": device,
        "seed": seed, "machine": shown, "halfstep": hs.__version__,
    }  # fmt: skip


def _sum(tree: object) -> str:
    def shown(t: Tensor) -> str:
        return f"{tuple(t.shape)} {t.dtype if t.is_complex() or t.is_meta else float(t.double().sum())}"

    with torch.no_grad():
        return _digest([shown(t) for t in tensors(tree)])
