"""The score of the instruments on stories from public trackers: ``python -m benchmarks.faults.stories_scored``.

    python -m benchmarks.faults.stories_scored --json benchmarks/results/stories.json
    python -m benchmarks.faults.stories_scored --only language t5_feed_forward_grows --verbose

Every story runs in a process of its own with a time limit, so one that hangs or dies is one wrong answer. In it: the
story under hs.TrainStep (or hs.BlackBox in a loop written by hand), asked about its step; a run of 50 steps under each
cure that was marked verified, and in fp32; the twin for 300 steps under the black box and hs.Monitor (a loop: the black
box alone); and the same program in torch alone under each peer. `benchmarks.faults.story_score` judges what was said.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep as hs
from benchmarks.blame import OURS, PEERS, Run, Said, answer, plain
from benchmarks.faults.case import FULL, Case, start
from benchmarks.faults.catalog import FOURTH, THIRD
from benchmarks.faults.observe import unwatched
from benchmarks.faults.plain import plain_bad_steps
from benchmarks.faults.score import HARMLESS
from benchmarks.faults.story import CURED_STEPS, TWIN_STEPS, Story, course, near, place_of
from benchmarks.faults.story_score import curable, cure_right, parts_right, place_right, unsaid
from benchmarks.stamp import commit, write
from halfstep.errors import StepError
from halfstep.tasks import machine

__all__ = ["main", "scored", "verdict_on"]

LIMIT = 240.0
"""Seconds that a story may take."""

EVERY = 10
"""Steps from one sample of the twin's Monitor to the next."""

Verdict = hs.lens.Verdict


# ------------------------------------------------------------------ halfstep


def verdict_on(told: Story) -> Verdict | None:
    """Run a story to the step that it is asked about; return what the black box says, None if it has seen nothing."""
    if told.loop:
        boxes: list[hs.BlackBox] = []
        exhaust(islice(told.turns(partial(boxed, boxes)), told.asked))
        return asked(boxes)
    case = told.build()
    step = start(case)
    for number in range(1, case.steps + 1):
        case.before(number)
        step(*case.batch(number))
    return asked([step])


def boxed(boxes: list[hs.BlackBox], model: nn.Module, loss_fn: Callable[..., Any], optimizer: Any) -> hs.BlackBox:
    """Return a black box around a loop's loss function, and keep it in `boxes`."""
    boxes.append(hs.BlackBox(model, loss_fn, optimizer))
    return boxes[-1]


def asked(boxes: Iterable[hs.TrainStep | hs.BlackBox]) -> Verdict | None:
    """Return the verdict of the first that has a step to explain, None if none has."""
    for box in boxes:
        with suppress(StepError):
            return box.explain()
    return None


def alarms(told: Story) -> list[str]:
    """Train the twin for 300 steps; return what is accused in it: by the black box, unasked or asked, or by Monitor.

    A step that only a scale on its way refuses accuses nothing, whatever is logged of it.
    """
    case = None if told.loop else told.build(healthy=True)
    boxes: list[Any] = []
    monitors: list[hs.Monitor] = []
    if case is None:
        results: Iterator[Any] = told.turns(partial(boxed, boxes), healthy=True)
    else:
        boxes.append(start(case))
        monitors.append(hs.Monitor(boxes[0], every=EVERY))
        results = trained(case, boxes[0])
    found: list[str] = []
    with Listener(found):
        before = 0
        for result in islice(results, TWIN_STEPS):
            if result.skipped or not math.isfinite(result.loss):
                verdict = asked(boxes)
                if verdict is not None and verdict.kind in HARMLESS:
                    del found[before:]
                elif verdict is not None:
                    found.append(verdict.headline)
            before = len(found)
        if monitors:
            boxes[0].flush()
    findings = [finding for monitor in monitors for finding in monitor.findings()]
    return found + [f"Monitor: {finding.kind} in {', '.join(finding.where)}" for finding in findings]


def trained(case: Case, step: hs.TrainStep) -> Iterator[Any]:
    """Train a case for as long as results are taken."""
    for number in count(1):
        case.before(number)
        yield step(*case.batch(number)).host()


class Listener(logging.Handler):
    """Puts into a list the first lines of what halfstep logs as a warning, while the block runs."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found, self.logger = found, logging.getLogger("halfstep")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line."""
        self.found.append(f"log: {record.getMessage().splitlines()[0]}")

    def __enter__(self) -> Listener:
        self.logger.addHandler(self)
        self.level, self.propagates = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.WARNING)
        self.logger.propagate = False
        return self

    def __exit__(self, *exc: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level)
        self.logger.propagate = self.propagates


# ------------------------------------------------------------------ peers


