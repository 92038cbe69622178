"""Conclusions of the demo, as sentences with their numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import halfstep as hs
from halfstep.cli.pages.figures import interval
from halfstep.cli.pages.findings import findings
from halfstep.report import Fact, sentence
from halfstep.report.numbers import Size, listed
from halfstep.tasks.candidates import AMP, FP32
from halfstep.tasks.compare import Comparison
from halfstep.tasks.overflow import Rescue
from halfstep.tasks.pace import Pace
from halfstep.tasks.workloads import Workload

__all__ = ["conclusions"]

ENDS = 10  # steps whose mean loss stands for the end of a run


def conclusions(
    paces: Sequence[tuple[Workload, Pace]], rescued: Rescue | None, comparisons: Sequence[Comparison],
    units: hs.policy.Units, missing: Sequence[str],
) -> tuple[Fact, ...]:  # fmt: skip
    """Return what the finished parts show, and what was not measured."""
    facts = [_time(workload, made, units) for workload, made in paces]
    facts += _bytes(paces, units)
    facts += [_accuracy(made) for made in comparisons]
    if rescued is not None:
        facts.append(_rescue(rescued))
    return (*facts, _missing(units, missing))


def _time(workload: Workload, made: Pace, units: hs.policy.Units) -> Fact:
    timed = [(row.label, row.to_fp32) for row in made.rows if row.to_fp32 is not None]
    low = [(label, ratio) for label, ratio in timed if not _fp32(label)]
    slow = [row for row in made.rows if row.slow]
    least = min((row.slow for row in slow), default=0.0)
    without = "" if units.bf16 else f": {units.reason}"
    more = []
    text, tone = f"fp32 is fastest. A step of each low format took over {least:.0f} times as long{without}.", ""
    best = ""
    if low:
        best, ratio = min(low, key=lambda pair: pair[1].median)
        if ratio.finer_than(made.control):
            text, tone = f"Undecided: {best} comes first with {interval(ratio)} of fp32's time.", "open"
        elif ratio.median < 1.0:
            text, tone = f"{best} comes first: {interval(ratio)} of fp32's time.", "good"
        else:
            text, tone = f"fp32 is fastest. The nearest low format, {best}, takes {interval(ratio)} of its time.", ""
    for label, ratio in timed:
        if label == best or (not _fp32(label) and not label.startswith(AMP)):
            continue
        words = "halfstep's step in fp32 (O0)" if _fp32(label) else label
        finer = ratio.finer_than(made.control)
        more.append(f"{words}: {'undecided, ' if finer else ''}{interval(ratio)}.")
    if low and slow:
        names = listed([row.label for row in slow])
        more.append(f"A step took over {least:.0f} times fp32's, and was left out: {names}{without}.")
    more.append(sentence(workload.lesson))
    return Fact(f"Bound by {workload.bound_by}; {made.about}", text, tuple(more), tone)


def _fp32(label: str) -> bool:
    return label in (FP32, "O0")


def _bytes(paces: Sequence[tuple[Workload, Pace]], units: hs.policy.Units) -> list[Fact]:
    """Return the bytes between steps of the model with most parameters, and those for backward of the first."""
    found = [made for _, made in paces]
    if not found:
        return []
    heavy, deep = max(found, key=lambda made: made.parameters), max(found, key=lambda made: made.rows[0].saved_bytes)
    state = Size.of(row.state_bytes for row in heavy.rows)
    saved = Size.of(row.saved_bytes for row in deep.rows)
    least, slim = min(heavy.rows, key=lambda row: row.state_bytes), min(deep.rows, key=lambda row: row.saved_bytes)
    text = (
        f"{least.label} keeps {state(least.state_bytes)} {state.unit} of weights and optimizer states instead of "
        f"fp32's {state(heavy.rows[0].state_bytes)} ({heavy.about})."
    )
    amp = next(row for row in deep.rows if row.label.startswith(AMP))
    more = [
        f"Saved for backward: {slim.label} {saved(slim.saved_bytes)} {saved.unit}, {amp.label} "
        f"{saved(amp.saved_bytes)}, fp32 {saved(deep.rows[0].saved_bytes)} ({deep.about})."
    ]
    larger = [row for row in heavy.rows if row.state_bytes > 1.01 * heavy.rows[0].state_bytes]
    if larger:
        words = listed([f"{row.label} {state(row.state_bytes)} {state.unit}" for row in larger])
        more.append(f"More than fp32 between steps: {words} (low copies of the weights).")
    if not units.bf16:
        more.append("They are saved on any machine, also without units for bf16, as here.")
    return [Fact("Bytes, counted", text, tuple(more), "good")]


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
