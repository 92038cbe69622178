"""The page of a comparison: its findings in words, its numbers as tables and pictures, composed as a document."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import halfstep as hs
from halfstep.cli.figures import galleries
from halfstep.cli.findings import findings
from halfstep.cli.numbers import Decimals, Size, counted, listed
from halfstep.cli.tables import amp_label, extremes, policy_notes, ratio_text
from halfstep.report import document as doc
from halfstep.tasks.candidates import FP32
from halfstep.tasks.compare import CURVE_POINTS, Comparison
from halfstep.tasks.measure import ENOUGH_SEEDS
from halfstep.timing import Ratio

__all__ = ["comparison_page", "machine_table", "result_doc_table"]

TONES = {"within noise": "good", "better": "good", "undecided": "open", "worse": "bad", "diverged": "bad"}


def comparison_page(
    comparisons: Sequence[Comparison], *, about: Mapping[str, Any], command: str, day: datetime.date
) -> doc.Document:
    """Return the report of comparisons that ran together."""
    on = f", {about['accelerator']}" if about["accelerator"] else ""
    units = f" ({', '.join(about['instruction_sets'])})" if about["instruction_sets"] else ""
    lead = (
        "What each precision policy did to the result, to the time of a step and to memory, beside fp32 and torch.amp. "
        f"Measured on {day.isoformat()}: {about['cpu']}{units}, {about['cores']} cores{on}; torch {about['torch']}, "
        f"Python {about['python']}, {about['system']}, halfstep {hs.__version__}."
    )
    sections = [_glance(comparisons)] if len(comparisons) > 1 else []
    sections += [_task(comparison) for comparison in comparisons]
    sections.append(_policies(comparisons))
    sections.append(_method(comparisons, about, command))
    return doc.Document(
        title=f"halfstep compare: {', '.join(c.task for c in comparisons)}",
        lead=lead,
        sections=tuple(sections),
        footer="Made by halfstep compare --html. This file is complete: it loads nothing and runs no script.",
    )


def _glance(comparisons: Sequence[Comparison]) -> doc.Section:
    """Return verdict and time of every policy, a column a task."""
    headers = ["policy"]
    for comparison in comparisons:
        headers += [f"{comparison.task}: result", "time / fp32"]
    labels = list(dict.fromkeys(row.label for c in comparisons for row in c.rows if row.label != FP32))
    rows = []
    for label in labels:
        cells = [doc.Cell(text=label)]
        for comparison in comparisons:
            row = next(row for row in comparison.rows if row.label == label)
            cells += [
                doc.Cell(text=row.difference.verdict, tone=TONES[row.difference.verdict]),
                _ratio_cell(row.to_fp32, comparison.control),
            ]
        rows.append(tuple(cells))
    table = doc.Table(caption="Every policy beside fp32", headers=tuple(headers), rows=tuple(rows))
    return doc.Section(heading="At a glance", blocks=(*_few_seeds(comparisons[0]), table))


def _few_seeds(comparison: Comparison) -> tuple[doc.Note, ...]:
    """Return a note if there were too few seeds for a verdict."""
    count = len(comparison.seeds)
    if count >= ENOUGH_SEEDS:
        return ()
    runs = "one run" if count == 1 else f"{count} runs"
    return (doc.Note(text=f"An indication, not a verdict: {runs} of each policy. A verdict takes {ENOUGH_SEEDS}."),)


def _task(comparison: Comparison) -> doc.Section:
    about = f"{comparison.about[:1].upper()}{comparison.about[1:].rstrip('.')}. " if comparison.about else ""
    steps = counted(comparison.steps, "step")
    seeds = counted(len(comparison.seeds), "seed")
    blocks: list[doc.Block] = [
        doc.Paragraph(text=f"{about}{steps}, {seeds}, on {comparison.device}."),
        *_few_seeds(comparison),
    ]
    if not comparison.repeatable:
        blocks.append(
            doc.Note(
                text="The two runs of torch.amp did not end with the same result: runs on this machine are not "
                "repeatable, so part of every difference is chance."
            )
        )
    blocks += [
        doc.Facts(facts=findings(comparison)),
        *galleries(comparison),
        result_doc_table(comparison),
        _cost_table(comparison),
    ]
    notes = policy_notes(comparison)
    if notes:
        blocks.append(doc.Bullets(items=tuple(notes)))
    return doc.Section(heading=comparison.task, blocks=tuple(blocks))


def _policies(comparisons: Sequence[Comparison]) -> doc.Section:
    how = doc.Paragraph(
        text="Each as a file that halfstep reads: save it as NAME.toml and pass it to --policies or hs.Policy.of(). "
        "fp32 and torch.amp are loops of torch alone."
    )
    texts = {row.label: row.policy for c in comparisons for row in c.rows if row.policy}
    files = (doc.Details(summary=label, blocks=(doc.Code(text=text.strip()),)) for label, text in texts.items())
    return doc.Section(heading="The policies", blocks=(how, *files))


def _method(comparisons: Sequence[Comparison], about: Mapping[str, Any], command: str) -> doc.Section:
    amp = amp_label(comparisons[0])
    items = (
        "Training: every policy starts from the same weights and sees the same batches in the same order, with the "
        "same random numbers. The policies take their steps in turns, in an order shuffled anew for every batch, so "
        "that whatever disturbs the machine disturbs all of them alike.",
        "Result: the final metric of each run minus that of fp32 with the same seed; the mean over the seeds and its "
        "90 % interval (Student's t). Within noise: the whole interval lies inside the margin, which was fixed "
        "beforehand. Better or worse: all of it lies outside. Anything else is undecided.",
        f"Time: the median over all steps of a policy's time divided by that of fp32 or {amp} on the same batch, and "
        f"its 90 % interval; the first steps of a run are not counted. {amp} runs twice: what the two differ by is "
        "what this machine cannot resolve, and a ratio finer than that is undecided.",
        f"Baselines: {amp} with torch's fused optimizer, gradients set to None, a GradScaler only for fp16.",
        "Memory: bytes are counted, not sampled. Between steps: parameters, buffers, optimizer state, fp32 masters and "
        "gradients that stay. Saved for backward: what autograd keeps from forward to backward in one step, parameters "
        "excepted.",
        f"Loss curves: the training loss of each batch, a mean over the seeds; runs longer than {CURVE_POINTS} steps "
        "are drawn as means of consecutive steps.",
    )
    return doc.Section(
        heading="How it was measured",
        blocks=(
            doc.Bullets(items=items),
            doc.Paragraph(text="The command that asks for all of it again:"),
            doc.Code(text=command),
            doc.Details(summary="The machine", blocks=(machine_table(about),)),
        ),
    )


def machine_table(about: Mapping[str, Any]) -> doc.Table:
    """Return what `machine()` found as a table."""
    rows = tuple(
        (
            doc.Cell(text=name.replace("_", " ")),
            doc.Cell(text=listed(value) if isinstance(value, list) else str(value) or "none"),
        )
        for name, value in about.items()
    )
    return doc.Table(caption="Machine", headers=("what", "value"), rows=rows)


def result_doc_table(comparison: Comparison) -> doc.Table:
    """Return what became of the result under every policy."""
    decimals = Decimals.of(comparison.margin)
    rows = []
    for row in comparison.rows:
        difference = row.difference
        known = row.label != FP32 and math.isfinite(difference.mean)
        spread = (
            f"[{decimals.signed(difference.low)}, {decimals.signed(difference.high)}]"
            if difference.low is not None and difference.high is not None
            else ""
        )
        rows.append(
            (
                doc.Cell(text=row.label),
                doc.Cell(text=decimals(statistics.fmean(row.metrics))),
                doc.Cell(text=decimals.signed(difference.mean) if known else ""),
                doc.Cell(text=spread if known else ""),
                doc.Cell(text=difference.verdict, tone=TONES[difference.verdict])
                if row.label != FP32
                else doc.Cell(text=""),
                doc.Cell(text=extremes(row.skipped)),
                doc.Cell(text=extremes(row.scale)),
            )
        )
    return doc.Table(
        caption="Result",
        headers=("policy", comparison.metric, "minus fp32", "90 % interval", "verdict", "steps skipped", "loss scale"),
        rows=tuple(rows),
    )


def _cost_table(comparison: Comparison) -> doc.Table:
    state = Size.of(row.state_bytes for row in comparison.rows)
    saved = Size.of(row.saved_bytes for row in comparison.rows)
    known = [row.milliseconds for row in comparison.rows if math.isfinite(row.milliseconds)]
    time = Decimals.of(max(known, default=1.0))
    rows = tuple(
        (
            doc.Cell(text=row.label),
            doc.Cell(text=time(row.milliseconds) if math.isfinite(row.milliseconds) else ""),
            _ratio_cell(row.to_fp32, comparison.control),
            _ratio_cell(row.to_amp, comparison.control),
            doc.Cell(text=state(row.state_bytes)),
            doc.Cell(text=saved(row.saved_bytes)),
        )
        for row in comparison.rows
    )
    return doc.Table(
        caption="Time and memory",
        headers=(
            "policy",
            "ms a step",
            "time / fp32",
            f"time / {amp_label(comparison)}",
            f"between steps, {state.unit}",
            f"saved for backward, {saved.unit}",
        ),
        rows=rows,
    )


def _ratio_cell(ratio: Ratio | None, control: Ratio | None) -> doc.Cell:
    if ratio is None or control is None:
        return doc.Cell(text="")
    return doc.Cell(text=ratio_text(ratio, control), tone="open" if ratio.finer_than(control) else "")
