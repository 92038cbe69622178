"""What a comparison or a demo found, in words: the result, what is fastest, what is smallest, how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import halfstep as hs
from halfstep.report import Fact, Section, Size, listed, sentence
from halfstep.tasks.candidates import AMP, FP32, amp_of
from halfstep.tasks.compare import CandidateRow, Comparison, Cost, Pace
from halfstep.tasks.demo import Rescue, Workload
from halfstep.tasks.measure import WITHIN
from halfstep.timing import Ratio

SAME = "as much as fp32"
ALIKE = 1.01  # bytes that differ by less are not worth a decision
ENDS = 10  # steps whose mean loss stands for the end of a run


@dataclass(kw_only=True, slots=True)
class Demo:
    """What a demo has measured so far."""

    device: str
    units: hs.policy.Units
    paces: list[tuple[Workload, Pace]] = field(default_factory=list)
    rescue: Rescue | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)  # what was found, as pages and terminals show it
    missing: list[str] = field(default_factory=list)  # parts that were not finished, the first with the reason

    @property
    def heavy(self) -> Pace:
        """That of the model with most parameters, whose bytes between steps are shown."""
        return max((made for _, made in self.paces), key=lambda made: made.parameters)

    @property
    def deep(self) -> Pace:
        """That of the deepest model, whose bytes for backward are shown."""
        return max((made for _, made in self.paces), key=lambda made: made.rows[0].saved_bytes)


def findings(comparison: Comparison) -> tuple[Fact, ...]:
    """Return what the comparison found about result, time and memory."""
    return _result(comparison), _compared_time(comparison), _compared_memory(comparison)


def conclusions(demo: Demo) -> tuple[Fact, ...]:
    """Return what the finished parts show, and what was not measured."""
    facts = [_demo_time(workload, made, demo.units) for workload, made in demo.paces]
    facts += [_demo_memory(demo)] if demo.paces else []
    facts += [_accuracy(made) for made in demo.comparisons]
    facts += [_rescue(demo.rescue)] if demo.rescue is not None else []
    return (*facts, _missing(demo.units, demo.missing))


def _result(comparison: Comparison) -> Fact:
    others = [row for row in comparison.rows if row.label != FP32]
    groups: dict[str, list[str]] = {}
    for row in others:
        groups.setdefault(row.difference.verdict, []).append(row.label)
    same = groups.pop(WITHIN, [])
    near = f"{WITHIN} of {comparison.margin:.3g}{comparison.metric.partition(',')[2]}"
    if len(same) == len(others) == 1:
        text = f"{same[0]} ends {near}."
    elif len(same) == len(others):
        text = f"All {len(others)} end {near}."
    elif same:
        text = f"{len(same)} of {len(others)} end {near}: {listed(same)}."
    elif set(groups) == {"undecided"}:
        del groups["undecided"]
        one = len(comparison.seeds) == 1
        text = f"Undecided: {'one seed has no interval' if one else 'the intervals cross the margin'}."
    else:
        text = f"None is {near}."
    words = {
        "better": "Better than fp32",
        "worse": "Worse than fp32",
        "diverged": "Diverged",
        "undecided": "Undecided, the interval crosses the margin",
    }
    more = [f"{words[verdict]}: {listed(groups[verdict])}." for verdict in words if verdict in groups]
    skipped = [row.label for row in others if any(row.skipped)]
    if skipped:
        more.append(f"Skipped steps whose gradients overflowed: {listed(skipped)}.")
    verdicts = {row.difference.verdict for row in others}
    tone = "bad" if verdicts & {"worse", "diverged"} else "open" if "undecided" in verdicts else "good"
    return Fact(f"Result ({comparison.metric})", text, tuple(more), tone)


# ------------------------------------------------------------------ time


def ratio_text(ratio: Ratio | None, control: Ratio | None, *, intervals: bool = False) -> str:
    """Return a ratio, or that it is finer than `control` can resolve; "" if there is none."""
    if ratio is None or control is None:
        return ""
    shown = f"{ratio:.2f}" if intervals else f"{ratio.median:.3f}"
    return f"undecided ({shown})" if ratio.finer_than(control) else shown


def _timed(rows: Sequence[Cost]) -> list[tuple[Cost, Ratio]]:
    """Return the rows in low formats that were timed, the fastest first."""
    timed = [(row, row.to_fp32) for row in rows if row.to_fp32 is not None and row.label != "O0"]
    return sorted(timed, key=lambda pair: pair[1].median)


def _time(heading: str, rows: Sequence[Cost], control: Ratio) -> Fact:
    """Return which low format is fastest, and how torch.amp and halfstep's own fp32 compare; one was timed."""
    (best, ratio), *others = _timed(rows)
    found = f"{ratio:.2f} of fp32's time"
    if ratio.finer_than(control):
        text = f"Undecided: {best.label} comes first with {found}, which this machine cannot tell from 1."
        tone = "open"
    elif ratio.median < 1.0:
        text, tone = f"Fastest: {best.label}, {found}.", "good"
    else:
        text, tone = f"fp32 is fastest. The nearest low format is {best.label}: {found}.", "bad"
    alike = [row.label for row, other in others if _alike(other, ratio, control)]
    more = [f"Cannot be told from it: {listed(alike)}."] if alike else []
    if best.to_amp is not None:
        finer = ", undecided" if best.to_amp.finer_than(control) else ""
        more.append(f"Against {amp_of(rows).label}: {best.to_amp.median:.2f}{finer}.")
    for row in rows:
        if row.to_fp32 is not None and row is not best and row.label.startswith(("O0", AMP)):
            words = "halfstep's step in fp32 (O0)" if row.label == "O0" else row.label
            more.append(f"{words}: {ratio_text(row.to_fp32, control, intervals=True)}.")
    return Fact(heading, text, tuple(more), tone)


