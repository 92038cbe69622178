"""The page of a plan: the verdict, the drawing of the peak, parts and modules as tables, policies side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfstep.advise.plan.drawing import figure
from halfstep.advise.plan.fit import TOLERANCE, gib, unit_of
from halfstep.advise.plan.memory import MemoryPlan
from halfstep.advise.plan.words import (
    MODULE_HEADERS,
    PART_HEADERS,
    PRESET_HEADERS,
    SENT_HEADERS,
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
    "The step ran on tensors without memory: every operator of forward and backward pass and update, under the policy, "
    "with the shapes and formats that it would have. Each block of memory was followed from its allocation to its end.",
    f"Plans are within {100 * TOLERANCE:.0f} % of what is counted in real steps, and what persists within 3 %. A "
    "verdict holds for a peak that much higher or lower, else it is undecided.",
    "Not included: the driver's context (taken off the GPU's memory), buffers of NCCL, workspaces of cuDNN, and holes "
    "between blocks of torch's allocator.",
)


def plan_page(plans: Sequence[MemoryPlan]) -> Document:
    """Return the report of plans of one task and GPU under several policies; the first is shown in full."""
    plan = plans[0]
    sections = [_answer(plan)]
    if len(plans) > 1:
        sections.append(_policies(plans))
    sections += [_pictures(plans), _tables(plan), _method(plan)]
    where = f" on {plan.devices} devices, {plan.shard}" if plan.devices > 1 else ""
    return Document(
        title=f"halfstep plan: {plan.name}, {label(plan)}",
        lead=f"The memory of a training step, planned without it: {plan.parameters:,} parameters{where}.",
        sections=tuple(sections),
        footer="Made by halfstep. This file is complete: it loads nothing and runs no script.",
    )


def _answer(plan: MemoryPlan) -> Section:
    text, fit = verdict(plan), plan.fit
    more = () if fit is not None else (f"{gpus_line(plan)}.",)
    tone = "" if fit is None else TONES[fit.verdict]
    fact = Fact(heading=label(plan), text=f"{text[0].upper()}{text[1:]}.", more=more, tone=tone)
    blocks: list[Block] = [Facts(facts=(fact,))]
    if plan.notes:
        blocks.append(Bullets(items=plan.notes))
    return Section(heading="Answer", blocks=tuple(blocks))


def _policies(plans: Sequence[MemoryPlan]) -> Section:
    fit = plans[0].fit
    headers = PRESET_HEADERS if fit is not None else PRESET_HEADERS[:7]
    table = _table("Every policy, bytes of a device", headers, preset_rows(plans))
    return Section(heading="Policies", blocks=(table,))


def _pictures(plans: Sequence[MemoryPlan]) -> Section:
    """Return the step of the first plan as a picture, and the peaks of several beside it."""
    plan = plans[0]
    limit = plan.fit.usable if plan.fit is not None else 0
    near = limit < 3 * max(one.peak_bytes for one in plans)  # a line far above would flatten the pictures
    made = figure(plan, limit if near else 0, plan.fit.gpu if plan.fit is not None else "")
    series: tuple[Series, ...] = made.chart.series  # type: ignore[union-attr]  # an AreaChart
    legend = tuple((one.label, one.key) for one in series)
    figures = (made, _peaks(plans, limit if near else 0)) if len(plans) > 1 else (made,)
    return Section(heading="Where the peak is", blocks=(Gallery(figures=figures, legend=legend),))


def _peaks(plans: Sequence[MemoryPlan], limit: int) -> Figure:
    unit, one = unit_of(max(plan.peak_bytes for plan in plans))
    bars = tuple(
        Bar(label=label(plan), text=gib(plan.peak_bytes), value=plan.peak_bytes / one, key=Key(colour=1))
        for plan in plans
    )
    return Figure(
        heading="Peak of a step under each policy",
        caption="On one device." + (" Dashed: what torch can allocate." if limit else ""),
        alt="Peaks: " + ", ".join(f"{bar.label} {bar.text}" for bar in bars),
        chart=BarChart(x_label=unit, bars=bars, line=limit / one if limit else None),
    )


def _tables(plan: MemoryPlan) -> Section:
    formats = [(name, gib(size)) for name, size in plan.by_format().items()]
    blocks: list[Block] = [
        _table("By part", PART_HEADERS, part_rows(plan)),
        _table("Modules that weigh most at the peak", MODULE_HEADERS, module_rows(plan, MODULES)),
        _table("By format, at the peak", ("format", "bytes"), formats),
    ]
    if plan.sent:
        blocks.append(_table("Communication of a step", SENT_HEADERS, sent_rows(plan.sent)))
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
