"""The demo for people: its page, with the conclusions first, and its tables, which the terminal prints too."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep import report as doc
from halfstep.cli.pages.comparison import cost_table, measured, measured_on, result_table, setting
from halfstep.cli.pages.facts import Demo, conclusions
from halfstep.cli.pages.figures import galleries, interval, memory_gallery, time_figure
from halfstep.tasks.candidates import FP32
from halfstep.tasks.compare import Comparison, Pace
from halfstep.tasks.overflow import Rescue
from halfstep.tasks.workloads import Workload

METHOD = (
    "Time: every candidate takes one step a round on the same batch, in an order shuffled each round; the ratio to "
    "fp32 is the median over the rounds, with its 90 % interval. fp32 runs twice: a difference finer than these "
    "two have is undecided. fp32 and torch.amp are loops of torch alone with fused optimizers; all clip gradients.",
    "Bytes are counted, not sampled. Between steps: parameters, buffers, optimizer states, fp32 masters and "
    "gradients that stay. Saved for backward: what autograd keeps in one step, parameters excepted.",
    "Accuracy: the final metric of each run minus that of fp32 with the same seed, mean and 90 % interval "
    "(Student's t). Within the margin: the whole interval lies inside it; it was fixed beforehand. Runs are short; "
    "halfstep compare trains the full length.",
    "Models to time are fed random data of a few batches; their loss has no meaning.",
)


def demo_page(demo: Demo, *, about: Mapping[str, Any], command: str, day: datetime.date) -> doc.Document:
    """Return the report of a demo; what was not finished is left out, and named in the conclusions."""
    paces = [pace for _, pace in demo.paces]
    return doc.page(
        "halfstep demo: what low formats do on this machine",
        "Where low formats pay on this machine and where not, what they do to the result, and a run that went NaN. "
        f"{measured_on({**about, 'accelerator': about['accelerator'] or 'no GPU'}, day)}",
        [
            doc.Section("Conclusions", (doc.Facts(conclusions(demo)),)),
            *demo.sections,
            *([_bytes(paces)] if paces else []),
            measured(METHOD, about, command),
        ],
        "halfstep demo --html",
    )


def time_section(workload: Workload, made: Pace) -> doc.Section:
    """Return time, with its intervals, and bytes of every candidate."""
    control = made.control
    figure = time_figure(
        "Time of a step",
        "Over that of fp32: shorter is faster. Lines are 90 % intervals, the band is what two identical fp32 loops "
        "differ by. O0 is halfstep's step in fp32.",
        made.rows,
        FP32,
        control,
    )
    return doc.Section(
        f"A model bound by {workload.bound_by}",
        (
            doc.Paragraph(f"{made.about}; {made.parameters:,} parameters, on {made.device}"),
            doc.Gallery((figure,)),
            cost_table(made.rows, control, intervals=True),
            doc.Paragraph(
                f"medians of {control.rounds} rounds in turns, 90 % intervals; fp32 beside itself: {interval(control)}"
            ),
        ),
    )


def _bytes(paces: Sequence[Pace]) -> doc.Section:
    """Return the bytes between steps of the model with most parameters, and those for backward of the deepest."""
    heavy, deep = max(paces, key=lambda p: p.parameters), max(paces, key=lambda p: p.rows[0].saved_bytes)
    gallery = memory_gallery(heavy.rows, deep.rows, f" {heavy.about}.", f" {deep.about}.")
    return doc.Section("Bytes, counted", (gallery,))


def accuracy_section(made: Comparison) -> doc.Section:
    """Return what became of the result of a task under every policy."""
    result, _, losses = galleries(made)
    figure, details = doc.Gallery(result.figures[:1]), doc.Details("Loss curves", (losses,))
    return doc.Section(f"Accuracy of {made.task}", (doc.Paragraph(setting(made)), figure, result_table(made), details))


def rescue_section(rescued: Rescue) -> doc.Section:
    """Return how a run broke, its explanation, and how it went on under the cure."""
    steps = tuple(float(step) for step in range(1, len(rescued.broken) + 1))
    at = rescued.broken_at
    skipped = tuple(step for step, loss in zip(steps, rescued.broken, strict=True) if not math.isfinite(loss))
    curves = (
        doc.Series("fp16", steps, rescued.broken, skipped[:1], doc.Key(2)),
        doc.Series("fp16 with the cure", steps[at - 1 :], rescued.cured, key=doc.Key(3)),
    )
    remedy = rescued.cure.text.splitlines()[0]
    figure = doc.Figure(
        "Training loss",
        f"The cross marks step {at}, the first that is not finite. From its weights the run goes on under the "
        f"cure, {remedy}.",
        f"Training loss: in fp16 it is finite until step {at - 1}; under the cure it goes on from there and ends "
        f"at {rescued.cured[-1]:.2g}.",
        doc.LineChart("step", curves),
    )
    how = doc.Paragraph(
        "Two blocks of attention that divide their logits after the product, trained in fp16. step.explain() "
        "replayed the first step that was not finite and tried cures by training on."
    )
    return doc.Section(
        f"A run in fp16 that breaks in step {at}: explained and cured",
        (
            how,
            doc.Gallery((figure,), tuple((curve.label, curve.key) for curve in curves)),
            doc.Paragraph("As print(step.explain()) shows it, with the operators that led to it and the cures:"),
            doc.Code(str(rescued.verdict)),
        ),
    )
