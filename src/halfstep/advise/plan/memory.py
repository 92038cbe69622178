"""Memory: a plan as plain values, whether it fits a GPU and the largest batch that does, as text and as a page."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep import report as doc
from halfstep.advise.plan.ledger import PARTS, PHASES, PlanError, Sent
from halfstep.errors import did_you_mean
from halfstep.report import plain, write_page
from halfstep.schema import packaged_toml

GIB = 2**30

TOLERANCE = 0.1  # share of a planned peak by which the real one may differ; `tests/advise/plan` holds plans to it
MOST_PLANS = 12  # plans made in the search for the largest batch; four are enough where bytes are affine in the batch
MOST = 1 << 20  # the largest batch that is tried

CONTEXT = 0.6
"""GiB that a process takes besides what torch allocates: the driver's context and loaded kernels.

Seen: 0.25 GiB for a bare context on an RTX 3090 (https://github.com/invoke-ai/InvokeAI/issues/9413), 0.54 GiB on an
RTX PRO 6000 (https://github.com/ggml-org/llama.cpp/pull/23604), 0.6 GiB in logs of an H200. NCCL's buffers come on top.
"""

ALIASES = {"a100": "a100-80", "v100": "v100-32", "a10": "a10g"}
"""What a card of several sizes means without one: the larger; a verdict names the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, read from `gpus.toml`."""

    name: str  # as `hs.plan` takes it
    title: str  # the maker's name
    sold: float  # gigabytes, as advertised; 0 for a size given by hand
    total: float  # GiB that the driver gives to a process
    formats: tuple[str, ...]  # low formats with matrix units
    source: str = ""  # the maker's page
    seen: str = ""  # where `total` was printed

    @property
    def usable(self) -> int:
        """Return the bytes that torch can allocate: the total without the driver's context."""
        return int((self.total - CONTEXT) * GIB)


@cache
def _table() -> dict[str, Gpu]:
    rows = packaged_toml("advise/plan/gpus.toml")
    return {name: Gpu(name=name, **{**row, "formats": tuple(row["formats"])}) for name, row in rows.items()}


def gpu_names() -> tuple[str, ...]:
    """Return the names in the table."""
    return tuple(_table())


def gpu_named(name: str) -> Gpu:
    """Return the GPU called `name` in any case ("h200", "A100-80"), or one with a size given as "96GiB"."""
    wanted = re.sub(r"^((nvidia|amd|geforce|rtx|tesla|instinct)[ -]*)+", "", name.strip().lower())
    wanted = wanted.replace(" ", "-").removesuffix("gb")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in _table():
        return _table()[wanted]
    size = re.fullmatch(r"(\d+(?:\.\d+)?)-?gib", wanted)
    if size is not None and float(size[1]) > CONTEXT:
        return Gpu(name=name, title=f"a GPU with {size[1]} GiB", sold=0, total=float(size[1]), formats=("bf16", "fp16"))
    raise PlanError(
        f"unknown GPU {name!r}{did_you_mean(wanted, _table())}; there are {', '.join(_table())}, and a size such as "
        "96GiB for another one (what torch prints as its total capacity)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A plan beside a GPU."""

    gpu: str  # the GPU's name
    title: str  # the maker's name of it
    usable: int  # bytes that torch can allocate on it
    need: int  # bytes of the plan's highest point, preparation and first step included
    when: str  # that point: "step", "first step" or "preparation"
    verdict: str  # "fits" or "does not fit", if also for a peak a tenth higher or lower; else "undecided"

    @property
    def spare(self) -> int:
        """Return the bytes left at the highest point; negative if they are missing."""
        return self.usable - self.need


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest batch that fits."""

    batch: int | None  # 0 if a batch of one does not fit; None if none was found: the peak does not grow with it
    need: int  # bytes of its highest point; 0 without one
    plans: int  # how many plans were made to find it; both `batch` and `batch` + 1 were planned
    proved: bool  # `batch` + 1 was planned and does not fit. The search ends after 12 plans, and at 1,048,576


def fit_of(plan: MemoryPlan, gpu: Gpu | str) -> Fit:
    """Return whether `plan` fits `gpu`."""
    card = gpu_named(gpu) if isinstance(gpu, str) else gpu
    points = {"step": plan.peak_bytes, "first step": plan.first_peak, "preparation": plan.setup_peak}
    when, need = max(points.items(), key=lambda item: item[1])  # of equal ones the first
    verdict = "undecided"
    if need * (1 + TOLERANCE) <= card.usable:
        verdict = "fits"
    elif need * (1 - TOLERANCE) > card.usable:
        verdict = "does not fit"
    return Fit(gpu=card.name, title=card.title, usable=card.usable, need=need, when=when, verdict=verdict)


def largest_batch(plan_of: Callable[[int], MemoryPlan], first: MemoryPlan, batch: int, gpu: Gpu | str) -> Largest:
    """Return the largest batch that `fits`, planned and not extrapolated; `first` is the plan of `batch`, the start."""
    need = {batch: fit_of(first, gpu).need}
    room = fit_of(first, gpu).usable / (1 + TOLERANCE)

    def fits(size: int) -> bool:
        if size not in need:
            need[size] = fit_of(plan_of(size), gpu).need
        return need[size] <= room

    low, high = (batch, MOST + 1) if fits(batch) else (0, batch)
    other = 2 * batch if low else max(1, batch // 2)
    while high - low > 1 and len(need) < MOST_PLANS:
        low, high = (max(low, other), high) if fits(other) else (low, min(high, other))
        if low and need[low] <= need[min(need)] and low >= 2 * min(need) and high > MOST:
            return Largest(batch=None, need=need[low], plans=len(need), proved=False)
        other = _guess(need, room, low, high)
    proved = high - low == 1 and high <= MOST
    return Largest(batch=low, need=need.get(low, 0), plans=len(need), proved=proved)


def _guess(need: dict[int, int], room: float, low: int, high: int) -> int:
    # by the line through the two largest sizes that fit, if that stays below `high`: beyond the batch from which
    # activations make the peak, bytes are a line. Else by the line through `low` and `high`, or two that do not fit
    fitting = sorted(size for size in need if size <= low)[-2:]
    over = sorted(size for size in need if size >= high)[:2]
    for small, large in (pair for pair in (fitting, [low, high] if low and over else over) if len(pair) == 2):
        slope = (need[large] - need[small]) / (large - small)
        guess = int(small + (room - need[small]) / slope) if slope > 0 else high
        if guess < high:
            return max(guess, low + 1)
    return min(high - 1, MOST if high > MOST else (low + high) // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Memory of one part, module and format."""

    part: str  # one of `PARTS`
    module: str  # dotted name of the module that owns it or whose operator made it; "" for none or the model itself
    format: str  # number format, as "fp32", "bf16", "int64"
    bytes: int  # sum over its tensors' memory; memory shared by tensors counts once
    tensors: int  # blocks of memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The highest point of one stretch of a step."""

    phase: str  # one of `PHASES`
    operator: int  # number of operators run before it in this step
    name: str  # the operator that made the last block before it, such as "aten::mm"
    module: str  # dotted name of the module that was running, or whose backward pass was
    bytes: tuple[int, ...]  # of each part, in the order of `PARTS`

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of one training step, planned without it.

    Attributes:
        name: of the task or model.
        policy: the policy as it was resolved for the device.
        device: "cpu" or "cuda", whose operators and kernels were planned.
        parameters: elements of the model's parameters.
        operators: how many operators one step runs.
        persistent: what is there between two steps, batch included.
        peak: what is alive at the highest point of the steps.
        peak_at: when that is; in the first step only where `first_peak` is higher than the peak of the others.
        first_peak: bytes of the highest point of the first step, which makes the optimizer's state.
        setup_peak: bytes of the highest point before the first step, when model and optimizer are prepared.
        timeline: highest points of equally long stretches of a step after the first, in order.
        notes: what the plan does not include, one sentence each.
        devices: how many train together; the bytes are those of the first, which has the most.
        shard: "none", "ddp" or "fsdp2".
        replicas: how many groups of devices hold the whole model each.
        batch_size: the first dimension of the batch; 0 if it has none.
        sent: the collectives of a step.
        fit: whether it fits a GPU; None if none was named.
        largest: the largest batch that fits; None if it was not looked for.
    """

    name: str
    policy: hs.Policy
    device: str
    parameters: int
    operators: int
    persistent: tuple[Row, ...]
    peak: tuple[Row, ...]
    peak_at: Moment
    first_peak: int
    setup_peak: int
    timeline: tuple[Moment, ...]
    notes: tuple[str, ...] = ()
    devices: int = 1
    shard: str = "none"
    replicas: int = 1
    batch_size: int = 0
    sent: tuple[Sent, ...] = ()
    fit: Fit | None = None
    largest: Largest | None = None

    @property
    def persistent_bytes(self) -> int:
        """Bytes between two steps."""
        return sum(row.bytes for row in self.persistent)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest point of a step."""
        return sum(row.bytes for row in self.peak)

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of a step after the first, bytes."""
        found = dict.fromkeys(PHASES, 0)
        for moment in self.timeline:
            found[moment.phase] = max(found[moment.phase], moment.total)
        return found

    def by_part(self, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each of `PARTS` at the peak, or of what persists."""
        found = self._sums(lambda row: row.part, peak)
        return {part: found[part] for part in PARTS if part in found}

    def by_format(self, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each format, largest first."""
        return dict(self._sums(lambda row: row.format, peak).most_common())

    def by_module(self, depth: int | None = None, *, peak: bool = True) -> dict[str, int]:
        """Return the bytes of each module, largest first, by the first `depth` words of its dotted name; None: all."""
        return dict(self._sums(lambda row: ".".join(row.module.split(".")[:depth]), peak).most_common())

    def table(self) -> list[tuple[str, ...]]:
        """Return the parts as rows of text: headers first, then bytes between steps and at the peak, and the share."""
        return part_table(self).texts()

    def __str__(self) -> str:
        """Return the answer, the parts and the drawing of the peak as text."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
        notes = (f"- {note}" for note in self.notes)
        return "\n".join([f"{self.name}, {label(self)}: {verdict(self)}", *notes, "", *lines, "", *drawing(self)])

    def save_html(self, path: str | Path) -> None:
        """Write the plan as one HTML file with pictures that needs nothing else."""
        write_page(plan_page([self]), path)

    def record(self) -> dict[str, Any]:
        """Return everything as plain values for JSON, with the sums under "summary"."""
        return {
            "summary": {
                "persistent_bytes": self.persistent_bytes,
                "peak_bytes": self.peak_bytes,
                "persistent": self.by_part(peak=False),
                "peak": self.by_part(),
                "peak_formats": self.by_format(),
                "phase_peaks": self.phase_peaks(),
            },
            **plain(self),
        }

    def _sums(self, name_of: Callable[[Row], str], peak: bool) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.peak if peak else self.persistent:
            found[name_of(row)] += row.bytes
        return found


UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))

LETTERS = dict(zip(PARTS, "PVBOCAGSNIT", strict=True))  # of each part in the drawing
WIDTH, HEIGHT = 72, 14  # columns and lines of a drawing

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
    card = f"{'an' if fit.gpu[0] in 'ahlm8' else 'a'} {fit.gpu}"
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
    if plan.largest is None:
        return text
    if plan.largest.batch is None:
        return f"{text}; the peak does not grow with the batch"
    return f"{text}; {f'largest batch {_batch(plan.largest)}' if plan.largest.batch else 'no batch fits'}"


def gpus_line(plan: MemoryPlan) -> str:
    """Return which GPUs of the table a plan fits, for a plan without one."""
    found: dict[str, list[str]] = {"fits": [], "undecided": []}
    for name in gpu_names():
        found.setdefault(fit_of(plan, name).verdict, []).append(name)
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in found.items() if names)


def part_table(plan: MemoryPlan) -> doc.Table:
    """Return the bytes of each part between steps and at the peak, with their share of the peak, and their sum."""
    steady, peak = plan.by_part(peak=False), plan.by_part()
    rows = [
        (part, gib(steady.get(part, 0)), gib(peak.get(part, 0)), _share(peak.get(part, 0), plan.peak_bytes))
        for part in PARTS
        if steady.get(part) or peak.get(part)
    ]
    rows.append(("together", gib(plan.persistent_bytes), gib(plan.peak_bytes), ""))
    return doc.table("By part", ("part", "between steps", "at the peak", "share"), rows)


def module_table(plan: MemoryPlan, count: int) -> doc.Table:
    """Return the modules that weigh most at the peak; those whose names differ in numbers alone are one row."""
    sums: dict[str, Counter[str]] = {}
    members: dict[str, set[str]] = {}
    for row in plan.peak:
        name = INDEX.sub("*", row.module) or "(model)"
        sums.setdefault(name, Counter())[row.part] += row.bytes
        members.setdefault(name, set()).add(row.module)
    rows = []
    for name in sorted(sums, key=lambda name: -sums[name].total())[:count]:
        ((part, size),), total = sums[name].most_common(1), sums[name].total()
        rows.append((name, str(len(members[name])), f"{part} {gib(size)}", gib(total), _share(total, plan.peak_bytes)))
    headers = ("modules", "number", "most of it", "at the peak", "share")
    return doc.table("Modules that weigh most at the peak", headers, rows, words=(2,))


def sent_table(found: Sequence[Sent]) -> doc.Table:
    """Return what the collectives of a step send, and their sum."""
    rows = [(one.collective, str(one.number), gib(one.put_in), gib(one.ring)) for one in found]
    if len(rows) > 1:
        number, put_in, ring = (sum(getattr(s, name) for s in found) for name in ("number", "put_in", "ring"))
        rows.append(("together", str(number), gib(put_in), gib(ring)))
    headers = ("collective", "number", "a device puts in", "it sends, in a ring")
    return doc.table("Communication of a step", headers, rows)


def preset_table(plans: Sequence[MemoryPlan]) -> doc.Table:
    """Return a row for each plan: its policy, the parts of the peak, and on a GPU the verdict and the largest batch."""
    headers = ["policy", "between steps", "weights at the peak", "optimizer state", "saved for backward", "the rest",
               "peak"]  # fmt: skip
    rows: list[list[str | doc.Cell]] = []
    for plan in plans:
        peak = plan.by_part()
        kept = sum(peak.get(part, 0) for part in ("parameters", "precise values", "low copies", "gathered parameters"))
        state, saved = peak.get("optimizer state", 0), peak.get("saved for backward", 0)
        sizes = (plan.persistent_bytes, kept, state, saved, plan.peak_bytes - kept - state - saved, plan.peak_bytes)
        rows.append([label(plan), *map(gib, sizes)])
        if plan.fit is not None:
            largest = "" if plan.largest is None else _batch(plan.largest)
            rows[-1] += [doc.judged(plan.fit.verdict), largest]
    if any(plan.fit is not None for plan in plans):
        headers += ["verdict", "largest batch"]
        rows = [row + [""] * (len(headers) - len(row)) for row in rows]
    return doc.table("Every policy, bytes of a device", headers, rows)


def _batch(largest: Largest) -> str:
    if largest.batch is None:
        return "any"
    return f"{largest.batch:,}" if largest.proved else f"{largest.batch:,} or more"


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.0f} %" if total else ""


