"""Findings of a comparison in words: what became of the result, what is fastest, what is smallest, how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.cli.pages.figures import amp_label, interval
from halfstep.report import Fact
from halfstep.report.numbers import Size, listed
from halfstep.tasks.candidates import FP32
from halfstep.tasks.compare import CandidateRow, Comparison
from halfstep.timing import Ratio

__all__ = ["findings"]

SAME = "as much as fp32"
ALIKE = 1.01  # bytes that differ by less are not worth a decision


def findings(comparison: Comparison) -> tuple[Fact, ...]:
    """Return what the comparison found about result, time and memory."""
    return _result(comparison), _time(comparison), _memory(comparison)


def _result(comparison: Comparison) -> Fact:
    others = [row for row in comparison.rows if row.label != FP32]
    groups: dict[str, list[str]] = {}
    for row in others:
        groups.setdefault(row.difference.verdict, []).append(row.label)
    same = groups.pop("within noise", [])
    if len(same) == len(others) == 1:
        text = f"{same[0]} ends within noise of fp32."
    elif len(same) == len(others):
        text = f"All {len(others)} end within noise of fp32."
    elif same:
        text = f"{len(same)} of {len(others)} end within noise of fp32: {listed(same)}."
    elif set(groups) == {"undecided"}:
        del groups["undecided"]
        one = len(comparison.seeds) == 1
        text = f"Undecided: {'one seed has no interval' if one else 'the intervals cross the margin'}."
    else:
        text = "None is within noise of fp32."
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


def _time(comparison: Comparison) -> Fact:
    control, amp = comparison.control, amp_label(comparison.rows)
    heading = "Time of a step"
    if control is None:
        return Fact(heading, "Not measured: a run is too short for more than its warm-up.", tone="open")
    timed = [(row, row.to_fp32) for row in comparison.rows if row.to_fp32 is not None]
    fastest, ratio = min(timed, key=lambda pair: pair[1].median)
    found = f"{interval(ratio)} of fp32's time"
    if ratio.finer_than(control):
        text = f"Undecided: {fastest.label} comes first with {found}, which this machine cannot tell from 1."
        tone = "open"
    elif ratio.median > 1.0:
        text, tone = f"None is faster than fp32. The nearest is {fastest.label}: {found}.", "bad"
    else:
        text, tone = f"Fastest: {fastest.label}, {found}.", "good"
    more = []
    alike = [row.label for row, other in timed if row is not fastest and _alike(other, ratio, control)]
    if alike:
        more.append(f"Cannot be told from it: {listed(alike)}.")
    if fastest.to_amp is not None:
        finer = ", undecided" if fastest.to_amp.finer_than(control) else ""
        more.append(f"Against {amp}: {fastest.to_amp.median:.2f}{finer}.")
    more += _caution(fastest, [(row, other.median) for row, other in timed])
    return Fact(heading, text, tuple(more), tone)


def _alike(ratio: Ratio, other: Ratio, control: Ratio) -> bool:
    """Return whether two ratios to the same baseline differ by less than can be resolved."""
    resolution = max(abs(control.low - 1.0), abs(control.high - 1.0))
    return (ratio.low <= other.high and other.low <= ratio.high) or abs(ratio.median / other.median - 1.0) <= resolution


def _caution(best: CandidateRow, costs: Sequence[tuple[CandidateRow, float]]) -> list[str]:
    """Return a warning if the cheapest row did not keep the result, with the cheapest that did; `costs`: of each."""
    if best.difference.verdict in ("within noise", "better"):
        return []
    safe = [(cost, row.label) for row, cost in costs if row.difference.verdict == "within noise"]
    first = f" First within noise of fp32: {min(safe, key=lambda pair: pair[0])[1]}." if safe else ""
    return [f"Its result is {best.difference.verdict}.{first}"]


def _memory(comparison: Comparison) -> Fact:
    fp32 = comparison.rows[0]
    others = [row for row in comparison.rows if row.label != FP32]
    least = min(others, key=lambda row: row.saved_bytes)
    alike = [row.label for row in others if row.saved_bytes <= ALIKE * least.saved_bytes]
    size = Size.of(row.saved_bytes for row in comparison.rows)
    share = _change(least.saved_bytes, fp32.saved_bytes)
    text = f"Least saved for backward: {listed(alike)}, {size(least.saved_bytes)} {size.unit} ({share})."
    if least.saved_bytes >= fp32.saved_bytes:
        text = f"None saves less for backward than fp32's {size(fp32.saved_bytes)} {size.unit}."
    more = _caution(least, [(row, row.saved_bytes) for row in others]) if len(alike) == 1 else []
    groups: dict[str, list[str]] = {}
    for row in sorted(others, key=lambda row: row.state_bytes):
        groups.setdefault(_change(row.state_bytes, fp32.state_bytes), []).append(row.label)
    more += [f"Between steps {change}: {listed(labels)}." for change, labels in groups.items() if change != SAME]
    if set(groups) == {SAME}:
        more.append("Between steps all hold as much as fp32.")
    tone = "good" if least.saved_bytes < fp32.saved_bytes else "open"
    return Fact("Memory", text, tuple(more), tone)


def _change(count: int, reference: int) -> str:
    """Return the difference in whole per cent."""
    change = round(100 * (count / reference - 1)) if reference else 0
    return f"{abs(change)} % {'more' if change > 0 else 'less'} than fp32" if change else SAME
