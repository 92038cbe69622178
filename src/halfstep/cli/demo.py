"""``halfstep demo``: what low formats do on this machine: time, bytes, accuracy, and a NaN cured; and its page."""

from __future__ import annotations

import datetime
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import halfstep as hs
from halfstep import report as doc
from halfstep.cli.pages import comparison as pages
from halfstep.cli.pages.facts import Demo, conclusions
from halfstep.cli.progress import Watch
from halfstep.cli.terminal import INTERRUPTED, Files, command_line, console, machine_line, print_section, record, say
from halfstep.tasks import load_task, machine
from halfstep.tasks.candidates import FP32, candidates
from halfstep.tasks.compare import compare, pace, probed
from halfstep.tasks.demo import Workload, rescue, workloads
from halfstep.tasks.machine import device_type, threads_here, threads_of_torch
from halfstep.tasks.measure import ENOUGH_SEEDS

SECONDS = (20.0, 15.0, 4.0)  # of timing each workload
STEPS = {"lenet5": 120, "gpt": 50}  # of the tasks whose accuracy is compared, at most
LEAST_STEPS = 10  # of them, however slow the machine is
TRAINED, EXPLAINED = 25.0, 8.0  # seconds of each of these tasks, and of the run that goes NaN
BROKEN_STEPS = 120  # of the run that goes NaN
TIMED = ("mixed", "lean", "pure", "O0")  # mixed and lean first: the same colours as in the comparisons


OnShare = Callable[[float], None]
"""Takes the share of a part that is done."""

Part = tuple[str, float, Callable[[OnShare], doc.Section]]
"""Title, seconds it takes, roughly, and what it does: it adds to what was measured, and returns what is printed."""


def carry_out(html: Path | None, json: Path | None, device: str) -> int:
    """Run the command; return its exit code."""
    out, err = console(), console(stderr=True)
    where = device_type(device)
    files = Files(json=json, html=html)
    about = machine()
    demo = Demo(device=where, units=hs.policy.units(where))
    say(out, machine_line(about))
    say(out, demo.units.reason)
    parts = _parts(demo)
    seconds = sum(weight for _, weight, _ in parts)
    say(err, f"{doc.counted(len(parts), 'part')}, about {doc.counted(max(1, round(seconds / 60)), 'minute')}")
    threads, load = threads_here()
    if threads < torch.get_num_threads():
        say(out, f"this machine was busy in the last minute (load average {load:.1f}; an installation counts too): "
                 f"measured with {doc.counted(threads, 'thread')}, and less exactly")  # fmt: skip
    with threads_of_torch(threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without units")  # the tables have it, with its time
        interrupted = _measure(demo, parts, out, err)
    print_section(out, doc.Section("Conclusions", (doc.Facts(conclusions(demo)),)))
    day = datetime.date.today()
    files.write(
        out,
        json=record(machine=about, **_facts(demo)),
        html=lambda path: doc.write_page(demo_page(demo, about=about, command=command_line(), day=day), path),
    )
    return INTERRUPTED if interrupted else 0


def _measure(demo: Demo, parts: list[Part], out: Console, err: Console) -> bool:
    """Run the parts; return whether Ctrl-C ended them. What was not finished is named in the demo."""
    total, done = sum(weight for _, weight, _ in parts), 0.0
    for number, (title, weight, run) in enumerate(parts):
        try:
            with Watch(err) as watch:  # ends before its result is printed: a bar would divert what goes to stdout
                watch.see(done / total, f"{number + 1}/{len(parts)} {title}")
                section = run(lambda share: watch.see((done + share * weight) / total))  # noqa: B023  # called here
            demo.sections.append(section)
            print_section(out, section)
        except KeyboardInterrupt:
            demo.missing += [f"{title} (interrupted)", *(later for later, _, _ in parts[number + 1 :])]
            return True
        except hs.HalfstepError as error:
            demo.missing.append(f"{title} ({error})")
        done += weight
    return False


def _parts(demo: Demo) -> list[Part]:
    works = zip(workloads(demo.device, units=demo.units.bf16), SECONDS, strict=True)
    parts: list[Part] = [
        (f"time and bytes of a model bound by {w.bound_by}", seconds + 3, partial(_time, demo, w, seconds))
        for w, seconds in works
    ]
    parts.append(("a run in fp16 that goes NaN", EXPLAINED, partial(_break, demo)))
    for name, steps in STEPS.items():
        if not demo.units.bf16 and name == "gpt" and demo.device == "cpu":
            demo.missing.append(f"accuracy of {name} (bf16 without units would take minutes here)")
        else:
            parts.append((f"accuracy of {name} beside fp32", TRAINED, partial(_train, demo, name, steps)))
    return parts


def _time(demo: Demo, workload: Workload, seconds: float, on_share: OnShare) -> doc.Section:
    timed = candidates(TIMED, demo.device)
    made = pace(workload.task, timed, device=demo.device, seconds=seconds, on_share=on_share)
    demo.paces.append((workload, made))
    control = made.control
    figure = pages.time_figure(
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
            pages.cost_table(made.rows, control, intervals=True),
            doc.Paragraph(
                f"medians of {control.rounds} rounds in turns, 90 % intervals; fp32 beside itself: {control:.2f}"
            ),
        ),
    )


