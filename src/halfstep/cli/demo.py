"""``halfstep demo``: what low formats do on this machine, in two minutes: time, bytes, accuracy, and a NaN cured."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import halfstep as hs
from halfstep.cli.conclusions import conclusions
from halfstep.cli.demo_page import demo_page
from halfstep.cli.demo_tables import print_accuracy, print_pace, print_rescue
from halfstep.cli.numbers import counted
from halfstep.cli.terminal import (
    INTERRUPTED,
    command_line,
    complain,
    console,
    device_type,
    item,
    say,
    writable,
    write_json,
)  # fmt: skip
from halfstep.cli.watch import Watch
from halfstep.report import render, require_extra
from halfstep.tasks import TaskError, load_task, machine
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import Comparison, Moment, compare
from halfstep.tasks.machine import threads_of_torch
from halfstep.tasks.overflow import Rescue, rescue
from halfstep.tasks.pace import Pace, pace
from halfstep.tasks.pitfalls import load_average, threads_to_use, usable_cores
from halfstep.tasks.workloads import Workload, workloads

__all__ = ["TIMED", "Settings", "run_demo"]

TIMED = ("mixed", "lean", "pure", "O0")  # mixed and lean first: the same colours as in the comparisons


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How long each part takes."""

    seconds: tuple[float, ...] = (20.0, 15.0, 4.0)  # of timing each workload
    seeds: int = 5  # the fewest for a verdict
    steps: tuple[tuple[str, int], ...] = (("lenet5", 120), ("gpt", 50))  # of the tasks whose accuracy is compared
    broken_steps: int = 120  # of the run that goes NaN


@dataclass(kw_only=True, slots=True)
class Measured:
    """What was measured so far."""

    device: str
    units: hs.policy.Units
    paces: list[tuple[Workload, Pace]] = field(default_factory=list)
    rescue: Rescue | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # parts that were not finished, the first with the reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the demo: it adds its result to what was measured, and returns how to print it."""

    title: str
    weight: float  # seconds it takes, roughly
    run: Callable[[Callable[[float], None]], Callable[[], None]]