def _alike(ratio: Ratio, other: Ratio, control: Ratio) -> bool:
    """Return whether two ratios to the same baseline differ by less than can be resolved."""
    overlap = ratio.low <= other.high and other.low <= ratio.high
    return overlap or abs(ratio.median / other.median - 1.0) <= control.resolution


def _compared_time(comparison: Comparison) -> Fact:
    heading, rows = "Time of a step", comparison.rows
    if comparison.control is None:
        return Fact(heading, "Not measured: a run is too short for more than its warm-up.", tone="open")
    fact = _time(heading, rows, comparison.control)
    timed = [(row, ratio.median) for row, ratio in _timed(rows) if isinstance(row, CandidateRow)]
    return replace(fact, more=(*fact.more, *_caution(timed[0][0], timed)))


def _demo_time(workload: Workload, made: Pace, units: hs.policy.Units) -> Fact:
    heading = f"Bound by {workload.bound_by}; {made.about}"
    slow = [row for row in made.rows if row.slow]
    least = min((row.slow for row in slow), default=0.0)
    without = "" if units.bf16 else f": {units.reason}"
    if _timed(made.rows):
        fact = _time(heading, made.rows, made.control)
    else:
        o0 = next((row.to_fp32 for row in made.rows if row.label == "O0"), None)
        more = (f"halfstep's step in fp32 (O0): {ratio_text(o0, made.control, intervals=True)}.",) if o0 else ()
        text = f"fp32 is fastest. A step of each low format took over {least:.0f} times as long{without}."
        fact, slow = Fact(heading, text, more), []
    names = listed([row.label for row in slow])
    lost = [f"A step took over {least:.0f} times fp32's, and was left out: {names}{without}."] if slow else []
    return replace(fact, more=(*fact.more, *lost, sentence(workload.lesson)))


def _caution(best: CandidateRow, costs: Sequence[tuple[CandidateRow, float]]) -> list[str]:
    """Return a warning if the cheapest row did not keep the result, with the cheapest that did; `costs`: of each."""
    if best.difference.verdict in (WITHIN, "better"):
        return []
    safe = [(cost, row.label) for row, cost in costs if row.difference.verdict == WITHIN]
    first = f" First {WITHIN}: {min(safe, key=lambda pair: pair[0])[1]}." if safe else ""
    return [f"Its result is {best.difference.verdict}.{first}"]


# ------------------------------------------------------------------ memory


def _saved(rows: Sequence[Cost]) -> tuple[str, list[Cost]]:
    """Return what saves least for backward, in words, and the rows that do; [] if none saves less than fp32."""
    fp32, *others = rows
    least = min(others, key=lambda row: row.saved_bytes)
    size = Size(row.saved_bytes for row in rows)
    if least.saved_bytes >= fp32.saved_bytes:
        return f"None saves less for backward than fp32's {size(fp32.saved_bytes)} {size.unit}.", []
    alike = [row for row in others if row.saved_bytes <= ALIKE * least.saved_bytes]
    share = _change(least.saved_bytes, fp32.saved_bytes)
    labels = listed([row.label for row in alike])
    return f"Least saved for backward: {labels}, {size(least.saved_bytes)} {size.unit} ({share}).", alike


