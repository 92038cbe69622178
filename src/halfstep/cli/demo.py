"""``halfstep demo``: what low formats do on this machine: time, bytes, accuracy, and a NaN cured."""

from __future__ import annotations

import datetime
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import halfstep as hs
from halfstep.cli.pages.demo import accuracy_section, demo_page, rescue_section, time_section
from halfstep.cli.pages.facts import Demo, conclusions
from halfstep.cli.progress import Watch
from halfstep.cli.terminal import INTERRUPTED, Files, command_line, console, machine_line, print_section, record, say
from halfstep.report import Facts, Section, counted, plain, write_page
from halfstep.tasks import load_task, machine
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import compare, pace, probed
from halfstep.tasks.machine import device_type, threads_of_torch
from halfstep.tasks.measure import ENOUGH_SEEDS
from halfstep.tasks.overflow import rescue
from halfstep.tasks.pitfalls import load_average, threads_to_use, usable_cores
from halfstep.tasks.workloads import Workload, workloads

SECONDS = (20.0, 15.0, 4.0)  # of timing each workload
STEPS = {"lenet5": 120, "gpt": 50}  # of the tasks whose accuracy is compared, at most
LEAST_STEPS = 10  # of them, however slow the machine is
TRAINED, EXPLAINED = 25.0, 8.0  # seconds of each of these tasks, and of the run that goes NaN
BROKEN_STEPS = 120  # of the run that goes NaN
TIMED = ("mixed", "lean", "pure", "O0")  # mixed and lean first: the same colours as in the comparisons


OnShare = Callable[[float], None]
"""Takes the share of a part that is done."""

Part = tuple[str, float, Callable[[OnShare], Section]]
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
    say(err, f"{counted(len(parts), 'part')}, about {counted(max(1, round(seconds / 60)), 'minute')}")
    load = load_average()
    threads = threads_to_use(torch.get_num_threads(), usable_cores(), load)
    if threads < torch.get_num_threads():
        say(out, f"this machine was busy in the last minute (load average {load:.1f}; an installation counts too): "
                 f"measured with {counted(threads, 'thread')}, and less exactly")  # fmt: skip
    with threads_of_torch(threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without units")  # the tables have it, with its time
        interrupted = _measure(demo, parts, out, err)
    print_section(out, Section("Conclusions", (Facts(conclusions(demo)),)))
    day = datetime.date.today()
    files.write(
        out,
        json=record(machine=about, **_facts(demo)),
        html=lambda path: write_page(demo_page(demo, about=about, command=command_line(), day=day), path),
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


def _time(demo: Demo, workload: Workload, seconds: float, on_share: OnShare) -> Section:
    timed = candidates(TIMED, demo.device)
    made = pace(workload.task, timed, device=demo.device, seconds=seconds, on_share=on_share)
    demo.paces.append((workload, made))
    return time_section(workload, made)


def _break(demo: Demo, on_share: OnShare) -> Section:
    demo.rescue = rescue(device=demo.device, steps=BROKEN_STEPS, on_share=on_share)
    return rescue_section(demo.rescue)


def _train(demo: Demo, name: str, steps: int, on_share: OnShare) -> Section:
    compared, task = candidates(("mixed", "lean", "mixed:fp16"), demo.device), load_task(name)
    seconds = [probed(task, each, demo.device).seconds for each in compared]
    turns = ENOUGH_SEEDS * (sum(seconds) + seconds[1])  # torch.amp, the second, runs twice
    steps = min(steps, max(LEAST_STEPS, int(TRAINED / turns)))
    seen, total = itertools.count(1), (len(compared) + 1) * steps * ENOUGH_SEEDS
    on_step = lambda *step: on_share(next(seen) / total)  # noqa: E731
    made = compare(task, compared, steps=steps, seeds=ENOUGH_SEEDS, device=demo.device, on_step=on_step)
    demo.comparisons.append(made)
    return accuracy_section(made)


def _facts(demo: Demo) -> dict[str, Any]:
    rescued = demo.rescue
    names = ("broken_at", "skipped", "broken", "cured", "cured_skipped")
    run = rescued and {**{name: getattr(rescued, name) for name in names}, "verdict": rescued.verdict.record()}
    return {
        "units": demo.units,
        "paces": [{**plain(made), "bound_by": workload.bound_by} for workload, made in demo.paces],
        "rescue": run,
        "tasks": demo.comparisons,
        "missing": demo.missing,
    }
