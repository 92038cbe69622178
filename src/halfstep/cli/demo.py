"""``halfstep demo``: what low formats do on this machine: time, bytes, accuracy, and a NaN cured; and its page."""

import datetime
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import halfstep as hs
from halfstep import report as doc
from halfstep.cli import comparison as pages
from halfstep.cli.progress import Watch
from halfstep.cli.terminal import INTERRUPTED, Files, command_line, console, machine_line, print_section, record, say
from halfstep.tasks import load_task, machine
from halfstep.tasks.candidates import FP32, candidates
from halfstep.tasks.compare import Comparison, Pace, compare, pace, probed
from halfstep.tasks.demo import Rescue, Workload, rescue, workloads
from halfstep.tasks.machine import device_type, threads_here, threads_of_torch
from halfstep.tasks.measure import ENOUGH_SEEDS

SECONDS = (20.0, 15.0, 4.0)  # of timing each workload
STEPS = {"lenet5": 120, "gpt": 50}  # of the tasks whose accuracy is compared, at most
LEAST_STEPS = 10  # of them, however slow the machine is
TRAINED, EXPLAINED = 25.0, 8.0  # seconds of each of these tasks, and of the run that goes NaN
BROKEN_STEPS = 120  # of the run that goes NaN
TIMED = ("mixed", "lean", "pure", "O0")  # mixed and lean first: the same colours as in the comparisons
ENDS = 10  # steps whose mean loss stands for the end of a run


@dataclass(kw_only=True, slots=True)
class Demo:
    """What a demo has measured so far."""

    device: str
    units: hs.policy.Units
    paces: list[tuple[Workload, Pace]] = field(default_factory=list)
    rescue: Rescue | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    sections: list[doc.Section] = field(default_factory=list)  # what was found, as pages and terminals show it
    missing: list[str] = field(default_factory=list)  # parts that were not finished, the first with the reason

    @property
    def heavy(self) -> Pace:
        """That of the model with most parameters, whose bytes between steps are shown."""
        return max((made for _, made in self.paces), key=lambda made: made.parameters)

    @property
    def deep(self) -> Pace:
        """That of the deepest model, whose bytes for backward are shown."""
        return max((made for _, made in self.paces), key=lambda made: made.rows[0].saved_bytes)


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
        "units": demo.units,
        "paces": [{**doc.plain(made), "bound_by": workload.bound_by} for workload, made in demo.paces],
        "rescue": run,
        "tasks": demo.comparisons,
        "missing": demo.missing,
    }


# ------------------------------------------------------------------ the page


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
            pages.measured(doc.method("demo"), about, command),
        ],
        "halfstep demo --html",
    )


def _bytes(demo: Demo) -> doc.Gallery:
    return pages.memory_gallery(demo.heavy.rows, demo.deep.rows, f" {demo.heavy.about}.", f" {demo.deep.about}.")


# ------------------------------------------------------------------ what was found, in words


def conclusions(demo: Demo) -> tuple[doc.Fact, ...]:
    """Return what the finished parts show, and what was not measured."""
    facts = [_demo_time(workload, made, demo.units) for workload, made in demo.paces]
    facts += [_demo_memory(demo)] if demo.paces else []
    facts += [_accuracy(made) for made in demo.comparisons]
    facts += [_rescue(demo.rescue)] if demo.rescue is not None else []
    return (*facts, _missing(demo.units, demo.missing))


def _demo_time(workload: Workload, made: Pace, units: hs.policy.Units) -> doc.Fact:
    heading = f"Bound by {workload.bound_by}; {made.about}"
    slow = [row for row in made.rows if row.slow]
    least = min((row.slow for row in slow), default=0.0)
    without = "" if units.bf16 else f": {units.reason}"
    if pages.timed(made.rows):
        fact = pages.time_fact(heading, made.rows, made.control)
    else:
        o0 = next((row.to_fp32 for row in made.rows if row.label == "O0"), None)
        more = (f"halfstep's step in fp32 (O0): {pages.ratio_text(o0, made.control, intervals=True)}.",) if o0 else ()
        text = f"fp32 is fastest. A step of each low format took over {least:.0f} times as long{without}."
        fact, slow = doc.Fact(heading, text, more), []
    names = doc.listed([row.label for row in slow])
    lost = [f"A step took over {least:.0f} times fp32's, and was left out: {names}{without}."] if slow else []
    return replace(fact, more=(*fact.more, *lost, doc.sentence(workload.lesson)))


def _demo_memory(demo: Demo) -> doc.Fact:
    text, _ = pages.saved_words(demo.deep.rows)
    text = f"{text.rstrip('.')}, in the step of {demo.deep.about}."
    more = [*pages.between_steps(demo.heavy.rows), f"Bytes between steps are those of {demo.heavy.about}."]
    more += [] if demo.units.bf16 else ["They are saved on any machine, also without units for bf16, as here."]
    return doc.Fact("Bytes, counted", text, tuple(more), "good")


def _accuracy(made: Comparison) -> doc.Fact:
    first = pages.findings(made)[0]
    margin = f"The margin was fixed beforehand; {made.steps} steps, {len(made.seeds)} seeds."
    ends = f"fp32 ends at {statistics.fmean(made.rows[0].metrics):.4g}."
    return replace(first, heading=f"Accuracy of {made.task} ({made.metric})", more=(*first.more, ends, margin))


def _rescue(rescued: Rescue) -> doc.Fact:
    verdict = rescued.verdict
    last = _end(rescued.broken[: rescued.broken_at - 1])
    steps = len(rescued.cured)
    remedy = rescued.cure.text.splitlines()[0]
    text = f"Step {rescued.broken_at} in fp16 was not finite: {verdict.op} in module {verdict.module}, {verdict.line}."
    again = f", {rescued.cured_skipped} of them skipped" if rescued.cured_skipped else ""
    more = (
        f"Cause: {verdict.what}. Left as it was, {rescued.skipped} of the {steps} steps from there on were skipped.",
        f"Cure, {'verified by training on' if rescued.cure.verified else 'not verified'}: {remedy}. Under it the run "
        f"went on for {steps} steps{again}; mean loss of {ENDS} steps {last} before, {_end(rescued.cured)} at the end.",
    )
    return doc.Fact("A run that went NaN, explained and cured", text, more, "good")


def _end(losses: Sequence[float]) -> str:
    last = [loss for loss in losses[-ENDS:] if math.isfinite(loss)]
    return f"{statistics.fmean(last):.2g}" if last else "not finite"


def _missing(units: hs.policy.Units, missing: Sequence[str]) -> doc.Fact:
    words = [f"Not finished: {doc.listed(list(missing))}."] if missing else []
    if units.device == "cpu":
        words.append("There is no GPU here: all numbers are of this CPU and are no evidence of a GPU's speed.")
        if not units.fp16:
            words.append("fp16 is emulated: its results are those of a GPU's units, its time is not.")
    words.append("Several devices were not tried.")
    text, *more = words
    return doc.Fact("Not measured", text, tuple(more), "open" if missing else "")