def unit_of(size: float) -> tuple[str, int]:
    """Return name and bytes of the unit that suits `size`: GiB as torch prints a GPU's memory, or less."""
    return next((unit for unit in UNITS if abs(size) >= unit[1]), ("B", 1))


def gib(size: float) -> str:
    """Return bytes for readers, with three digits."""
    unit, one = unit_of(size)
    number = size / one
    digits = 0 if one == 1 or abs(number) >= 100 else 2 if abs(number) < 10 else 1
    return f"{number:,.{digits}f} {unit}"


def drawing(plan: MemoryPlan, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Return the step as lines of text: time to the right in stretches at their highest, bytes upwards, by part."""
    columns = _columns(plan.timeline, width)
    if not columns:
        return []
    top = max(moment.total for moment in columns)
    peak = [moment.total for moment in columns].index(top)
    stacks = [_stack(moment, top, height) for moment in columns]
    label = gib(top).rjust(10)
    lines = [f"{label if line == height - 1 else ' ' * 10} |{''.join(s[line] for s in stacks).rstrip()}"
             for line in reversed(range(height))]  # fmt: skip
    letters = ", ".join(f"{LETTERS[part]} {part}" for part in _used(columns))
    below = (_axis(columns), f"{' ' * peak}^ peak: {_place(plan.peak_at)}", letters)
    return [*lines, f"{'0'.rjust(10)} +{'-' * len(columns)}", *(f"{' ' * 12}{line}" for line in below)]


def _used(moments: Sequence[Moment]) -> list[str]:
    return [part for n, part in enumerate(PARTS) if any(moment.bytes[n] for moment in moments)]


def _place(moment: Moment) -> str:
    where = f"{moment.phase}, {moment.name.removeprefix('aten::')}" if moment.name else moment.phase
    return f"{where} of {moment.module}" if moment.module else where


def figure(plan: MemoryPlan, limit: int = 0, label: str = "") -> doc.Figure:
    """Return the step as a picture; `limit`: bytes of the GPU called `label`, drawn as a line; 0 for none."""
    at = tuple(float(moment.operator) for moment in plan.timeline)
    unit, one = unit_of(plan.peak_at.total)
    series = []
    for n, part in enumerate(_used(plan.timeline)):
        amounts = tuple(moment.bytes[PARTS.index(part)] / one for moment in plan.timeline)
        series.append(doc.Series(part, at, amounts, key=doc.Key(n % 6 + 1, n >= 6)))  # six hues, then the same paler
    line = f" The dashed line is what torch can allocate on {label}." if limit else ""
    return doc.Figure(
        "Memory of a step",
        "From left to right the operators of one step after the first: forward, backward, update; "
        f"{unit} alive, by part. Its highest point, {gib(plan.peak_at.total)}, is in {_place(plan.peak_at)}.{line}",
        f"Memory over a step; highest point {gib(plan.peak_at.total)} in {_place(plan.peak_at)}.",
        doc.AreaChart("operators run", tuple(series), limit / one if limit else None),
    )


def _columns(timeline: Sequence[Moment], width: int) -> list[Moment]:
    if len(timeline) <= width:
        return list(timeline)
    found: list[Moment] = []
    for phase in PHASES:
        those = [moment for moment in timeline if moment.phase == phase]
        count = min(len(those), max(1, round(width * len(those) / len(timeline))))
        ends = [n * len(those) // count for n in range(count + 1)] if count else []
        found += [max(those[a:b], key=lambda moment: moment.total) for a, b in pairwise(ends)]
    return found


def _stack(moment: Moment, top: int, height: int) -> str:
    ends = list(accumulate(moment.bytes))
    places = (bisect_left(ends, (line + 0.5) / height * top) for line in range(height))
    return "".join(LETTERS[PARTS[place]] if place < len(PARTS) else " " for place in places)


def _axis(columns: Sequence[Moment]) -> str:
    line = ""
    for phase in PHASES:
        first = next((n for n, moment in enumerate(columns) if moment.phase == phase), None)
        if first is not None:
            line = f"{line[: max(first - 1, 0)]:<{first}}{phase}"
    return line


MODULES = 20  # rows of the table of modules: a screen


def plan_page(plans: Sequence[MemoryPlan]) -> doc.Document:
    """Return the report of plans of one task and GPU under several policies; the first is shown in full."""
    plan = plans[0]
    groups = f" in {plan.replicas} groups" if plan.replicas > 1 else ""
    where = f" on {plan.devices} devices{groups}, {plan.shard}" if plan.devices > 1 else ""
    how = doc.method("plan", tolerance=f"{100 * TOLERANCE:.0f}")
    planned = doc.Paragraph(f"Planned for the operators of a {plan.device} device: {plan.operators:,} a step.")
    policy = doc.hidden("The policy", plan.policy.to_toml())
    return doc.page(
        f"halfstep plan: {plan.name}, {label(plan)}",
        f"The memory of a training step, planned without it: {plan.parameters:,} parameters{where}.",
        (
            _answer(plan),
            doc.Section("Policies", (preset_table(plans),) if len(plans) > 1 else ()),
            _pictures(plans),
            _tables(plan),
            doc.Section("How it was planned", (how, planned, policy)),
        ),
    )


def _answer(plan: MemoryPlan) -> doc.Section:
    more = () if plan.fit is not None else (f"{gpus_line(plan)}.",)
    tone = "" if plan.fit is None else doc.TONES[plan.fit.verdict]
    notes = [doc.Bullets(plan.notes)] if plan.notes else []
    return doc.Section("Answer", (doc.Facts((doc.Fact(label(plan), doc.sentence(verdict(plan)), more, tone),)), *notes))


def _pictures(plans: Sequence[MemoryPlan]) -> doc.Section:
    plan = plans[0]
    limit = plan.fit.usable if plan.fit is not None else 0
    if limit >= 3 * max(one.peak_bytes for one in plans):  # a line far above would flatten the pictures
        limit = 0
    made = figure(plan, limit, plan.fit.gpu if plan.fit is not None else "")
    assert isinstance(made.chart, doc.AreaChart)
    legend = tuple((one.label, one.key) for one in made.chart.series)
    peaks = (_peaks(plans, limit),) if len(plans) > 1 else ()
    return doc.Section("Where the peak is", (doc.Gallery((made, *peaks), legend),))


def _peaks(plans: Sequence[MemoryPlan], limit: int) -> doc.Figure:
    unit, one = unit_of(max(plan.peak_bytes for plan in plans))
    peaks = ((label(plan), plan.peak_bytes) for plan in plans)
    bars = tuple(doc.Bar(name, gib(peak), peak / one, key=doc.Key(colour=1)) for name, peak in peaks)
    return doc.Figure(
        "Peak of a step under each policy",
        "On one device." + (" Dashed: what torch can allocate." if limit else ""),
        doc.spoken("Peaks", bars),
        doc.BarChart(unit, bars, line=limit / one if limit else None),
    )


def _tables(plan: MemoryPlan) -> doc.Section:
    formats = ((name, gib(size)) for name, size in plan.by_format().items())
    by_format = doc.table("By format, at the peak", ("format", "bytes"), formats)
    sent = [sent_table(plan.sent)] if plan.sent else []
    return doc.Section("What it is made of", [part_table(plan), module_table(plan, MODULES), by_format, *sent])