def _between(rows: Sequence[Cost]) -> list[str]:
    """Return how the bytes between steps compare with fp32's, the smallest first."""
    fp32, *others = rows
    groups: dict[str, list[Cost]] = {}
    for row in sorted(others, key=lambda row: row.state_bytes):
        groups.setdefault(_change(row.state_bytes, fp32.state_bytes), []).append(row)
    if set(groups) == {SAME}:
        return ["Between steps all hold as much as fp32."]
    size = Size(row.state_bytes for row in rows)
    return [
        f"Between steps {change}: {listed([row.label for row in found])}, {size(found[0].state_bytes)} {size.unit}."
        for change, found in groups.items()
        if change != SAME
    ]


def _compared_memory(comparison: Comparison) -> Fact:
    text, least = _saved(comparison.rows)
    costs = [(row, row.saved_bytes) for row in comparison.rows[1:]]
    cheapest = min(costs, key=lambda pair: pair[1])[0]
    more = _caution(cheapest, costs) if len(least) <= 1 else []
    return Fact("Memory", text, (*more, *_between(comparison.rows)), "good" if least else "open")


def _demo_memory(demo: Demo) -> Fact:
    text, _ = _saved(demo.deep.rows)
    text = f"{text.rstrip('.')}, in the step of {demo.deep.about}."
    more = [*_between(demo.heavy.rows), f"Bytes between steps are those of {demo.heavy.about}."]
    more += [] if demo.units.bf16 else ["They are saved on any machine, also without units for bf16, as here."]
    return Fact("Bytes, counted", text, tuple(more), "good")


def _change(count: int, reference: int) -> str:
    change = round(100 * (count / reference - 1)) if reference else 0
    return f"{abs(change)} % {'more' if change > 0 else 'less'} than fp32" if change else SAME


# ------------------------------------------------------------------ the other parts of a demo


def _accuracy(made: Comparison) -> Fact:
    first = findings(made)[0]
    margin = f"The margin, fixed beforehand, is {made.margin:.2g}; {made.steps} steps, {len(made.seeds)} seeds."
    ends = f"fp32 ends at {statistics.fmean(made.rows[0].metrics):.4g}."
    return replace(first, heading=f"Accuracy of {made.task} ({made.metric})", more=(*first.more, ends, margin))


def _rescue(rescued: Rescue) -> Fact:
    verdict = rescued.verdict
    last = _end(rescued.broken[: rescued.broken_at - 1])
    steps = len(rescued.cured)
    remedy = rescued.cure.text.splitlines()[0]
    text = f"Step {rescued.broken_at} in fp16 was not finite: {verdict.op} in module {verdict.module}, {verdict.line}."
    again = f", {rescued.cured_skipped} of them skipped" if rescued.cured_skipped else ""
    more = (
        f"Cause: {verdict.what}. Left as it was, {rescued.skipped} of the {steps} steps from there on were skipped.",
        f"Cure, {'verified by training on' if rescued.cure.verified else 'not verified'}: {remedy}. Under it the run "
        f"went on for {steps} steps{again}; mean loss of {ENDS} steps {last} before, {_end(rescued.cured)} at the end.",
    )
    return Fact("A run that went NaN, explained and cured", text, more, "good")


def _end(losses: Sequence[float]) -> str:
    last = [loss for loss in losses[-ENDS:] if math.isfinite(loss)]
    return f"{statistics.fmean(last):.2g}" if last else "not finite"


def _missing(units: hs.policy.Units, missing: Sequence[str]) -> Fact:
    words = [f"Not finished: {listed(list(missing))}."] if missing else []
    if units.device == "cpu":
        words.append("There is no GPU here: all numbers are of this CPU and are no evidence of a GPU's speed.")
        if not units.fp16:
            words.append("fp16 is emulated: its results are those of a GPU's units, its time is not.")
    words.append("Several devices were not tried.")
    text, *more = words
    return Fact("Not measured", text, tuple(more), "open" if missing else "")
