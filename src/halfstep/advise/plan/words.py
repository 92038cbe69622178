"""Words: a plan as a sentence and as rows of text. In: plans. Out: strings for terminal, page and `print`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from halfstep.advise.plan.fit import TOLERANCE, Largest, fit_of, gib
from halfstep.advise.plan.gpus import gpu_names
from halfstep.advise.plan.memory import PARTS, MemoryPlan
from halfstep.advise.plan.traffic import Sent

__all__ = [
    "MODULE_HEADERS", "PART_HEADERS", "PRESET_HEADERS", "SENT_HEADERS", "gpus_line", "label", "module_rows",
    "part_rows", "plan_text", "preset_rows", "sent_rows", "verdict",
]  # fmt: skip

INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

Rows = list[tuple[str, ...]]


def label(plan: MemoryPlan) -> str:
    """Return the policy's name with its low format."""
    policy = plan.policy
    return policy.name if policy.dtype == "fp32" else f"{policy.name} {policy.dtype}"


def verdict(plan: MemoryPlan) -> str:
    """Return the answer in one sentence."""
    fit = plan.fit
    each = f" on each of {plan.devices} devices" if plan.devices > 1 else ""
    if fit is None:
        return f"needs {gib(plan.peak_bytes)} at its peak and {gib(plan.persistent_bytes)} between steps{each}"
    card = _with_article(fit.gpu)
    at = "" if fit.when == "step" else f" in the {fit.when}" if fit.when == "first step" else " in preparation"
    if fit.verdict == "fits":
        text = f"fits {card} with {gib(fit.spare)} to spare{each}: peak{at} {gib(fit.need)} of {gib(fit.usable)}"
    elif fit.verdict == "does not fit":
        text = f"does not fit {card}{each}: peak{at} {gib(fit.need)}, and {gib(fit.usable)} can be allocated"
    else:
        text = (
            f"undecided for {card}{each}: peak{at} {gib(fit.need)} of {gib(fit.usable)}, and a plan may be "
            f"{100 * TOLERANCE:.0f} % off"
        )
    return f"{text}; {_largest_words(plan.largest)}" if plan.largest is not None else text


def _with_article(gpu: str) -> str:
    """Return "an h100" or "a t4"."""
    return f"{'an' if gpu[0] in 'ahlm8' else 'a'} {gpu}"


def _largest_words(largest: Largest) -> str:
    """Return the largest batch in words."""
    if largest.batch is None:
        return "the peak does not grow with the batch"
    if not largest.batch:
        return "no batch fits"
    more = "" if largest.proved else " or more"
    return f"largest batch {largest.batch:,}{more}"


def gpus_line(plan: MemoryPlan) -> str:
    """Return which GPUs of the table a plan fits, for a plan without one."""
    found: dict[str, list[str]] = {"fits": [], "undecided": []}
    for name in gpu_names():
        found.setdefault(fit_of(plan, name).verdict, []).append(name)
    parts = [f"{verdict}: {', '.join(names)}" for verdict, names in found.items() if names]
    return "; ".join(parts)


def part_rows(plan: MemoryPlan) -> Rows:
    """Return (part, between steps, at the peak, share of the peak), and their sum."""
    steady, peak = plan.by_part(peak=False), plan.by_part()
    rows = [
        (part, gib(steady.get(part, 0)), gib(peak.get(part, 0)), _share(peak.get(part, 0), plan.peak_bytes))
        for part in PARTS
        if steady.get(part) or peak.get(part)
    ]
    return [*rows, ("together", gib(plan.persistent_bytes), gib(plan.peak_bytes), "")]


def module_rows(plan: MemoryPlan, count: int) -> Rows:
    """Return (modules, how many, what most of it is, at the peak, share) of those that weigh most at the peak.

    Modules whose names differ in numbers alone are one row: ``blocks.*.mlp``.
    """
    sums: dict[str, dict[str, int]] = {}
    members: dict[str, set[str]] = {}
    for row in plan.peak:
        name = INDEX.sub("*", row.module) or "(model)"
        parts = sums.setdefault(name, {})
        parts[row.part] = parts.get(row.part, 0) + row.bytes
        members.setdefault(name, set()).add(row.module)
    order = sorted(sums, key=lambda name: -sum(sums[name].values()))
    rows: Rows = []
    for name in order[:count]:
        most, size = max(sums[name].items(), key=lambda item: item[1])
        total = sum(sums[name].values())
        rows.append((name, str(len(members[name])), f"{most} {gib(size)}", gib(total), _share(total, plan.peak_bytes)))
    return rows


def sent_rows(found: Sequence[Sent]) -> Rows:
    """Return (collective, number, put in, sent in a ring) a step, and their sum."""
    rows: Rows = [(one.collective, str(one.number), gib(one.put_in), gib(one.ring)) for one in found]
    if len(rows) > 1:
        rows.append(("together", str(sum(s.number for s in found)), gib(sum(s.put_in for s in found)),
                     gib(sum(s.ring for s in found))))  # fmt: skip
    return rows


def preset_rows(plans: Sequence[MemoryPlan]) -> Rows:
    """Return a row for each plan: policy, parameters to temporaries at the peak, peak, verdict, largest batch."""
    rows: Rows = []
    for plan in plans:
        peak = plan.by_part()
        kept = sum(peak.get(part, 0) for part in ("parameters", "precise values", "low copies", "gathered parameters"))
        state, saved = peak.get("optimizer state", 0), peak.get("saved for backward", 0)
        rest = plan.peak_bytes - kept - state - saved
        row = [
            label(plan),
            gib(plan.persistent_bytes),
            gib(kept),
            gib(state),
            gib(saved),
            gib(rest),
            gib(plan.peak_bytes),
        ]
        if plan.fit is not None:
            row.append(plan.fit.verdict)
            row.append("" if plan.largest is None else _batch(plan.largest))
        rows.append(tuple(row))
    return rows


PART_HEADERS = ("part", "between steps", "at the peak", "share")
MODULE_HEADERS = ("modules", "number", "most of it", "at the peak", "share")
SENT_HEADERS = ("collective", "number", "a device puts in", "it sends, in a ring")
PRESET_HEADERS = (
    "policy", "between steps", "weights at the peak", "optimizer state", "saved for backward", "the rest", "peak",
    "verdict", "largest batch",
)  # fmt: skip


def plan_text(plan: MemoryPlan) -> str:
    """Return a plan as text: the answer, its parts, the drawing of the peak."""
    from halfstep.advise.plan.drawing import drawing

    rows = [PART_HEADERS, *part_rows(plan)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(PART_HEADERS))]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    head = f"{plan.name}, {label(plan)}: {verdict(plan)}"
    return "\n".join([head, "", *table, "", *drawing(plan)])


def _batch(largest: Largest) -> str:
    if largest.batch is None:
        return "any"
    return f"{largest.batch:,}" if largest.proved else f"{largest.batch:,} or more"


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.0f} %" if total else ""
