"""Text: a search for people: the policy's TOML with comments, and a summary of lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from halfstep.tasks.candidates import FP32
from halfstep.timing import Ratio

if TYPE_CHECKING:
    from halfstep.advise.tune.result import Tried, Tuning

__all__ = ["commented", "size", "summary"]

UNITS = (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000), ("B", 1))

WIDTH = 110
"""Columns of a comment."""


def commented(tuning: Tuning) -> str:
    """Return the policy as TOML with comments on why it is as it is and on what was rejected."""
    lines = [line for text in _head(tuning) for line in _comment(text)]
    lines += ["", tuning.policy.to_toml().rstrip(), ""]
    lines += [line for text in _rejected(tuning) for line in _comment(text)]
    return "\n".join(lines).rstrip() + "\n"


def summary(tuning: Tuning) -> str:
    """Return the same without the policy's fields, for a terminal."""
    return "\n".join([*_head(tuning), *_rejected(tuning)])


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return [f"# {line}".rstrip() for line in wrapped or [""]]


def _head(tuning: Tuning) -> Iterator[str]:
    chosen, here = tuning.chosen, tuning.machine
    yield f"{chosen.label} for the task {tuning.task}, found by halfstep tune; target {tuning.target}"
    if tuning.command:
        yield f"command: {tuning.command}"
    on = f", {here['accelerator']}" if here["accelerator"] else ""
    yield (
        f"machine: {here['cpu']}, {here['cores']} cores, torch {here['torch']} with {here['torch_threads']} threads"
        f"{on}; device {tuning.device}"
    )
    yield f"chosen: {chosen.reason}"
    yield f"time: {_time(chosen, tuning.control)}"
    fp32 = tuning.fp32
    if chosen.bytes and fp32.bytes:
        predicted = ""
        if chosen.predicted_bytes:
            predicted = f"; predicted {size(chosen.predicted_bytes)} together, counted {size(chosen.bytes)}"
        yield (
            f"memory: {size(chosen.state_bytes)} between steps (fp32 {size(fp32.state_bytes)}), "
            f"{size(chosen.saved_bytes)} kept for the backward pass (fp32 {size(fp32.saved_bytes)}){predicted}"
        )
    if not math.isnan(chosen.error):
        rise = "unknown" if math.isnan(chosen.loss_rise) else f"{100 * chosen.loss_rise:+.2f} %"
        yield f"error of the gradients: {chosen.error:.2g}; loss after {tuning.steps} steps {rise} beside fp32's"
    if tuning.compile:
        yield "compile: give it to hs.TrainStep(..., compile=True), as it was measured"
    for change in chosen.changes:
        yield f"{change}: {change.why}"
    for line in tuning.advice:
        yield f"advice: {line}"
    for note in tuning.notes:
        yield f"note: {note}"


def _time(tried: Tried, control: Ratio | None) -> str:
    if tried.time is None:
        return "not measured"
    words = f"{_ratio(tried.time)} of fp32's, {tried.milliseconds:.3g} ms a step"
    if not math.isnan(tried.predicted):
        words += f" (predicted {tried.predicted:.3f})"
    return words + (f"; fp32 beside itself {_ratio(control)}" if control is not None else "")


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def size(count: int) -> str:
    """Return a number of bytes with three digits."""
    unit, divisor = next((pair for pair in UNITS if count >= pair[1]), UNITS[-1])
    return f"{count / divisor:.3g} {unit}"


def _rejected(tuning: Tuning) -> Iterator[str]:
    others = [tried for tried in tuning.tried if tried.label not in {FP32, tuning.chosen.label}]
    if not others:
        return
    yield "tried and not chosen (time over fp32's; error of the gradients; why):"
    for tried in others:
        time = "" if tried.time is None else f"{tried.time.median:.3f}; "
        error = "" if math.isnan(tried.error) else f"{tried.error:.2g}; "
        why = tried.reason or "not measured"
        yield f"  {tried.label}: {time}{error}{tried.verdict}{f': {why}' if why != tried.verdict else ''}"
