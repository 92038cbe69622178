"""The page of the demo: its conclusions as sentences, then their pictures, then the numbers and the method."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

import halfstep as hs
from halfstep.cli.conclusions import interval
from halfstep.cli.figures import galleries
from halfstep.cli.numbers import Size
from halfstep.cli.page import machine_table, result_doc_table
from halfstep.report import Bar, BarChart, Figure, Gallery, Key, LineChart, Series
from halfstep.report import document as doc
from halfstep.tasks.compare import Comparison
from halfstep.tasks.overflow import Rescue
from halfstep.tasks.pace import Pace, PaceRow
from halfstep.tasks.workloads import Workload
from halfstep.timing import Ratio

__all__ = ["demo_page"]


def demo_page(
    paces: Sequence[tuple[Workload, Pace]], rescued: Rescue | None, comparisons: Sequence[Comparison],
    found: Sequence[doc.Fact], *, about: Mapping[str, Any], command: str, day: datetime.date,
) -> doc.Document:  # fmt: skip
    """Return the report of a demo; what was not finished is left out, and named in `found`."""
    on = f", {about['accelerator']}" if about["accelerator"] else ", no GPU"
    units = f" ({', '.join(about['instruction_sets'])})" if about["instruction_sets"] else ""
    lead = (
        "Where low formats pay on this machine and where not, what they do to the result, and a run that went NaN. "
        f"Measured on {day.isoformat()}: {about['cpu']}{units}, {about['cores']} cores{on}; torch {about['torch']}, "
        f"Python {about['python']}, {about['system']}, halfstep {hs.__version__}."
    )
    sections = [doc.Section(heading="Conclusions", blocks=(doc.Facts(facts=tuple(found)),))]
    if paces:
        sections.append(_times(paces))
        sections.append(_bytes(paces))
    if comparisons:
        sections.append(_accuracy(comparisons))
    if rescued is not None:
        sections.append(_rescue(rescued))
    sections.append(_method(about, command))
    return doc.Document(
        title="halfstep demo: what low formats do on this machine",
        lead=lead,
        sections=tuple(sections),
        footer="Made by halfstep demo --html. This file is complete: it loads nothing and runs no script.",
    )


def _keys(rows: Sequence[PaceRow]) -> dict[str, Key]:
    return {row.label: Key(colour=place) for place, row in enumerate(rows)}


def _times(paces: Sequence[tuple[Workload, Pace]]) -> doc.Section:
    figures = tuple(_time_figure(workload, made) for workload, made in paces)
    tables = tuple(_time_table(workload, made) for workload, made in paces)
    return doc.Section(
        heading="Time of a step",
        blocks=(Gallery(figures=figures), doc.Details(summary="The numbers", blocks=tables)),
    )


def _time_figure(workload: Workload, made: Pace) -> Figure:
    keys, control = _keys(made.rows), made.control
    bars = tuple(
        Bar(
            label=row.label,
            text=_ratio(row.to_fp32, control) or (f"over {row.slow:.0f}, left out" if row.slow else "reference"),
            value=row.to_fp32.median if row.to_fp32 else None if row.slow else 1.0,
            low=row.to_fp32.low if row.to_fp32 else None,
            high=row.to_fp32.high if row.to_fp32 else None,
            key=keys[row.label],
        )
        for row in made.rows
    )
    words = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    return Figure(
        heading=f"Bound by {workload.bound_by}",
        caption=f"{made.about}. Time of a step over that of fp32: shorter is faster. Lines are 90 % intervals, the "
        f"band is what two identical fp32 loops differ by. O0 is halfstep's step in fp32.",
        alt=f"Time of a step over fp32's, {made.about}: {words}.",
        chart=BarChart(
            x_label="time / fp32", bars=bars, line=1.0, band=(min(control.low, 1.0), max(control.high, 1.0))
        ),
    )  # fmt: skip


def _ratio(ratio: Ratio | None, control: Ratio) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.2f}, undecided" if ratio.finer_than(control) else f"{ratio.median:.2f}"


def _time_table(workload: Workload, made: Pace) -> doc.Table:
    rows = tuple(
        (
            doc.Cell(text=row.label),
            doc.Cell(text=f"{row.milliseconds:.3g}" if math.isfinite(row.milliseconds) else ""),
            doc.Cell(text=interval(row.to_fp32) if row.to_fp32 else ""),
            doc.Cell(text=interval(row.to_amp) if row.to_amp else ""),
        )
        for row in made.rows
    )
    amp = next(row.label for row in made.rows if row.label.startswith("torch.amp"))
    caption = f"Bound by {workload.bound_by}: {made.control.rounds} rounds; fp32 beside itself {interval(made.control)}"
    return doc.Table(caption=caption, headers=("policy", "ms a step", "time / fp32", f"time / {amp}"), rows=rows)


def _bytes(paces: Sequence[tuple[Workload, Pace]]) -> doc.Section:
    made = [pace for _, pace in paces]
    heavy, deep = max(made, key=lambda p: p.parameters), max(made, key=lambda p: p.rows[0].saved_bytes)
    figures = (
        _byte_figure("Between steps", "Weights, optimizer states, fp32 masters and gradients that stay.", heavy,
                     {row.label: row.state_bytes for row in heavy.rows}),
        _byte_figure("Saved for backward", "What autograd keeps for the backward pass; it grows with the batch.", deep,
                     {row.label: row.saved_bytes for row in deep.rows}),
    )  # fmt: skip
    return doc.Section(heading="Bytes, counted", blocks=(Gallery(figures=figures),))


def _byte_figure(heading: str, what: str, made: Pace, counts: Mapping[str, int]) -> Figure:
    keys, size = _keys(made.rows), Size.of(counts.values())
    reference = next(iter(counts.values()))
    bars = tuple(
        Bar(label=label, text=f"{size(count)} {size.unit}", value=count / size.bytes, key=keys[label])
        for label, count in counts.items()
    )
    words = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    return Figure(
        heading=heading,
        caption=f"{what} {made.about}. Dashed: fp32.",
        alt=f"{heading}, {made.about}: {words}.",
        chart=BarChart(x_label=size.unit, bars=bars, line=reference / size.bytes),
    )


def _accuracy(comparisons: Sequence[Comparison]) -> doc.Section:
    figures: list[Figure] = []
    more: list[doc.Block] = []
    for comparison in comparisons:
        result, _, losses = galleries(comparison)
        figures.append(_named(result.figures[0], comparison.task))
        more += [result_doc_table(comparison), losses]
    return doc.Section(
        heading="Accuracy beside fp32",
        blocks=(Gallery(figures=tuple(figures)), doc.Details(summary="Numbers and loss curves", blocks=tuple(more))),
    )


def _named(figure: Figure, task: str) -> Figure:
    return Figure(heading=f"{task}: {figure.heading}", caption=figure.caption, alt=figure.alt, chart=figure.chart)


def _rescue(rescued: Rescue) -> doc.Section:
    steps = tuple(float(step) for step in range(1, len(rescued.broken) + 1))
    at = rescued.broken_at
    skipped = tuple(step for step, loss in zip(steps, rescued.broken, strict=True) if not math.isfinite(loss))
    curves = (
        Series(label="fp16", x=steps, y=rescued.broken, marks=skipped[:1], key=Key(colour=2)),
        Series(label="fp16 with the cure", x=steps[at - 1 :], y=rescued.cured, key=Key(colour=3)),
    )
    remedy = rescued.cure.text.splitlines()[0]
    figure = Figure(
        heading="Training loss",
        caption=f"The cross marks step {at}, the first that is not finite. From its weights the run goes on under the "
        f"cure, {remedy}.",
        alt=f"Training loss: in fp16 it is finite until step {at - 1}; under the cure it goes on from there and ends "
        f"at {rescued.cured[-1]:.2g}.",
        chart=LineChart(x_label="step", series=curves),
    )
    legend = tuple((curve.label, curve.key) for curve in curves)
    verdict = rescued.verdict
    how = doc.Paragraph(
        text="Two blocks of attention that divide their logits after the product, trained in fp16. step.explain() "
        "replayed the first step that was not finite and tried cures by training on."
    )
    story = doc.Table(
        caption="The operators that led to it",
        headers=("operator", "module", "phase", "format", "largest", "limit"),
        rows=tuple(
            tuple(
                doc.Cell(text=text)
                for text in (
                    row.op, row.module or "the model", row.phase, row.dtype,
                    f"{row.largest:.4g}" if row.finite else "not finite", f"{row.limit:.6g}",
                )
            )
            for row in verdict.story
        ),
    )  # fmt: skip
    cures = tuple(
        f"{cure.text.splitlines()[0]}{f' ({cure.outcome})' if cure.outcome else ''}" for cure in verdict.cures
    )
    return doc.Section(
        heading="A run that went NaN, explained and cured",
        blocks=(
            how,
            Gallery(figures=(figure,), legend=legend),
            story,
            doc.Paragraph(text="Cures, smallest first:"),
            doc.Bullets(items=cures),
            doc.Details(summary="As print(step.explain()) shows it", blocks=(doc.Code(text=str(verdict)),)),
        ),
    )


def _method(about: Mapping[str, Any], command: str) -> doc.Section:
    items = (
        "Time: every candidate takes one step a round on the same batch, in an order shuffled each round; the ratio to "
        "fp32 is the median over the rounds, with its 90 % interval. fp32 runs twice: a difference finer than these "
        "two have is undecided. fp32 and torch.amp are loops of torch alone with fused optimizers; all clip gradients.",
        "Bytes are counted, not sampled. Between steps: parameters, buffers, optimizer states, fp32 masters and "
        "gradients that stay. Saved for backward: what autograd keeps in one step, parameters excepted.",
        "Accuracy: the final metric of each run minus that of fp32 with the same seed, mean and 90 % interval "
        "(Student's t). Within noise: the whole interval lies inside a margin fixed beforehand. Runs are short; "
        "halfstep compare trains the full length.",
        "Models to time are fed random data of a few batches; their loss has no meaning.",
    )
    return doc.Section(
        heading="How it was measured",
        blocks=(
            doc.Bullets(items=items),
            doc.Code(text=command),
            doc.Details(summary="The machine", blocks=(machine_table(about),)),
        ),
    )
