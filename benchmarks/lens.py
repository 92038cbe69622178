"""Measure what halfstep's instruments cost beside those that people use without it, and whom each names.

    python -m benchmarks.lens --json benchmarks/results/lens.json
    python -m benchmarks.lens --only gpt256 --quick

Steps with and without instruments run in turns in one process, as in `benchmarks.run`; a figure is the median of ratios
within rounds, with its 90 % interval, and each ground runs twice (A/A). Explaining a bad step and auditing are timed in
pairs with the model's own steps. ``--only`` measures some parts; with ``--json`` of a file that is there, its other
parts stay. ``--quick`` sees that everything runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import halfstep as hs
from benchmarks import blame
from benchmarks.cases import AGAIN, AMP, GPT256, LENET, RESNET18, Batch, Case
from benchmarks.instruments import (
    ANOMALY,
    BASELINES,
    BETWEEN,
    BOXED,
    HOOKS,
    LABELS,
    OFF,
    OFF_AGAIN,
    ON,
    SAMPLING,
    sampled,
)
from benchmarks.loops import CLIP, Run, policy
from benchmarks.measure import FULL, QUICK, Effort, milliseconds, rounds_for, say, started
from benchmarks.stamp import commit, write
from benchmarks.turns import in_turns, quiet_collector, ratio
from halfstep.lens.box import stepbox
from halfstep.tasks import machine
from halfstep.tasks.measure import state_bytes
from halfstep.timing import WARM_UP, paired_ratio

FAULTS = "faults"
EVERY = (10, 100)
AUDITED = 3  # steps of an audit
FACTOR = 2.0**18  # on weights of the order of 0.05: the layer's results pass fp16's 65504, its weights do not
REPEATS = 6  # of explanations and audits


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A case and what is measured on it.

    Attributes:
        case: its `seconds` are those of the rounds, `rare` those that take part in few of them.
        layer: path of the module whose weights are made too large, for a step to explain.
        turns: whether steps with and without instruments are timed.
    """

    case: Case
    layer: str
    turns: bool = True


CASES = {
    "gpt256": Watched(case=replace(GPT256, seconds=170.0, rare=((ANOMALY, 20), (HOOKS, 20))), layer="blocks.2.up"),
    "lenet5": Watched(case=replace(LENET, seconds=50.0, rounds=800, rare=()), layer="conv2"),
    "resnet18": Watched(case=RESNET18, layer="blocks.3.conv1", turns=False),
}


# ------------------------------------------------------------------ steps


def turns(case: Case, effort: Effort) -> dict[str, Any]:
    """Time steps with and without instruments, in turns, and count the bytes that black boxes keep between steps."""
    here = started(case, LABELS, "cpu")
    rare = {label: min(n, effort.rounds) for label, n in case.rare}
    rounds = rounds_for(case, {k: t for k, t in here.steady.items() if k not in rare}, effort)
    say(f"{case.name}: {rounds} rounds")
    in_turns(
        {label: run.step for label, run in here.runs.items()},
        case.batch,
        here.tracks,
        "cpu",
        rounds=range(WARM_UP, WARM_UP + rounds),
        rare=rare,
    )
    rows: dict[str, dict[str, Any]] = {}
    for label, track in here.tracks.items():
        rows[label] = {"ms": milliseconds(track)}
        if label in BASELINES:
            base = BASELINES[label]
            rows[label] |= {"to": base, "ratio": asdict(ratio(track, here.tracks[base]))}
    plain = here.tracks[OFF]
    return {
        "rounds": rounds,
        "controls": {OFF: rows.pop(OFF_AGAIN)["ratio"], AMP: rows.pop(AGAIN)["ratio"]},
        "rows": rows,
        "every": {
            str(every): asdict(sampled(here.tracks[SAMPLING], here.tracks[BETWEEN], plain, every)) for every in EVERY
        },
        "held_bytes": {
            ON: held(here.runs[ON], here.runs[OFF]),
            BOXED: held(here.runs[BOXED], here.runs[AMP]),
        },
    }


def held(run: Run, plain: Run) -> int:
    """Return the bytes of tensors that `run` keeps between steps beyond those of `plain`, the same without a box."""
    return state_bytes(*run.holds) - state_bytes(*plain.holds)


# ------------------------------------------------------------------ a bad step


def explained(case: Case, layer: str, repeats: int) -> dict[str, Any]:
    """Time the explanation of a step in which a layer overflows, in units of good steps of the same TrainStep.

    The weights of the layer are multiplied by a power of two for one step in fp16, and divided by it when it has been
    explained. The first time is not taken.

    Args:
        case: which; in fp16, whatever its own format.
        layer: path of a module with a weight.
        repeats: times that are taken.
    """
    case = replace(case, dtype="fp16")
    run, plain = begun(case, blackbox=True), begun(case, blackbox=False)
    steps, explaining, curing = [], [], []
    for number in range(repeats + 1):
        batch = case.batch(number)
        run.step(batch)  # which also hears the verdict on the step before
        with (
            quiet_collector(),
            timed(stepbox.StepBox, "_explained") as explanations,  # in the step, or on request
            timed(stepbox, "cures") as cured,
        ):
            steps.append(seconds(lambda: run.step(batch)))  # noqa: B023  # called at once
            verdict = broken(run, layer, batch)
        explaining.append(sum(explanations))
        curing.append(sum(cured))
    for one in (run, plain):
        one.step(batch)
    good, whole, cures = steps[1:], explaining[1:], curing[1:]
    return {
        "ms": 1e3 * statistics.median(good),
        "explain_ms": 1e3 * statistics.median(whole),
        "explain": asdict(paired_ratio(whole, good)),
        "diagnosis": asdict(paired_ratio([a - b for a, b in zip(whole, cures, strict=True)], good)),
        "cures": asdict(paired_ratio(cures, good)),
        "verdict": {"kind": verdict.kind, "op": verdict.op, "module": verdict.module, "phase": verdict.phase},
        "verified": [cure.text.partition("\n")[0] for cure in verdict.cures if cure.verified],
        "held_bytes": held(run, plain),
    }