def in_torch(told: Story) -> Run:
    """Return a story's program in an ordinary loop with torch.autocast, or its own loop."""

    def run(attach: Callable[[nn.Module], Any]) -> None:
        if not told.loop:
            case = unwatched(told.build())
            attach(case.model)
            exhaust(plain_bad_steps(case))
            return

        def watch(model: nn.Module, loss_fn: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
            attach(model)
            return partial(loss_fn, model)

        exhaust(islice(told.turns(watch), told.asked))

    return run


def exhaust(turns: Any) -> None:
    """Run an iterator to its end."""
    for _ in turns:
        pass


def peer_judged(said: Said, told: Story) -> dict[str, Any]:
    """Return what a peer said and which parts of it are right; a line is right anywhere in its traceback."""
    truth, place = told.truth, place_of(told)
    right = {plain(name) for name in (truth.op, *truth.also)} if truth.op else set()
    lines = [(Path(file).name, line) for file, line in said.places]
    return {
        "words": said.words,
        "op": bool(right & {plain(name) for name in said.op}),
        "module": said.module is not None and said.module in (truth.module, *truth.also),
        "line": place is not None and any(f == place.file and place.first <= n <= place.last for f, n in lines),
    }


# ------------------------------------------------------------------ one story


def scored(told: Story) -> dict[str, Any]:
    """Return everything that is known of a story: its labels, what was said of it and what is right."""
    truth = told.truth
    begun = time.perf_counter()
    row: dict[str, Any] = {
        "file": told.file.stem,
        "source": told.source,
        "about": told.about.splitlines()[0],
        "truth": {n: getattr(truth, n) for n in ("cause", "kind", "op", "module", "phase", "parameter", "cures")},
        "loop": told.loop,
    }
    verdict, error = tried(verdict_on, told)
    wide = cache(partial(course, told, CURED_STEPS, policy=FULL))

    def trains(policy: hs.Policy) -> str:
        return near(course(told, CURED_STEPS, policy=policy), wide())

    cure, verified = cure_right(verdict, told, trains)
    twin, twin_error = tried(alarms, told)
    return row | {
        "error": error,
        "said": None if verdict is None else said_by(verdict),
        "place": place_right(verdict, told),
        "parts": {} if verdict is None else parts_right(verdict, told),
        "kind": verdict is not None and verdict.kind == truth.kind,
        "cause": verdict is not None and verdict.cause == truth.cause,
        "curable": curable(told),
        "cure": cure,
        "verified": verified,
        "unsaid": unsaid(verdict, told),
        "twin": [twin_error] if twin is None else twin,
        "peers": {name: peer_judged(answer(partial(peer, in_torch(told))), told) for name, peer in PEERS.items()},
        "seconds": round(time.perf_counter() - begun, 1),
    }


def said_by(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values."""
    names = ("headline", "kind", "cause", "because", "sure", "op", "module", "phase", "line", "parameter")
    cures = [f"{'verified: ' if c.verified else ''}{c.text.splitlines()[0]}" for c in verdict.cures]
    return {name: getattr(verdict, name) for name in names} | {"cures": cures}


def tried(function: Callable[[Story], Any], told: Story) -> tuple[Any, str]:
    """Return what `function` gives and "", or None and the error."""
    try:
        return function(told), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


# ------------------------------------------------------------------ all


def each(chosen: list[Story], limit: float) -> Iterator[tuple[Story, dict[str, Any]]]:
    """Score stories one after the other, each in a fork of this process."""
    context = multiprocessing.get_context("fork")
    for told in chosen:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_send, args=(told.name, there))
        child.start()
        there.close()
        row: dict[str, Any] = {"died": f"no answer in {limit:.0f} s"}
        try:
            if here.poll(limit):
                row = here.recv()
        except EOFError:
            row = {"died": "the process died"}
        child.terminate()
        child.join()
        yield told, row


def _send(name: str, there: Connection) -> None:
    told = next(t for t in (*THIRD, *FOURTH) if t.name == name)
    try:
        row = scored(told)
    except Exception as error:
        row = {"died": f"{type(error).__name__}: {error}"}
    there.send(row)


def told_of(name: str, row: dict[str, Any], *, verbose: bool) -> str:
    """Return one line on a story, and with `verbose` what was said and expected."""
    if "died" in row:
        return f"{name}: {row['died']}"
    marks = {
        "place": row["place"],
        "cause": row["cause"],
        "cure": row["cure"] is not False and not any(row["verified"].values()),
        "words": not row["unsaid"],
        "twin": not row["twin"],
    }
    wrong = [part for part, right in marks.items() if not right]
    line = f"{name} ({row['truth']['cause']}), {row['seconds']} s: {'wrong ' + ', '.join(wrong) if wrong else 'right'}"
    if not verbose or not wrong:
        return line
    details = [f"expected {row['truth']}", f"said {row['said']}", f"error {row['error']}", f"words {row['unsaid']}"]
    details += [f"verified cures {row['verified']}", f"twin {row['twin'][:3]}"]
    return "\n    ".join((line, *details))


def main() -> None:
    """Score stories and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.stories_scored")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--fourth", action="store_true", help="the fourth set instead of the third")
    parser.add_argument("--only", nargs="+", default=[], help="names of stories, or of files")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a story may take")
    parser.add_argument("--verbose", action="store_true", help="show what was said and expected where it is wrong")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("halfstep").addHandler(logging.NullHandler())
    logging.getLogger("halfstep").propagate = False
    warnings.simplefilter("ignore")
    with suppress(ImportError):
        importlib.import_module("transformers.debug_utils")  # once, not in every fork
    stories = FOURTH if options.fourth else THIRD
    chosen = [t for t in stories if not options.only or {t.name, t.file.stem} & set(options.only)]
    begun = time.perf_counter()
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.faults.stories_scored", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "steps": {"cured": CURED_STEPS, "twin": TWIN_STEPS},
        "instruments": [OURS, *PEERS],
        "stories": {},
    }
    for told, row in each(chosen, options.limit):
        report["stories"][told.name] = row
        print(told_of(told.name, row, verbose=options.verbose), flush=True)
    report["seconds"] = round(time.perf_counter() - begun, 1)
    print(f"{len(chosen)} stories in {report['seconds']:.0f} s")
    if options.json is not None:
        write(options.json, json.loads(json.dumps(report)))


if __name__ == "__main__":
    main()