def _break(demo: Demo, on_share: OnShare) -> doc.Section:
    rescued = demo.rescue = rescue(device=demo.device, steps=BROKEN_STEPS, on_share=on_share)
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


def _train(demo: Demo, name: str, steps: int, on_share: OnShare) -> doc.Section:
    compared, task = candidates(("mixed", "lean", "mixed:fp16"), demo.device), load_task(name)
    seconds = [probed(task, each, demo.device).seconds for each in compared]
    turns = ENOUGH_SEEDS * (sum(seconds) + seconds[1])  # torch.amp, the second, runs twice
    steps = min(steps, max(LEAST_STEPS, int(TRAINED / turns)))
    seen, total = itertools.count(1), (len(compared) + 1) * steps * ENOUGH_SEEDS
    on_step = lambda *step: on_share(next(seen) / total)  # noqa: E731
    made = compare(task, compared, steps=steps, seeds=ENOUGH_SEEDS, device=demo.device, on_step=on_step)
    demo.comparisons.append(made)
    result, _, losses = pages.galleries(made)
    setting, figure = doc.Paragraph(pages.setting(made)), doc.Gallery(result.figures[:1])
    details = doc.Details("Loss curves", (losses,))
    return doc.Section(f"Accuracy of {made.task}", (setting, figure, pages.result_table(made), details))


def _facts(demo: Demo) -> dict[str, Any]:
    rescued = demo.rescue
    names = ("broken_at", "skipped", "broken", "cured", "cured_skipped")
    run = rescued and {**{name: getattr(rescued, name) for name in names}, "verdict": rescued.verdict.record()}
    return {
        "units": asdict(demo.units),
        "paces": [{**asdict(made), "bound_by": workload.bound_by} for workload, made in demo.paces],
        "rescue": run,
        "tasks": [asdict(made) for made in demo.comparisons],
        "missing": demo.missing,
    }


# ------------------------------------------------------------------ the page

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
    return doc.page(
        "halfstep demo: what low formats do on this machine",
        "Where low formats pay on this machine and where not, what they do to the result, and a run that went NaN. "
        f"{pages.measured_on({**about, 'accelerator': about['accelerator'] or 'no GPU'}, day)}",
        [
            doc.Section("Conclusions", (doc.Facts(conclusions(demo)),)),
            *demo.sections,
            doc.Section("Bytes, counted", (_bytes(demo),) if demo.paces else ()),
            pages.measured(METHOD, about, command),
        ],
        "halfstep demo --html",
    )


def _bytes(demo: Demo) -> doc.Gallery:
    return pages.memory_gallery(demo.heavy.rows, demo.deep.rows, f" {demo.heavy.about}.", f" {demo.deep.about}.")
