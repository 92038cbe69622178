"""The page of a plan: the verdict, the drawing of the peak, parts and modules as tables, policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep import report as doc
from halfstep.advise.plan import text
from halfstep.advise.plan.fit import TOLERANCE
from halfstep.advise.plan.text import gib, label, verdict

if TYPE_CHECKING:
    from halfstep.advise.plan.memory import MemoryPlan

__all__ = ["plan_page"]

MODULES = 20
"""Rows of the table of modules: a screen."""

METHOD = (
    "The step ran on tensors without memory: every operator of forward and backward pass and update, under the policy, "
    "with the shapes and formats that it would have. Each block of memory was followed from its allocation to its end.",
    f"Plans are within {100 * TOLERANCE:.0f} % of what is counted in real steps, and what persists within 3 %. A "
    "verdict holds for a peak that much higher or lower, else it is undecided.",
    "Not included: the driver's context (taken off the GPU's memory), buffers of NCCL, workspaces of cuDNN, and holes "
    "between blocks of torch's allocator.",
)


def plan_page(plans: Sequence[MemoryPlan]) -> doc.Document:
    """Return the report of plans of one task and GPU under several policies; the first is shown in full."""
    plan = plans[0]
    where = f" on {plan.devices} devices, {plan.shard}" if plan.devices > 1 else ""
    return doc.page(
        f"halfstep plan: {plan.name}, {label(plan)}",
        f"The memory of a training step, planned without it: {plan.parameters:,} parameters{where}.",
        (
            _answer(plan),
            doc.Section("Policies", (text.preset_table(plans),) if len(plans) > 1 else ()),
            _pictures(plans),
            _tables(plan),
            _method(plan),
        ),
    )


def _answer(plan: MemoryPlan) -> doc.Section:
    more = () if plan.fit is not None else (f"{text.gpus_line(plan)}.",)
    tone = "" if plan.fit is None else doc.TONES[plan.fit.verdict]
    notes = [doc.Bullets(plan.notes)] if plan.notes else []
    return doc.Section("Answer", (doc.Facts((doc.Fact(label(plan), doc.sentence(verdict(plan)), more, tone),)), *notes))


def _pictures(plans: Sequence[MemoryPlan]) -> doc.Section:
    """Return the step of the first plan as a picture, and the peaks of several beside it."""
    plan = plans[0]
    limit = plan.fit.usable if plan.fit is not None else 0
    if limit >= 3 * max(one.peak_bytes for one in plans):  # a line far above would flatten the pictures
        limit = 0
    made = text.figure(plan, limit, plan.fit.gpu if plan.fit is not None else "")
    assert isinstance(made.chart, doc.AreaChart)
    legend = tuple((one.label, one.key) for one in made.chart.series)
    peaks = (_peaks(plans, limit),) if len(plans) > 1 else ()
    return doc.Section("Where the peak is", (doc.Gallery((made, *peaks), legend),))


def _peaks(plans: Sequence[MemoryPlan], limit: int) -> doc.Figure:
    unit, one = text.unit_of(max(plan.peak_bytes for plan in plans))
    bars = tuple(
        doc.Bar(label(plan), gib(plan.peak_bytes), plan.peak_bytes / one, key=doc.Key(colour=1)) for plan in plans
    )
    return doc.Figure(
        "Peak of a step under each policy",
        "On one device." + (" Dashed: what torch can allocate." if limit else ""),
        doc.spoken("Peaks", bars),
        doc.BarChart(unit, bars, line=limit / one if limit else None),
    )


def _tables(plan: MemoryPlan) -> doc.Section:
    formats = ((name, gib(size)) for name, size in plan.by_format().items())
    tables = [
        text.part_table(plan),
        text.module_table(plan, MODULES),
        doc.table("By format, at the peak", ("format", "bytes"), formats),
    ]
    return doc.Section("What it is made of", [*tables, *([text.sent_table(plan.sent)] if plan.sent else [])])


def _method(plan: MemoryPlan) -> doc.Section:
    planned = doc.Paragraph(f"Planned for the operators of a {plan.device} device: {plan.operators:,} a step.")
    return doc.Section(
        "How it was planned", (doc.Bullets(METHOD), planned, doc.hidden("The policy", plan.policy.to_toml()))
    )
