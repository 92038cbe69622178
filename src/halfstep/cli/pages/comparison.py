"""A comparison for people: its page and its tables, which the terminal prints too."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import halfstep as hs
from halfstep import report as doc
from halfstep.cli.pages.facts import findings
from halfstep.cli.pages.figures import amp_label, galleries, left_out, ratio_text
from halfstep.cli.terminal import machine_line
from halfstep.tasks.candidates import FP32
from halfstep.tasks.compare import CURVE_POINTS, CandidateRow, Comparison, Cost
from halfstep.tasks.measure import ENOUGH_SEEDS
from halfstep.timing import Ratio


def comparison_page(
    comparisons: Sequence[Comparison], *, about: Mapping[str, Any], command: str, day: datetime.date
) -> doc.Document:
    """Return the report of comparisons that ran together."""
    return doc.page(
        f"halfstep compare: {', '.join(c.task for c in comparisons)}",
        "What each precision policy did to the result, to the time of a step and to memory, beside fp32 and torch.amp. "
        f"{measured_on(about, day)}",
        [
            *_glance(comparisons),
            *map(comparison_section, comparisons),
            _policies(comparisons),
            _method(comparisons, about, command),
        ],
        "halfstep compare --html",
    )


def measured_on(about: Mapping[str, Any], day: datetime.date) -> str:
    """Return when and on which machine something was measured."""
    sets = f" Instruction sets: {', '.join(about['instruction_sets'])}." if about["instruction_sets"] else ""
    rest = f"{about['system']}, halfstep {hs.__version__}"
    return f"Measured on {day.isoformat()}: {machine_line(about)}, {rest}.{sets}"


def measured(items: tuple[str, ...], about: Mapping[str, Any], command: str) -> doc.Section:
    """Return the section on how something was measured, with the command and the machine."""
    facts = (
        (name.replace("_", " "), doc.listed(value) if isinstance(value, list) else str(value) or "none")
        for name, value in about.items()
    )
    again = doc.Paragraph("The command that asks for all of it again:")
    machine = doc.Details("The machine", (doc.table("Machine", ("what", "value"), facts),))
    return doc.Section("How it was measured", (doc.Bullets(items), again, doc.Code(command), machine))


def _glance(comparisons: Sequence[Comparison]) -> list[doc.Section]:
    """Return verdict and time of every policy, a column a task, of several tasks."""
    if len(comparisons) == 1:
        return []
    headers = ["policy"]
    rows: dict[str, list[str | doc.Cell]] = {}
    for comparison in comparisons:
        headers += [f"{comparison.task}: result", "time / fp32"]
        for row in comparison.rows[1:]:
            cells = rows.setdefault(row.label, [row.label])
            cells += [doc.judged(row.difference.verdict), _ratio(row.to_fp32, comparison.control)]
    table = doc.table("Every policy beside fp32", headers, rows.values())
    return [doc.Section("At a glance", (*_few_seeds(comparisons[0]), table))]


def _few_seeds(comparison: Comparison) -> tuple[doc.Note, ...]:
    count = len(comparison.seeds)
    if count >= ENOUGH_SEEDS:
        return ()
    runs = "one run" if count == 1 else f"{count} runs"
    return (doc.Note(f"An indication, not a verdict: {runs} of each policy. A verdict takes {ENOUGH_SEEDS}."),)


def comparison_section(comparison: Comparison) -> doc.Section:
    """Return what was found in a task, for the page and for the terminal."""
    blocks: list[doc.Block] = [doc.Paragraph(setting(comparison)), *_few_seeds(comparison)]
    if not comparison.repeatable:
        blocks.append(
            doc.Note(
                "The two runs of torch.amp did not end with the same result: runs on this machine are not "
                "repeatable, so part of every difference is chance."
            )
        )
    control, margin = comparison.control, f"{comparison.margin:.3g}"
    times = "No times: a run is too short for more than its warm-up."
    if control is not None:
        equal = "the same result, bit for bit" if comparison.repeatable else "NOT the same result"
        times = (
            "Times are medians of paired ratios; undecided: finer than A/A, torch.amp twice = "
            f"{control.median:.3f} [{control.low:.3f}, {control.high:.3f}] ({equal})."
        )
    blocks += [
        doc.Facts(findings(comparison)),
        *galleries(comparison),
        result_table(comparison),
        doc.Paragraph(f"Within the margin: the difference's 90 % interval lies inside ±{margin}, fixed beforehand."),
        cost_table(comparison.rows, control),
        doc.Paragraph(times),
    ]
    return doc.Section(comparison.task, [*blocks, doc.Bullets(notes)] if (notes := _notes(comparison)) else blocks)


def setting(comparison: Comparison) -> str:
    """Return in words what was trained, how long, how often, and where."""
    about = f"{doc.sentence(comparison.about)} " if comparison.about else ""
    steps, seeds = doc.counted(comparison.steps, "step"), doc.counted(len(comparison.seeds), "seed")
    return f"{about}{steps}, {seeds}, on {comparison.device}; same weights, same batches, steps in turns."


def _policies(comparisons: Sequence[Comparison]) -> doc.Section:
    how = doc.Paragraph(
        "Each as a file that halfstep reads: save it as NAME.toml and pass it to --policies or hs.Policy.of(). "
        "fp32 and torch.amp are loops of torch alone."
    )
    texts = {row.label: row.policy for c in comparisons for row in c.rows if row.policy}
    return doc.Section("The policies", (how, *(doc.hidden(label, text) for label, text in texts.items())))


def _method(comparisons: Sequence[Comparison], about: Mapping[str, Any], command: str) -> doc.Section:
    amp = amp_label(comparisons[0].rows)
    items = (
        "Training: every policy starts from the same weights and sees the same batches in the same order, with the "
        "same random numbers. The policies take their steps in turns, in an order shuffled anew for every batch, so "
        "that whatever disturbs the machine disturbs all of them alike.",
        "Result: the final metric of each run minus that of fp32 with the same seed; the mean over the seeds and its "
        "90 % interval (Student's t). Within the margin: the whole interval lies inside it; it was fixed "
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
    return measured(items, about, command)


def result_table(comparison: Comparison) -> doc.Table:
    """Return what became of the result under every policy."""
    decimals = doc.Decimals(comparison.margin)
    headers = ("policy", comparison.metric, "minus fp32, 90 % interval", "verdict", "steps skipped", "loss scale")

    def cells(row: CandidateRow) -> tuple[str | doc.Cell, ...]:
        found, mean = row.difference, decimals(statistics.fmean(row.metrics))
        if row.label == FP32:
            return row.label, mean, "", "", _range(row.skipped), _range(row.scale)
        apart = decimals.signed(found.mean) if math.isfinite(found.mean) else ""
        if found.low is not None and found.high is not None:
            apart += f" [{decimals.signed(found.low)}, {decimals.signed(found.high)}]"
        return row.label, mean, apart, doc.judged(found.verdict), _range(row.skipped), _range(row.scale)

    return doc.table("Result", headers, map(cells, comparison.rows))


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def cost_table(rows: Sequence[Cost], control: Ratio | None, *, intervals: bool = False) -> doc.Table:
    """Return what a step takes; `control` is what this machine can resolve."""
    state, saved = doc.Size(row.state_bytes for row in rows), doc.Size(row.saved_bytes for row in rows)
    time = doc.Decimals(max((row.milliseconds for row in rows if math.isfinite(row.milliseconds)), default=1.0))
    headers = (
        "policy", "ms a step", "time / fp32", f"time / {amp_label(rows)}", f"between steps, {state.unit}",
        f"saved for backward, {saved.unit}",
    )  # fmt: skip
    cells = (
        (
            row.label,
            time(row.milliseconds) if math.isfinite(row.milliseconds) else "",
            left_out(row) or _ratio(row.to_fp32, control, intervals=intervals),
            _ratio(row.to_amp, control, intervals=intervals),
            state(row.state_bytes),
            saved(row.saved_bytes),
        )
        for row in rows
    )
    return doc.table("Time and memory", headers, cells)


def _ratio(ratio: Ratio | None, control: Ratio | None, *, intervals: bool = False) -> doc.Cell:
    text = ratio_text(ratio, control, intervals=intervals)
    return doc.Cell(text, "open" if text.startswith("undecided") else "")


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """Return the notes of the plans, each once behind its policies, and a note on what was left out."""
    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        for note in row.notes:
            notes.setdefault(note, []).append(row.label)
    lines = [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    if comparison.device == "cpu" and not any(row.label == "torch.amp fp16" for row in comparison.rows):
        lines.append(
            "torch.amp fp16 was not run: on CPUs without fp16 units torch's fp16 kernels take many times fp32's time; "
            "--policies torch.amp:fp16 adds it"
        )
    return tuple(lines)
