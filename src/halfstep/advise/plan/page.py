"""The page of a plan: the verdict, the drawing of the peak, parts and modules as tables, policies side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfstep.advise.plan.drawing import figure, keys
from halfstep.advise.plan.fit import TOLERANCE, Fit, Largest, gib
from halfstep.advise.plan.memory import MemoryPlan
from halfstep.advise.plan.words import (
    PRESET_HEADERS,
    gpus_line,
    label,
    module_rows,
    part_rows,
    preset_rows,
    sent_rows,
    verdict,
)
from halfstep.report import (
    Bar,
    BarChart,
    Block,
    Bullets,
    Cell,
    Code,
    Details,
    Document,
    Fact,
    Facts,
    Figure,
    Gallery,
    Key,
    Paragraph,
    Section,
    Series,
    Table,
)

__all__ = ["plan_page"]

TONES = {"fits": "good", "undecided": "open", "does not fit": "bad"}
MODULES = 20

METHOD = (
    "The step ran on tensors without memory: every operator of forward pass, backward pass and update, under the policy, "
    "with the shapes and formats that it would have. Each block of memory was followed from its allocation to its end.",
    f"Plans are within {TOLERANCE:.0%} of what is counted in real steps, and what persists within 3 %. A verdict holds "
    "for a peak that much higher or lower, else it is undecided.",
    "Not included: the driver's context (taken off the GPU's memory), buffers of NCCL, workspaces of cuDNN, and holes "
    "between blocks of torch's allocator.",
)


def plan_page(
    plans: Sequence[MemoryPlan], fits: Sequence[Fit | None], largest: Sequence[Largest | None]
) -> Document:
    """Return the report of plans of one task under several policies; the first is shown in full."""
    plan, fit = plans[0], fits[0]
    sections = [_answer(plan, fit, largest[0])]
    if len(plans) > 1:
        sections.append(_policies(plans, fits, largest))
    sections += [_drawing(plan, fit), _tables(plan), _method(plan)]
    where = f" on {plan.devices} devices, {plan.shard}" if plan.devices > 1 else ""
    return Document(
        title=f"halfstep plan: {plan.name}, {label(plan)}",
        lead=f"The memory of a training step, planned without it: {plan.parameters:,} parameters{where}.",
        sections=tuple(sections),
        footer="Made by halfstep. This file is complete: it loads nothing and runs no script.",
    )


def _answer(plan: MemoryPlan, fit: Fit | None, largest: Largest | None) -> Section:
    text = verdict(plan, fit, largest)
    more = () if fit is not None else (f"{gpus_line(plan)}.",)
    tone = "" if fit is None else TONES[fit.verdict]
    fact = Fact(heading=label(plan), text=f"{text[0].upper()}{text[1:]}.", more=more, tone=tone)
    blocks: list[Block] = [Facts(facts=(fact,))]
    if plan.notes:
        blocks.append(Bullets(items=plan.notes))
    return Section(heading="Answer", blocks=tuple(blocks))


def _policies(plans: Sequence[MemoryPlan], fits: Sequence[Fit | None], largest: Sequence[Largest | None]) -> Section:
    headers = PRESET_HEADERS if fits[0] is not None else PRESET_HEADERS[:7]
    table = _table("Every policy, bytes of a device", headers, preset_rows(plans, fits, largest))
    line = None if fits[0] is None else fits[0].usable / 2**30
    bars = tuple(
        Bar(label=label(plan), text=gib(plan.peak_bytes), value=plan.peak_bytes / 2**30, key=Key(colour=1))
        for plan in plans
    )
    picture = Figure(
        heading="Peak of a step",
        caption="GiB on a device." + ("" if line is None else " Dashed: what torch can allocate."),
        alt="Peaks: " + ", ".join(f"{bar.label} {bar.text}" for bar in bars),
        chart=BarChart(x_label="GiB", bars=bars, line=line),
    )
    return Section(heading="Policies", blocks=(table, Gallery(figures=(picture,))))


def _drawing(plan: MemoryPlan, fit: Fit | None) -> Section:
    near = fit is not None and fit.usable < 3 * plan.peak_bytes  # a line far above would flatten the picture
    made = figure(plan, fit.usable if fit is not None and near else 0, fit.gpu if fit is not None else "")
    series: tuple[Series, ...] = made.chart.series  # type: ignore[union-attr]
    legend = tuple((one.label, key) for one, key in zip(series, keys([s.label for s in series]), strict=True))
    return Section(heading="Where the peak is", blocks=(Gallery(figures=(made,), legend=legend),))


def _tables(plan: MemoryPlan) -> Section:
    formats = [(name, gib(size)) for name, size in plan.by_format().items()]
    blocks: list[Block] = [
        _table("By part", ("part", "between steps", "at the peak", "share"), part_rows(plan)),
        _table("Modules that weigh most at the peak", ("modules", "number", "most of it", "at the peak", "share"),
               module_rows(plan, MODULES)),
        _table("By format, at the peak", ("format", "bytes"), formats),
    ]  # fmt: skip
    if plan.sent:
        headers = ("collective", "number", "a device puts in", "it sends, in a ring")
        blocks.append(_table("Communication of a step", headers, sent_rows(plan.sent)))
    return Section(heading="What it is made of", blocks=tuple(blocks))


def _method(plan: MemoryPlan) -> Section:
    text = plan.policy.to_toml().strip()
    blocks: tuple[Block, ...] = (
        Bullets(items=METHOD),
        Paragraph(text=f"Planned for the operators of a {plan.device} device: {plan.operators:,} a step."),
        Details(summary="The policy", blocks=(Code(text=text),)),
    )
    return Section(heading="How it was planned", blocks=blocks)


def _table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = tuple(tuple(Cell(text=word, tone=TONES.get(word, "")) for word in row) for row in rows)
    return Table(caption=caption, headers=tuple(headers), rows=made)
