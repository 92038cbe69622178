"""Measure what policy="auto" chooses, and its steps beside fp32 and torch.amp, eager and compiled; write a JSON file.

    python -m benchmarks.auto --json benchmarks/results/auto.json

For every case of `benchmarks/cases.py` that has candidates on a CPU: a TrainStep with policy="auto" makes its choice,
then it trains in turns with plain fp32, torch.amp and torch.amp compiled, in an order shuffled each round. A figure is
the median of ratios within rounds, with its 90 % interval. A case that is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from benchmarks import loops
from benchmarks.cases import AMP, CASES, Batch, Case
from benchmarks.loops import CLIP, Run
from benchmarks.markdown import ratio, table
from benchmarks.stamp import commit, write
from benchmarks.turns import Track, in_turns
from benchmarks.turns import ratio as paired
from halfstep.tasks import machine
from halfstep.timing import WARM_UP

GOAL = 1.02  # of the best of the others
AUTO, AGAIN, BF16 = "auto", "fp32 again", "torch.amp bf16"
COMPILED = "torch.amp compiled"
LEAST, MOST = 9, 200
SECONDS = 8.0  # what the rounds of a case may take
RARE = 2  # rounds of what takes more than `SLOW` times as long as fp32: torch's fp16 kernels on a CPU
SLOW = 3.0

Loop = Callable[[Case, nn.Module], Run]
OTHERS: Mapping[str, Loop] = {
    "fp32": loops.fp32,
    AGAIN: loops.fp32,
    AMP: loops.amp,
    COMPILED: partial(loops.amp, compile="default"),
    BF16: partial(loops.amp, dtype=torch.bfloat16),
}


def chosen(case: Case) -> tuple[hs.TrainStep, dict[str, Any]]:
    """Return a training step that has chosen, and what was chosen."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    step = hs.TrainStep(model, optimizer, case.loss_fn, policy="auto", clip_norm=CLIP)
    step(*case.batch(0))
    choice = step.choice
    assert choice is not None
    print(choice.line, file=sys.stderr, flush=True)
    return step, {
        "policy": choice.policy.name,
        "compiled": choice.compiled,
        "line": choice.line,
        "rounds": choice.rounds,
        "calls": choice.calls,
        "seconds": round(choice.seconds, 1),
        "candidates": {name: round(one.median, 4) for name, one in choice.ratios},
    }


def measure(case: Case, seconds: float, least: int) -> dict[str, Any]:
    """Return the choice for a case, and the paired ratios of its steps.

    Args:
        case: which.
        seconds: what the rounds may take.
        least: rounds at least.
    """
    begun = time.perf_counter()
    torch._dynamo.reset()  # compiled functions of another case share a limit of versions
    step, choice = chosen(case)
    steps: dict[str, Callable[[Batch], Tensor]] = {AUTO: lambda batch: step(*batch).loss}
    taken: dict[str, float] = {}
    for label, loop in OTHERS.items():
        if (label == BF16) != (case.dtype == "fp16") and label == BF16:
            continue
        if label == COMPILED and taken[AMP] > SLOW * taken["fp32"]:
            continue  # the same kernels
        torch.manual_seed(0)
        steps[label] = loop(case, case.model()).step
        for number in range(WARM_UP):
            start = time.perf_counter()
            steps[label](case.batch(number))
            taken[label] = time.perf_counter() - start
            if "fp32" in taken and taken[label] > 2 * SLOW * taken["fp32"] and label == AMP:
                break
    for number in range(WARM_UP):
        steps[AUTO](case.batch(number))
    rare = {label: RARE for label in taken if taken[label] > SLOW * taken["fp32"]}
    fitting = int(seconds / (taken["fp32"] + sum(one for label, one in taken.items() if label not in rare)))
    tracks = {label: Track() for label in steps}
    rounds = range(WARM_UP, WARM_UP + max(least, min(MOST, fitting)))
    in_turns(steps, case.batch, tracks, "cpu", rounds=rounds, rare=rare)
    to_others = {label: dataclasses.asdict(paired(tracks[AUTO], tracks[label])) for label in steps if label != AUTO}
    control = dataclasses.asdict(paired(tracks[AGAIN], tracks["fp32"]))
    del to_others[AGAIN]
    best = max(to_others, key=lambda label: to_others[label]["median"])
    return {
        "title": case.title,
        "dtype": case.dtype,
        "choice": choice,
        "ms": {label: 1e3 * statistics.median(track.seconds.values()) for label, track in tracks.items()},
        "auto_to": to_others,
        "best": best,
        "to_best": to_others[best],
        "control": control,
        "rounds": len(rounds),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def auto_table(report: dict[str, Any]) -> str:
    """Return what was chosen and how fast it is, a row for each case."""
    if not report:
        return "Not measured here."
    rows = []
    for case in report["cases"].values():
        choice = case["choice"]
        name = "fp32" if choice["policy"] == "O0" else f"`{choice['policy']}`"
        what = f"{name}, compiled" if choice["compiled"] else name
        first = f"{choice['seconds']:.1f} s, {choice['calls']} calls"
        title = f"{case['title']}, {case['dtype']}"
        rows.append([title, what, first, case["best"], ratio(case["to_best"]), ratio(case["control"])])
    head = ["case", "chosen", "measuring took", "best of the others", "auto / best", "fp32 / fp32 again"]
    held = sum(case["to_best"]["median"] <= GOAL for case in report["cases"].values())
    parts = [
        table(head, rows),
        f"In {held} of {len(rows)} cases it is at most {GOAL - 1:.0%} slower than the best of the others.",
    ]
    if report["quick"]:
        parts.insert(0, "**Few rounds (`--quick`), which show that it runs and measure nothing.**")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", action="append", choices=[n for n, case in CASES.items() if case.cpu], help="a case")
    parser.add_argument("--again", action="store_true", help="measure cases that are in the file already")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    known = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {"cases": {}}
    cases = {} if options.again else dict(known["cases"])
    report = {
        "command": "python -m benchmarks.auto --json benchmarks/results/auto.json",
        "commit": commit(),
        "quick": options.quick,
        "machine": {**machine(), "torch_threads": torch.get_num_threads()},
        "cases": cases,
    }
    for name in options.only or [n for n, case in CASES.items() if case.cpu]:
        if name not in cases:
            print(name, file=sys.stderr, flush=True)
            cases[name] = measure(CASES[name], 0.0 if options.quick else SECONDS, 2 if options.quick else LEAST)
            print(f"{name}: {cases[name]['seconds']} s", file=sys.stderr, flush=True)
            report["cases"] = {one: cases[one] for one in CASES if one in cases}
            write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
