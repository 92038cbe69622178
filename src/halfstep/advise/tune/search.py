"""Search: which candidate is the cheapest whose loss ends within the bound. A function of what the lab measures.

Stages: presets; exceptions for cheaper presets beyond the bound, from the most sensitive; changes that save, from the
most expensive; a race of the finalists on other batches, and the proof of equivalence, with the next one where it
fails; compiled steps, and their proof. Each stage leaves a safe choice, so that the search can end after any of them.

Times are measured first, then losses, by one training each: of the candidate that would be chosen, and where it is
beyond the bound, of the next. What cannot be chosen is not trained.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, applied, chain, exceptions, options, savings
from halfstep.advise.tune.lab import LOOKS, SEEDS, Lab, Lap, RaceResult, Reference
from halfstep.advise.tune.proof import BASELINE, Proof, Run
from halfstep.advise.tune.result import Change, Tried, size
from halfstep.report import counted
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.timing import Ratio

SAFE = "O0"  # the preset that computes in fp32: the choice when nothing else is shown to be good

PRESETS = ("O0", "torch", "mixed", "O2", "pure", "lean")  # the safer first: a later one has to be better for certain
WRONG = 0.1  # error of the gradients that a sound candidate may have: healthy bf16 models stay below a twentieth
GROUP = 8  # candidates of one race at most, its base not counted: all of them are in memory at once
COMPILED = " compiled"  # behind the label of a candidate with ``compile=True``
TOO_SLOW = 1.2  # a preset that takes this many times fp32's time is left out where only time counts
LADDER = (1, 2, 4, 8)  # so many changes are made at once: the most sensitive exceptions, the largest savings
LOW_START = "megengine"  # the loss-scale rule that begins at 16: torch's begins at 65,536 and skips steps until it fits
MENDED = 2  # presets that are given exceptions at most, the cheapest ones
ROUNDS = 3  # times that changes are looked for, each time from the best candidate so far
CHANGED = 2  # candidates with changes or compiled steps that are tested for equivalence at most; presets are all tested
PROOF = 9  # short trainings of a proof of five pairs, of which three of fp32 are there, and a little more
COMPILING = 60.0  # seconds that must be free for compiling: a small model takes that long on a slow machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """How much time and memory count; they add up to 1."""

    time: float
    memory: float

    def cost(self, time: float, memory: float) -> float:
        """Return the logarithm of the weighted geometric mean of two ratios."""
        return sum(w * math.log(x) for w, x in ((self.time, time), (self.memory, memory)) if w)


class Search:
    """One search while it runs; `bound`, `dtypes` and `seeds` as `tune` takes them."""

    def __init__(
        self, lab: Lab, weights: Weights, steps: int, *, bound: float | None, dtypes: Sequence[str], seeds: int,
        compile: bool,
    ) -> None:  # fmt: skip
        self.lab, self.weights, self.steps = lab, weights, steps
        self.given, self.dtypes, self.seeds, self.compiling = bound, dtypes, seeds, compile
        self.notes: list[str] = []  # what was left out and what is missing
        self.proofs: list[tuple[str, Proof]] = []  # of a label, in order
        self.finished = self.interrupted = False
        self.bound = math.nan  # largest loss rise, a fraction of fp32's loss
        self.tried: dict[str, Tried] = {FP32: Tried(label=FP32, policy=hs.Policy.of(SAFE), preset=SAFE)}
        self.best = self.add(hs.Policy.of(SAFE), SAFE).label
        self.control: Ratio | None = None  # fp32 over fp32, of the last race
        self.resolution = 0.0
        self.repeatable = True  # whether two trainings in fp32 from one start had the same losses in every race
        self.laps: dict[str, Lap] = {}  # the last one of each candidate
        self.audits: dict[str, Calibration] = {}
        self.runs: dict[str, Run] = {}  # the training that a candidate was judged by
        self.end = math.nan  # where fp32's loss ends
        self.on_choice: Callable[[], None] = lambda: None  # called when there is a choice, which may be improved

    def run(self, reference: Reference) -> None:
        """Search until the end or until the time is up."""
        self.bound, self.end = reference.noise if self.given is None else self.given, reference.end[0]
        self.set(SAFE, error=0.0, verdict="within", reason="it computes in fp32")
        stages: tuple[tuple[str, float, Callable[[], bool]], ...] = (
            ("the presets", 8.0 * len(self.dtypes), self.presets),
            ("exceptions for presets that are not sound", 8.0, self.repair),
            ("changes that save", 10.0, self.improve),
            ("the proof of equivalence", PROOF, self.prove),
            ("compiled steps", PROOF, self.compile),
        )
        missed = [(name, trainings) for name, trainings, stage in stages if not stage()]
        if missed:
            names = ", ".join(name for name, _ in missed)
            self.notes.append(f"the time was too short for {names}: {self.missing(sum(t for _, t in missed))}")
        self.finished = not missed
        if not self.repeatable:
            self.notes.append(
                "two trainings in fp32 with the same weights, batches and random numbers differ: the model draws "
                "numbers that torch's seed does not decide, or its kernels add in any order; loss rises are uncertain"
            )

    def presets(self) -> bool:
        """Race all presets in all formats, and judge the best."""
        made = [self.add(hs.Policy.of(name, dtype=dtype), name) for name in PRESETS[1:] for dtype in self.dtypes]
        labels = [tried.label for tried in made]
        limit = math.inf if self.weights.memory else TOO_SLOW
        whole = self.race([SAFE, *labels], limit=limit, pick=not self.weights.memory, phase="presets")
        return self.judge(labels) and whole

    def judge(self, labels: Sequence[str]) -> bool:
        """Judge candidates, the one that would be chosen first, until one is sound; return whether there was time."""
        left = [x for x in labels if self[x].verdict == "unmeasured" and self[x].time is not None]
        while left:
            pick = left[0]
            for label in left:
                pick = label if self.cheaper(self[label], self[pick]) else pick
            left.remove(pick)
            self.set(pick, error=self._probe(self[pick].policy))
            if not self[pick].error > WRONG and not self._trained(pick):
                return False
            if self.sound(self[pick]):
                self.prefer(pick)
                break
        return True

    def _trained(self, label: str) -> bool:
        """Judge a candidate by its loss at the end of a training; return whether there was time for it."""
        run = self.lab.training(self.candidate(label), self.steps, self.given, reserve=self._reserve(1))
        if run is None:
            return False
        rise, reason = math.inf, run.stopped or "its loss is not finite"
        if not self.end:
            rise, reason = math.nan, "its loss cannot be compared: fp32 ends at 0"
        elif math.isfinite(run.last_loss):
            rise = (run.last_loss - self.end) / abs(self.end)
            reason = f"loss {100 * rise:+.2f} % beside fp32's, at most {100 * self.bound:+.2f} % allowed"
        reason += f", {run.skipped} steps skipped" * bool(run.skipped)
        self.runs[label] = run
        self.set(label, loss_rise=rise, verdict="within" if rise <= self.bound else "worse", reason=reason)
        self.lab.say(f"{label}: {self[label].verdict}; {reason}")
        return True

    def repair(self) -> bool:
        """Give presets that are cheaper than the best and not sound exceptions, until they are."""
        judged = [t for t in self.tried.values() if (t.verdict == "worse" or t.error > WRONG) and not t.changes]
        beyond = [t for t in judged if not self.sound(t) and self.cheaper(t, self[self.best])]
        for tried in sorted(beyond, key=self.cost)[:MENDED]:
            calibration = self._calibration(tried.label)
            listed = exceptions(calibration, tried.policy)
            probed = [
                replace(change, why=f"{calibration.facts(change.field, change.pattern)}{change.why}")
                for change in chain(self._probe, tried.policy, options(calibration, tried.policy, listed))
            ]
            found = probed or listed
            skipped = self.runs[tried.label].skipped if tried.label in self.runs else 0
            if tried.policy.dtype == "fp16" and skipped:  # the scale had to come down first
                why = f"{counted(skipped, 'step')} skipped until the scale fits"
                found = [Change(field="scale", value=LOW_START, why=why), *found]
            counts = range(1, len(found) + 1)
            rungs = counts if probed else sorted({min(count, len(found)) for count in LADDER if found})
            if not self._excepted(tried, [found[:count] for count in rungs]):
                return False
            passed = [n for n in rungs if self.sound(self.changed(tried, found[:n]))]
            few = found[: passed[0]] if passed else []
            fewer = [[change for change in few if change is not left] for left in few]
            if len(few) > 1 and not self._excepted(tried, fewer):
                return False
        return True

    def _calibration(self, label: str) -> Calibration:
        found = self.audits[label] = self.lab.calibration(self.candidate(label), self.steps)
        note = f"{label} could not be audited, so that no operator of it was looked at: {found.failed}"
        if found.failed and note not in self.notes:
            self.notes.append(note)
        return found

    def _probe(self, policy: hs.Policy) -> float:
        return self.lab.probe(policy, self.steps, reserve=self._reserve())

    def _excepted(self, tried: Tried, exceptions: Sequence[Sequence[Change]]) -> bool:
        """Race a preset with exceptions, those whose gradients are right, and judge the fewest that are cheap."""
        made = self._new(tried, exceptions)
        for label in made:
            self.set(label, error=self._probe(self[label].policy))
        labels = [label for label in made if not self[label].error > WRONG]
        whole = self.race(labels, base=tried.label, alone=True, reserve=self._reserve(),
                          phase=f"exceptions for {tried.label}")  # fmt: skip
        timed = [label for label in labels if self[label].time is not None]
        for label in timed:
            self._explain(label, self[tried.label])
        safe = self.best == SAFE  # then even a dear one may be the base of changes that save
        return self.judge([x for x in timed if safe or self.cheaper(self[x], self[self.best])]) and whole

    def _new(self, base: Tried, changes: Sequence[Sequence[Change]]) -> list[str]:
        made = (self.changed(base, these) for these in changes)
        return [tried.label for tried in made if tried.verdict == "unmeasured" and tried.time is None]

    def improve(self) -> bool:
        """Try changes one by one beside the best low candidate, then the good ones together."""
        low = [t for t in self.tried.values() if self.sound(t) and t.preset != SAFE]
        base = min(low, key=self.cost, default=None)
        whole, known = True, set[tuple[object, ...]]()  # places that have a change, and changes that do not save
        for _ in range(ROUNDS):
            if base is None:
                break
            eight_bits = hs.policy.units(self.lab.device).fp8 and find_spec("torchao") is not None
            memory = self.weights.memory > 0.0
            found = savings(self._calibration(base.label), base.policy, memory=memory, eight_bits=eight_bits)
            known |= {(change.field, change.pattern) for change in base.changes}
            moves = [m for m in found if known.isdisjoint({(m.field, m.pattern), (m.field, m.pattern, m.value)})]
            new = self._new(base, [[move] for move in moves])
            limit = math.inf if memory else 1.0 - self.resolution  # beyond it nothing is saved
            reserve = self._reserve()
            whole &= self.race(new, base=base.label, alone=True, limit=limit, reserve=reserve,
                               phase="changes that save")  # fmt: skip
            timed = [self._explain(label, base) for label in new if self[label].time is not None]
            together = self._together(self[base.label], timed)
            known |= {(m.field, m.pattern, m.value) for m in moves if self.changed(base, [m]).verdict == "slower"}
            untimed = [label for label in together if self[label].time is None]
            whole &= self.race(untimed, base=base.label, alone=True, reserve=reserve, phase="changes together")
            base = self[base.label]
            better = [x for x in together if self.saves(self[x], base)]
            whole &= self.judge(better)
            base = min((self[x] for x in better if self.sound(self[x])), key=self.cost, default=None)
        return whole

    def prove(self) -> bool:
        """Test the best candidates for equivalence until one passes; without one, take the best preset that is safe."""
        decided = True
        for tried in self._finalists():
            if tried.label == SAFE or not self.cheaper(tried, self[SAFE]):
                continue
            if tried.verdict == "unmeasured" and not self._trained(tried.label):
                decided = False
                break
            curve = self.runs[tried.label].losses
            alike = bool(curve) and any(curve == self.runs[label].losses for label, _ in self.proofs)
            if self[tried.label].verdict == "within" and not alike and self._proven(tried.label):
                self.best = tried.label
                return True
            decided &= self[tried.label].verdict != "undecided"
        self.fall_back()
        return decided

    def compile(self) -> bool:
        """Try the best candidate and fp32 with compiled steps, and test what is cheaper for equivalence."""
        if not self.compiling:
            return True
        self.on_choice()
        eager = list(dict.fromkeys((self.best, SAFE)))
        labels = [self.add(t.policy, t.preset, t.changes, compile=True).label for t in (self[x] for x in eager)]
        whole = self.race([*eager, *labels], base=eager[0], alone=True, reserve=self._reserve(1) + COMPILING,
                          phase="compiled steps")  # fmt: skip
        for label, alike in zip(labels, (self[x] for x in eager), strict=True):
            if self[label].time is not None and self[label].verdict == "unmeasured":
                self.set(label, verdict=alike.verdict, loss_rise=alike.loss_rise, error=alike.error,
                         reason=f"its loss is taken for that of {alike.label}")  # fmt: skip
        for label in sorted(labels, key=lambda x: self.cost(self[x])):
            if self.sound(self[label]) and self.cheaper(self[label], self[eager[0]]) and self._proven(label):
                self.best = label
                break
        return whole and all(self[label].verdict != "undecided" for label in labels)

    def _proven(self, label: str) -> bool:
        proof = self.lab.prove(self.candidate(label), self.steps, bound=self.given, seeds=self.seeds)
        self.proofs.append((label, proof))
        self.lab.say(f"{label}: {proof.verdict}; {proof.reason}")
        if not proof.holds:
            open_ = proof.verdict == "undecided"
            words = proof.reason if open_ else f"{proof.verdict}: {proof.reason}"
            self.set(label, verdict="undecided" if open_ else "worse", reason=words)
        return proof.holds

    def fall_back(self) -> None:
        """Make the best preset the choice that no training has shown to be worse, unless the choice was proven."""
        if any(label == self.best and proof.holds for label, proof in self.proofs):
            return
        self.best = SAFE
        for label, t in self.tried.items():
            plain = not t.changes and not t.compile and label != FP32
            safe = t.verdict in {"within", "undecided"} and not t.error > WRONG
            if plain and safe and self.cheaper(t, self[self.best]):
                self.best = label

    def reason(self, proof: Proof | None) -> str:
        """Return why the choice was chosen, in one sentence."""
        best = self[self.best]
        shown = "not tested for equivalence" if proof is None else f"{proof.verdict}: {proof.reason}"
        if best.preset == SAFE and not best.compile:
            return "no cheaper candidate was shown to be as good as fp32"
        return f"the cheapest of those whose loss stays within the bound; {shown}"

    def _finalists(self) -> list[Tried]:
        """Race the best candidates on other batches, for times that no choice has favoured; return them in order.

        Presets whose loss was not judged yet follow.
        """
        within = [t for t in self.tried.values() if t.verdict == "within" and t.label != FP32]
        order = sorted(within, key=self.rank)
        changed = [t.label for t in order if t.changes][:CHANGED]
        labels = [*changed, *(t.label for t in order if not t.changes)]
        labels = [x for x in labels if x == SAFE or self.cost(self[x]) < self.cost(self[SAFE])]
        if labels != [SAFE] and self.race(
            labels, rounds=2 * LOOKS, pick=not self.weights.memory,
            seed=self.lab.seed + SEEDS, reserve=self._reserve(), phase="the finalists",
        ):  # fmt: skip
            self.best = SAFE
            for tried in sorted((self[x] for x in labels), key=lambda t: (PRESETS.index(t.preset), len(t.changes))):
                self.prefer(tried.label)
        left = [t for t in self.tried.values() if t.verdict == "unmeasured" and t.time is not None and not t.changes]
        return [*sorted((self[x] for x in labels), key=self.rank), *sorted(left, key=self.cost)]

    def _explain(self, label: str, base: Tried) -> Tried:
        tried = self[label]
        saved = (1.0 - self.beside(label)) * self[base.label].milliseconds
        words = f"saves {saved:.2g} ms" if saved > 0 else f"costs {-saved:.2g} ms"
        new = len(tried.changes) - len(base.changes)
        if new != 1:
            words = f"{new} changes together {words.replace('saves', 'save').replace('costs', 'cost')}"
        memory = tried.bytes - base.bytes
        if tried.bytes and memory:
            words += f", {size(abs(memory))} {'more' if memory > 0 else 'less'}"
        last = replace(tried.changes[-1], why=f"{tried.changes[-1].why}; {words}")
        return self.set(label, changes=(*tried.changes[:-1], last))

    def _together(self, base: Tried, singles: Sequence[Tried]) -> list[str]:
        """Return candidates with the changes that save: the best one, the best two, ...; one rule a place."""
        good = sorted((t for t in singles if self.saves(t, base)), key=lambda t: self.beside(t.label))
        for tried in singles:
            if tried.verdict == "unmeasured":
                self.set(tried.label, verdict="saves" if tried in good else "slower")
        first: dict[tuple[str, str], Tried] = {}
        for tried in good:
            first.setdefault((tried.changes[-1].field, tried.changes[-1].pattern), tried)
        chosen: list[Change] = []
        labels: list[str] = []
        predicted, bytes_ = 1.0 if base.time is None else base.time.median, base.bytes
        for count, tried in enumerate(first.values(), 1):
            chosen.append(tried.changes[-1])
            predicted *= self.beside(tried.label)
            bytes_ += tried.bytes - base.bytes
            if count in LADDER or count == len(first):
                label = self.add(applied(base.policy, chosen), base.preset, (*base.changes, *chosen)).label
                self.set(label, predicted=predicted, predicted_bytes=bytes_, verdict="unmeasured")
                labels.append(label)
        return labels

    def _reserve(self, spent: int = 0) -> float:
        """Return the seconds that are kept free for the proof without what is `spent` of it: at most half of all."""
        return min((PROOF - spent) * self.steps * self.lab.pace(), self.lab.seconds / 2)

    def missing(self, trainings: float) -> str:
        """Return how long so many more short trainings of the task's excerpt take, in words."""
        steps = max(self.steps, self.lab.task.excerpt_steps)
        minutes = math.ceil((1.3 * trainings * steps * self.lab.pace() + COMPILING * self.compiling) / 60)
        return f"about {minutes} more minutes are needed, with --resume"

    # ------------------------------------------------------------------ what is known of every candidate

    def __getitem__(self, label: str) -> Tried:
        return self.tried[label]

    def add(
        self, policy: hs.Policy, preset: str, changes: tuple[Change, ...] = (), *, compile: bool = False
    ) -> Tried:  # fmt: skip
        """Return the candidate with this policy, new or known."""
        for tried in self.tried.values():
            same = tried.policy.replace(name="") == policy.replace(name="")
            if same and tried.compile == compile and tried.label != FP32:
                return tried
        name = preset if preset == SAFE else f"{preset} {policy.dtype}"
        if changes:
            words = ", ".join(str(change).replace(" = ", " ") for change in changes)
            name += f" + {words}" if len(changes) <= 2 else f" + {len(changes)} changes"
        names = (f"{name}{f' ({n})' * (n > 1)}{COMPILED * compile}" for n in itertools.count(1))
        label = next(found for found in names if found not in self.tried)
        self.tried[label] = Tried(label=label, policy=policy, preset=preset, compile=compile, changes=changes)
        return self.tried[label]

    def changed(self, base: Tried, changes: Sequence[Change]) -> Tried:
        """Return `base` with some changes more."""
        new = (replace(change, value=str(change.value)) for change in changes)
        return self.add(applied(base.policy, changes), base.preset, (*base.changes, *new))

    def set(self, label: str, **fields: Any) -> Tried:
        """Replace fields of a candidate."""
        self.tried[label] = replace(self.tried[label], **fields)
        return self.tried[label]

    def candidate(self, label: str) -> Candidate:
        """Return a candidate as tasks have it."""
        tried = self.tried[label]
        return Candidate(label=label, dtype=tried.policy.dtype, policy=tried.policy, compile=tried.compile)

    def race(self, labels: Sequence[str], *, base: str = FP32, **options: Any) -> bool:
        """Race candidates, and return whether the race came to its end."""
        others = [label for label in dict.fromkeys(labels) if label != base]
        for start in range(0, len(others), GROUP):
            group = [*([] if base == FP32 else [base]), *others[start : start + GROUP]]
            found = self.lab.race([self.candidate(x) for x in group], base=base, **options)
            if found is not None:
                self._take(found, group, base)
            if found is None or not found.finished:
                return False
        return True

    def _take(self, found: RaceResult, labels: Sequence[str], base: str) -> None:
        self.laps.update(found.laps)
        self.repeatable &= found.repeatable
        if found.control is not None:
            fp32 = found.laps[FP32]
            self.control, self.resolution = found.control, found.control.resolution
            state, saved = self.lab.bytes(BASELINE)
            self.set(FP32, time=fp32.time, milliseconds=fp32.milliseconds, error=0.0, loss_rise=0.0, verdict="within",
                     state_bytes=state, saved_bytes=saved, reason="what the others are compared with")  # fmt: skip
        for label in labels:
            lap, before, time = found.laps[label], self[label], found.laps[label].time
            if time is None and lap.beside is not None and (known := self[base].time) is not None:
                time = known.times(lap.beside) if label != base else known
            if time is not None:
                self.set(label, time=time, milliseconds=lap.milliseconds)
            if lap.failed or before.verdict == "unmeasured":
                verdict = "failed" if lap.failed else "slower" if lap.dropped else "unmeasured"
                self.set(label, verdict=verdict, reason=lap.failed or _over(lap.beside, base))
            if not lap.dropped and not before.bytes:
                state, saved = self.lab.bytes(self.candidate(label))
                self.set(label, state_bytes=state, saved_bytes=saved)
            words = [self[label].verdict, _over(time, FP32), self[label].reason]
            self.lab.say(f"{label}: {'; '.join(dict.fromkeys(words))}")

    def cost(self, tried: Tried) -> float:
        """Return the logarithm of its cost over fp32's; inf if it is not known."""
        fp32 = self.tried[FP32]
        if (tried.time is None and self.weights.time) or (tried.bytes <= 0 and self.weights.memory):
            return math.inf
        memory = tried.bytes / fp32.bytes if fp32.bytes else math.inf
        return self.weights.cost(1.0 if tried.time is None else tried.time.median, memory)

    def cheaper(self, tried: Tried, other: Tried) -> bool:
        """Return whether it costs less by more than the last race resolves."""
        return self.cost(tried) < self.cost(other) - self.weights.time * self.resolution

    def prefer(self, label: str) -> None:
        """Make a candidate the best, if it is sound and cheaper."""
        if self.sound(self.tried[label]) and self.cheaper(self.tried[label], self.tried[self.best]):
            self.best = label

    def sound(self, tried: Tried) -> bool:
        """Return whether its loss is within the bound and its gradients are not far off, as far as is known."""
        return tried.verdict == "within" and not tried.error > WRONG

    def rank(self, tried: Tried) -> tuple[bool, float]:
        """Return a place in the order of candidates: the best, then the cheapest first."""
        return tried.label != self.best, self.cost(tried)

    def measured(self) -> tuple[Tried, ...]:
        """Return fp32 and every candidate that was measured, with their reasons complete."""
        settled = self.finished or any(proof.holds for _, proof in self.proofs)
        for label, tried in self.tried.items():
            off = f"its gradients are off by {100 * tried.error:.0f} %"
            if tried.error > WRONG and tried.verdict in {"within", "worse"} and off not in tried.reason:
                self.set(label, reason=f"{tried.reason}; {off}")
            elif tried.verdict == "unmeasured" and tried.time is not None and settled:  # it was not needed
                wrong = tried.error > WRONG
                words = off if wrong else f"not cheaper for certain than {self.best}"
                self.set(label, verdict="worse" if wrong else "slower", reason=words)
        every = self.tried.values()
        return tuple(t for t in every if t.verdict != "unmeasured" or t.time is not None or t.label == FP32)

    def saves(self, tried: Tried, base: Tried) -> bool:
        """Return whether it is cheaper than `base`, the base of its last race, for certain."""
        beside = self.laps[tried.label].beside
        memory = tried.bytes / base.bytes if tried.bytes and base.bytes else math.inf
        if beside is None or tried.verdict in {"failed", "slower"}:
            return False
        likely, least = self.weights.cost(beside.median, memory), self.weights.cost(beside.high, memory)
        return least < 0.0 and likely < -self.weights.time * self.resolution

    def beside(self, label: str) -> float:
        """Return its step time over that of the base in its last race; 1.0 if it was not timed."""
        beside = self.laps[label].beside if label in self.laps else None
        return 1.0 if beside is None else beside.median


def _over(ratio: Ratio | None, what: str) -> str:
    if ratio is None:
        return "not timed"
    return f"{ratio.median:.3f} of {what}'s time ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.rounds} rounds)"