def begun(case: Case, *, blackbox: bool) -> Run:
    """Return a TrainStep under `mixed` that has made its first steps."""
    torch.manual_seed(0)
    run = policy(case, case.model(), "mixed", blackbox=blackbox)
    for number in range(WARM_UP):
        run.step(case.batch(number))
    return run


def broken(run: Run, layer: str, batch: Batch) -> hs.lens.Verdict:
    """Train one step with a layer that overflows; return what is said of it.

    Raises:
        RuntimeError: the step was applied.
    """
    train: Any = run.holds[0]
    weight = run.model.get_submodule(layer).weight
    with torch.no_grad():
        weight.mul_(FACTOR)  # type: ignore[operator]  # a tensor
    try:
        if not train(*batch).skipped:
            raise RuntimeError(f"{layer} does not overflow with weights {FACTOR:g} times as large")
        verdict: hs.lens.Verdict = train.explain()
        return verdict
    finally:
        with torch.no_grad():
            weight.div_(FACTOR)  # type: ignore[operator]


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    begun_at = time.perf_counter()
    call()
    return time.perf_counter() - begun_at


@contextmanager
def timed(place: Any, name: str) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every call of the function `name` of a module or class."""
    function, spent = getattr(place, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        begun_at = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begun_at)

    with patch.object(place, name, call):
        yield spent


# ------------------------------------------------------------------ audit


def audited(case: Case, repeats: int, steps: int = AUDITED) -> dict[str, Any]:
    """Time `hs.audit` over some steps, its copies included, in units of as many training steps."""
    run = begun(case, blackbox=True)
    train: Any = run.holds[0]
    batches = [case.batch(number) for number in range(steps)]
    training, auditing = [], []

    def train_on_all() -> None:
        for batch in batches:
            run.step(batch)

    def audit() -> None:
        hs.audit(run.model, batches, case.loss_fn, None, train.optimizer, steps=steps, clip_norm=CLIP)

    for _ in range(repeats + 1):
        with quiet_collector():
            training.append(seconds(train_on_all))
            auditing.append(seconds(audit))
    return {
        "steps": steps,
        "ms": 1e3 * statistics.median(training[1:]) / steps,
        "audit_ms": 1e3 * statistics.median(auditing[1:]) / steps,
        "ratio": asdict(paired_ratio(auditing[1:], training[1:])),
    }


# ------------------------------------------------------------------ all of it


def measure(watched: Watched, effort: Effort, repeats: int) -> dict[str, Any]:
    """Measure one case; plain values, as the JSON has them."""
    begun_at, case = time.perf_counter(), watched.case
    result: dict[str, Any] = {"title": case.title, "about": case.about}
    if watched.turns:
        result["turns"] = turns(case, effort)
        say(f"{case.name}: turns, {time.perf_counter() - begun_at:.0f} s")
    gc.collect()
    result["explain"] = explained(case, watched.layer, repeats)
    say(f"{case.name}: explained, {time.perf_counter() - begun_at:.0f} s")
    gc.collect()
    result["audit"] = audited(case, repeats)
    gc.collect()
    result["seconds"] = round(time.perf_counter() - begun_at, 1)
    say(f"{case.name}: {result['seconds']} s")
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", action="append", choices=(*CASES, FAULTS), help="a part; may be given several times")
    parser.add_argument("--quick", action="store_true", help="few rounds and faults, to see that everything runs")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # the black box tells of every bad step
    warnings.filterwarnings("ignore", category=UserWarning)  # of hooks that see no gradient of a batch
    begun_at = time.perf_counter()
    fresh: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.lens", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "cases": {},
        FAULTS: {},
    }
    report = fresh
    if options.only and options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))
        report = {**fresh, **{key: known[key] for key in ("command", "cases", FAULTS)}}
    effort, repeats = (QUICK, 2) if options.quick else (FULL, REPEATS)
    note = {"commit": fresh["commit"], "quick": options.quick}
    for name in options.only or (FAULTS, *CASES):
        if name == FAULTS:
            faults = blame.asked()
            chosen = [f for f in faults if f.name in blame.SHOWN] if options.quick else faults
            report[FAULTS] = {**blame.compared(chosen), **note}
            say(f"{len(chosen)} faults: {time.perf_counter() - begun_at:.0f} s")
            continue
        report["cases"][name] = {**measure(CASES[name], effort, repeats), **note}
        report["seconds"] = round(sum(case["seconds"] for case in report["cases"].values()), 1)
        if options.json is not None:
            write(options.json, report)  # what was measured stays if something later fails
    say(f"all: {time.perf_counter() - begun_at:.0f} s")
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
