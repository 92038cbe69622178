"""Text: a plan as a sentence and as tables. In: plans. Out: what terminal, page and `print` show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep.advise.plan.drawing import drawing
from halfstep.advise.plan.fit import TOLERANCE, Largest, fit_of, gib
from halfstep.advise.plan.gpus import gpu_names
from halfstep.advise.plan.parts import PARTS
from halfstep.advise.plan.traffic import Sent
from halfstep.report import Cell, Table, judged, table

if TYPE_CHECKING:
    from halfstep.advise.plan.memory import MemoryPlan

__all__ = [
    "gpus_line", "label", "module_table", "part_table", "plan_text", "preset_table", "sent_table", "verdict",
]  # fmt: skip

INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


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


def part_table(plan: MemoryPlan) -> Table:
    """Return the bytes of each part between steps and at the peak, with their share of the peak, and their sum."""
    steady, peak = plan.by_part(peak=False), plan.by_part()
    rows = [
        (part, gib(steady.get(part, 0)), gib(peak.get(part, 0)), _share(peak.get(part, 0), plan.peak_bytes))
        for part in PARTS
        if steady.get(part) or peak.get(part)
    ]
    rows.append(("together", gib(plan.persistent_bytes), gib(plan.peak_bytes), ""))
    return table("By part", ("part", "between steps", "at the peak", "share"), rows)


def module_table(plan: MemoryPlan, count: int) -> Table:
    """Return the modules that weigh most at the peak: how many, what most of it is, bytes and share.

    Modules whose names differ in numbers alone are one row: ``blocks.*.mlp``.
    """
    sums: dict[str, dict[str, int]] = {}
    members: dict[str, set[str]] = {}
    for row in plan.peak:
        name = INDEX.sub("*", row.module) or "(model)"
        parts = sums.setdefault(name, {})
        parts[row.part] = parts.get(row.part, 0) + row.bytes
        members.setdefault(name, set()).add(row.module)
    rows = []
    for name in sorted(sums, key=lambda name: -sum(sums[name].values()))[:count]:
        part, size = max(sums[name].items(), key=lambda item: item[1])
        total = sum(sums[name].values())
        rows.append((name, str(len(members[name])), f"{part} {gib(size)}", gib(total), _share(total, plan.peak_bytes)))
    headers = ("modules", "number", "most of it", "at the peak", "share")
    return table("Modules that weigh most at the peak", headers, rows, words=(2,))


def sent_table(found: Sequence[Sent]) -> Table:
    """Return what the collectives of a step send, and their sum."""
    rows = [(one.collective, str(one.number), gib(one.put_in), gib(one.ring)) for one in found]
    if len(rows) > 1:
        number, put_in, ring = (sum(getattr(s, name) for s in found) for name in ("number", "put_in", "ring"))
        rows.append(("together", str(number), gib(put_in), gib(ring)))
    headers = ("collective", "number", "a device puts in", "it sends, in a ring")
    return table("Communication of a step", headers, rows)


def preset_table(plans: Sequence[MemoryPlan]) -> Table:
    """Return a row for each plan: its policy, the parts of the peak, and on a GPU the verdict and the largest batch."""
    headers = ["policy", "between steps", "weights at the peak", "optimizer state", "saved for backward", "the rest",
               "peak"]  # fmt: skip
    rows: list[list[str | Cell]] = []
    for plan in plans:
        peak = plan.by_part()
        kept = sum(peak.get(part, 0) for part in ("parameters", "precise values", "low copies", "gathered parameters"))
        state, saved = peak.get("optimizer state", 0), peak.get("saved for backward", 0)
        sizes = (plan.persistent_bytes, kept, state, saved, plan.peak_bytes - kept - state - saved, plan.peak_bytes)
        rows.append([label(plan), *map(gib, sizes)])
        if plan.fit is not None:
            largest = "" if plan.largest is None else _batch(plan.largest)
            rows[-1] += [judged(plan.fit.verdict), largest]
    if any(plan.fit is not None for plan in plans):
        headers += ["verdict", "largest batch"]
        rows = [row + [""] * (len(headers) - len(row)) for row in rows]
    return table("Every policy, bytes of a device", headers, rows)


def plan_text(plan: MemoryPlan) -> str:
    """Return a plan as text: the answer, its parts, the drawing of the peak."""
    rows = plan.table()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return "\n".join([f"{plan.name}, {label(plan)}: {verdict(plan)}", "", *lines, "", *drawing(plan)])


def _batch(largest: Largest) -> str:
    if largest.batch is None:
        return "any"
    return f"{largest.batch:,}" if largest.proved else f"{largest.batch:,} or more"


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.0f} %" if total else ""