def run_demo(
    *, html_path: Path | None, json_path: Path | None, device: str, settings: Settings | None = None
) -> int:  # fmt: skip
    """Run the command.

    Returns:
        Its exit code: 0; 2 for bad input; 130 after Ctrl-C, when the finished parts were printed and written.
    """
    out, err = console(), console(stderr=True)
    try:
        where = device_type(device)
        if html_path is not None:
            require_extra("--html")
            if json_path is not None and json_path.resolve() == html_path.resolve():
                raise TaskError(f"--json and --html name the same file {str(html_path)!r}; give them two")
        writable(json_path, "--json")
        writable(html_path, "--html")
    except hs.HalfstepError as error:
        return complain(error)
    about = machine()
    demo = Measured(device=where, units=hs.policy.units(where))
    on = f", {about['accelerator']}" if about["accelerator"] else ""
    say(out, f"{about['cpu']}, {about['cores']} cores{on}; torch {about['torch']}, Python {about['python']}")
    say(out, demo.units.reason)
    load = load_average()
    threads = threads_to_use(torch.get_num_threads(), usable_cores(), load)
    if threads < torch.get_num_threads():
        say(out, f"this machine was busy in the last minute (load average {load:.1f}; an installation counts too): "
                 f"measured with {counted(threads, 'thread')}, and less exactly")  # fmt: skip
    with threads_of_torch(threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without units")  # the tables have it, with its time
        interrupted = _measure(demo, list(_parts(demo, settings or Settings(), out)), err)
    say(out)
    say(out, "Conclusions", style="bold")
    found = conclusions(demo.paces, demo.rescue, demo.comparisons, demo.units, demo.missing)
    for fact in found:
        item(out, " ".join((f"{fact.heading}: {fact.text}", *fact.more)))
    command = command_line("demo", html=html_path, json=json_path, device=device)
    if json_path is not None:
        write_json(out, json_path, _record(demo, about, command))
    if html_path is not None:
        page = demo_page(demo.paces, demo.rescue, demo.comparisons, found, about=about, command=command,
                         day=datetime.date.today())  # fmt: skip
        html_path.write_text(render(page), encoding="utf-8")
        say(out, f"written: {html_path}")
    return INTERRUPTED if interrupted else 0


def _measure(demo: Measured, parts: list[Part], err: Console) -> bool:
    """Run the parts; return whether Ctrl-C ended them. What was not finished is named in the demo."""
    total = sum(part.weight for part in parts)
    done = 0.0
    for number, part in enumerate(parts):
        phase = f"{number + 1}/{len(parts)} {part.title}"
        try:
            with Watch(err) as watch:  # ends before its result is printed: a bar would divert what goes to stdout
                show = part.run(_sharing(watch, phase, done / total, part.weight / total))
            show()
        except KeyboardInterrupt:
            demo.missing += [f"{part.title} (interrupted)", *(each.title for each in parts[number + 1 :])]
            return True
        except hs.HalfstepError as error:
            demo.missing.append(f"{part.title} ({error})")
        done += part.weight
    return False


def _sharing(watch: Watch, phase: str, begin: float, share_of_all: float) -> Callable[[float], None]:
    """Return a function that takes a part's share and shows that of the whole."""
    watch.see(begin, phase)
    return lambda share: watch.see(begin + share * share_of_all, phase)


def _parts(demo: Measured, settings: Settings, out: Console) -> Iterator[Part]:
    """Yield the parts in their order."""
    timed = candidates(TIMED, demo.device)
    for workload, seconds in zip(
        workloads(demo.device, units=demo.units.bf16), settings.seconds, strict=True
    ):  # fmt: skip

        def time_it(
            on_share: Callable[[float], None], workload: Workload = workload, seconds: float = seconds
        ) -> Callable[[], None]:
            made = pace(workload.task, timed, device=demo.device, seconds=seconds, on_share=on_share)
            demo.paces.append((workload, made))
            return lambda: print_pace(out, workload, made)

        yield Part(title=f"time and bytes of a model bound by {workload.bound_by}", weight=seconds + 3, run=time_it)

    def break_it(on_share: Callable[[float], None]) -> Callable[[], None]:
        demo.rescue = made = rescue(device=demo.device, steps=settings.broken_steps, on_share=on_share)
        return lambda: print_rescue(out, made)

    yield Part(title="a run in fp16 that goes NaN", weight=8, run=break_it)
    labels = ("mixed", "lean", "mixed:fp16")
    for name, steps in settings.steps:
        if not demo.units.bf16 and name == "gpt" and demo.device == "cpu":
            demo.missing.append(f"accuracy of {name} (bf16 without units would take minutes here)")
            continue

        def train_it(on_share: Callable[[float], None], name: str = name, steps: int = steps) -> Callable[[], None]:
            compared = candidates(labels, demo.device)
            moments = (len(compared) + 1) * steps * settings.seeds
            seen = 0

            def on_step(moment: Moment) -> None:
                nonlocal seen
                seen += 1
                on_share(seen / moments)

            task = load_task(name)
            made = compare(task, compared, steps=steps, seeds=settings.seeds, device=demo.device, on_step=on_step)
            demo.comparisons.append(made)
            return lambda: print_accuracy(out, made)

        yield Part(title=f"accuracy of {name} beside fp32", weight=25, run=train_it)


def _record(demo: Measured, about: dict[str, Any], command: str) -> dict[str, Any]:
    rescued = demo.rescue
    return {
        "command": command,
        "halfstep": hs.__version__,
        "machine": about,
        "units": asdict(demo.units),
        "paces": [{**asdict(made), "bound_by": workload.bound_by} for workload, made in demo.paces],
        "rescue": None if rescued is None else {
            "broken_at": rescued.broken_at, "skipped": rescued.skipped, "broken": rescued.broken,
            "cured": rescued.cured, "cured_skipped": rescued.cured_skipped, "verdict": rescued.verdict.record(),
        },
        "tasks": [asdict(made) for made in demo.comparisons],
        "missing": demo.missing,
    }  # fmt: skip
