"""Benchmark of `hs.tune`: its policy beside every preset, on models that presets suit and on models where they lose.

    OMP_NUM_THREADS=1 python -m benchmarks.tune --parts out/tune --json benchmarks/results/tune.json

For each task of `tune_tasks`: `hs.tune` searches for some of the time. Then fp32, every preset and the chosen policy
take their steps in turns in one process (fp32 twice: what the two differ by cannot be resolved), and each is tested for
equivalence with fp32 (`advise.tune.proof`), with seeds that the search has not seen: the chosen policy first, then the
presets from the fastest on, as far as the time goes. The figure is the chosen policy's time over that of the fastest
preset that was not shown to be worse; plain fp32 counts as one. Compiled steps are left out: a compile takes half
of the time that a task has.

What is finished of a task lies in PARTS and is not measured again; delete PARTS to begin anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import random
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import halfstep as hs
from benchmarks.stamp import commit
from benchmarks.tune_tasks import TASKS
from halfstep.advise.tune import Tuning, tune
from halfstep.advise.tune.proof import Proof, Run, prove
from halfstep.report import strict_json
from halfstep.tasks import Task, machine
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.tasks.candidates import candidates as labelled
from halfstep.tasks.compare import started
from halfstep.tasks.loops import Loop, make_loop
from halfstep.timing import WARM_UP, Ratio, paired_ratio

COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.tune --parts out/tune --json benchmarks/results/tune.json"
PRESETS = ("O0", "torch", "O1", "mixed", "O2", "pure", "lean", "mixed:fp16", "O2:fp16")
TUNED, AGAIN = "tuned", "fp32 again"
MINUTES = 9.5  # for all tasks together
HARD = {"distances": 1.5, "stream": 1.5, "weights": 1.5}  # times as much time as another task
SEARCH, RACE = 0.55, 0.1  # shares of a task's time for the search and for timing; the rest is for proofs
ROUNDS = 60
FIRST_SEED = 100  # of the proofs here
GOOD, REFUTED = frozenset({"equivalent", "better"}), frozenset({"worse", "diverged", "failed"})
FASTER = 0.95  # of the fastest equivalent preset's time: the goal on two tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One candidate of one task.

    Attributes:
        label: "fp32", a preset with its format, or "tuned".
        policy: TOML; "" for plain fp32.
        milliseconds: median time of a step; nan if it raised.
        to_fp32: its time over fp32's; None if it was not timed.
        tuned: the tuned policy's time over this one's; None likewise.
        verdict: of the proof; "not tested" if the time was up.
        reason: in one sentence.
    """

    label: str
    policy: str
    milliseconds: float
    to_fp32: Ratio | None
    tuned: Ratio | None
    verdict: str
    reason: str


def candidates(tuning: Tuning) -> list[Candidate]:
    """Return fp32, the presets, and the policy that `hs.tune` has chosen."""
    found = [c for label in PRESETS for c in labelled([label], "cpu") if c.policy is not None]
    fp32 = Candidate(label=FP32, dtype="fp32")
    chosen = tuning.chosen
    plain = chosen.label == FP32  # the loop of torch alone
    tuned = Candidate(label=TUNED, dtype=chosen.policy.dtype, policy=None if plain else chosen.policy,
                      compile=tuning.compile)  # fmt: skip
    return [fp32, tuned, *found]


def timed(task: Task, those: Sequence[Candidate], seconds: float) -> dict[str, list[float]]:
    """Return seconds of steps taken in turns, a value a round; a candidate that raises has none."""
    loops: dict[str, Loop] = {}
    for candidate in (*those, Candidate(label=AGAIN, dtype="fp32")):
        loop = make_loop(candidate, task, started(task, FIRST_SEED, "cpu"), ROUNDS + WARM_UP)
        try:
            loop(task.batch_on("cpu", FIRST_SEED, 0))
            loops[candidate.label] = loop
        except (RuntimeError, hs.HalfstepError):
            print(f"  {candidate.label} raised", file=sys.stderr)
    times: dict[str, list[float]] = {label: [] for label in loops}
    order, shuffle = list(loops), random.Random(0)
    end = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    try:
        for number in range(1, ROUNDS + WARM_UP):
            if number > 2 * WARM_UP and time.monotonic() > end:
                break
            batch = task.batch_on("cpu", FIRST_SEED, number)
            shuffle.shuffle(order)
            for label in order:
                begun = time.perf_counter()
                loops[label](batch)
                if number >= WARM_UP:
                    times[label].append(time.perf_counter() - begun)
    finally:
        gc.enable()
    return times


def proofs(
    task: Task, those: Sequence[Candidate], times: Mapping[str, Sequence[float]], seconds: float, *, quick: bool
) -> dict[str, Proof]:
    """Test the tuned policy, then presets from the fastest on, until the time is up; if `quick` two in all."""
    fp32 = times[FP32]
    order = [c for c in those if c.label != FP32 and c.label in times]
    order.sort(key=lambda c: (c.label != TUNED, paired_ratio(times[c.label], fp32).median))
    runs: list[Run] = []
    found: dict[str, Proof] = {}
    end = time.monotonic() + seconds
    for candidate in order:
        if candidate.policy is None:
            continue  # plain fp32 itself
        # the chosen policy and a first preset have half of it each in any case
        left = max(end - time.monotonic(), seconds / 2 if len(found) < 2 else 0.0)
        if left <= 0.0 or (quick and len(found) == 2):
            break
        found[candidate.label] = prove(task, candidate, seed=FIRST_SEED, seconds=left, runs=runs, on_run=runs.append)
    return found


def measured(name: str, parts: Path, seconds: float, *, quick: bool) -> dict[str, Any]:
    """Return the report of one task, from PARTS or measured now."""
    file = parts / f"{name}.json"
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    task, begun = TASKS[name](), time.monotonic()
    try:
        tuning = tune(task, minutes=SEARCH * seconds / 60, compile=False, resume=parts / f"{name}.search.json")
    except hs.HalfstepError as error:  # is measured again next time
        return {"task": name, "error": str(error), "seconds": {"all": time.monotonic() - begun}}
    searched = time.monotonic() - begun
    those = candidates(tuning)
    times = timed(task, those, RACE * seconds)
    tested = proofs(task, those, times, (1 - SEARCH - RACE) * seconds, quick=quick)
    report = {
        "task": name,
        "about": task.about,
        "steps": task.excerpt_steps,
        "control": asdict(paired_ratio(times[AGAIN], times[FP32])),
        "chosen": {
            "label": tuning.chosen.label,
            "policy": tuning.policy.to_toml(),
            "compile": tuning.compile,
            "changes": [asdict(change) for change in tuning.chosen.changes],
            "reason": tuning.chosen.reason,
            "tried": len(tuning.tried),
            "notes": list(tuning.notes),
            "verdict": tuning.proof.verdict if tuning.proof else "not tested",
        },
        **summary([row(c, times, tested) for c in those]),
        "seconds": {"search": searched, "all": time.monotonic() - begun},
    }
    file.write_text(strict_json(report), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def row(candidate: Candidate, times: Mapping[str, Sequence[float]], tested: Mapping[str, Proof]) -> Row:
    label, own = candidate.label, times.get(candidate.label)
    same = candidate.policy is None
    proof = tested.get(label)
    verdict, reason = (proof.verdict, proof.reason) if proof else ("not tested", "")
    if same:
        verdict, reason = "equivalent", "it is fp32"
    elif own is None:
        verdict, reason = "failed", "its first step raised an error"
    median = 1e3 * sorted(own)[len(own) // 2] if own else math.nan
    return Row(
        label=label, policy="" if candidate.policy is None else candidate.policy.to_toml(), milliseconds=median,
        to_fp32=paired_ratio(own, times[FP32]) if own else None,
        tuned=paired_ratio(times[TUNED], own) if own and TUNED in times else None, verdict=verdict, reason=reason,
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the rows, the fastest preset that is equivalent, and the tuned policy's time over that of a preset.

    That preset is the fastest one that was not shown to be worse: one without a verdict may be equivalent too.
    """
    presets = [r for r in rows if r.label != TUNED and r.to_fp32 is not None]
    equivalent = fastest(r for r in presets if r.verdict in GOOD)
    beside = fastest(r for r in presets if r.verdict not in REFUTED)
    tuned = next(r for r in rows if r.label == TUNED)
    return {
        "rows": [asdict(r) for r in rows],
        "fastest_equivalent": equivalent.label,
        "ratio_to_equivalent": asdict(equivalent.tuned) if equivalent.tuned else None,
        "fastest_not_worse": beside.label,
        "ratio": asdict(beside.tuned) if beside.tuned else None,
        "same_policy": tuned.policy == beside.policy,
        "verdict": tuned.verdict,
    }


def fastest(rows: Iterable[Row]) -> Row:
    return min(rows, key=lambda r: math.inf if r.to_fp32 is None else r.to_fp32.median)


def report(parts: Path, names: Sequence[str], minutes: float, *, quick: bool = False) -> dict[str, Any]:
    """Measure every task and return the report."""
    parts.mkdir(parents=True, exist_ok=True)
    found = []
    shares = {name: HARD.get(name, 1.0) for name in names}
    for name in names:
        begun = time.monotonic()
        made = measured(name, parts, 60 * minutes * shares[name] / sum(shares.values()), quick=quick)
        found.append(made)
        print(f"{name}: {line(made)}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return {
        "command": COMMAND,
        "commit": commit(),
        "machine": machine(),
        "minutes": sum(made["seconds"]["all"] for made in found) / 60,
        "goals": goals(found),
        "tasks": found,
    }


def line(made: Mapping[str, Any]) -> str:
    if "error" in made:
        return str(made["error"])
    beside = f"{made['ratio']['median']:.3f} of {made['fastest_not_worse']}" if made["ratio"] else "not timed"
    return f"{made['chosen']['label']} {made['verdict']}, {beside}"


def goals(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return on which tasks the tuned policy is equivalent to fp32, no slower than the preset beside it, and faster.

    No slower: the same policy, or the median of the ratio is no larger than identical programs may differ by. Faster:
    the interval of the ratio lies below `FASTER`. Both only where the policy is equivalent.
    """
    good = [made for made in found if made.get("verdict") in GOOD and made["ratio"]]

    def resolution(made: Mapping[str, Any]) -> float:
        return float(max(made["control"]["high"], 1 / made["control"]["low"]))

    slow = [m for m in good if not m["same_policy"] and m["ratio"]["median"] > resolution(m)]
    return {
        "tasks": len(found),
        "equivalent": [made["task"] for made in good],
        "no_slower": [made["task"] for made in good if made not in slow],
        "five_percent_faster": [made["task"] for made in good if made["ratio"]["high"] <= FASTER],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, required=True, help="folder of finished tasks, read and added to")
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", nargs="*", choices=tuple(TASKS), default=tuple(TASKS), help="these tasks")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all tasks together")
    parser.add_argument("--quick", action="store_true", help="test only the tuned policy and the fastest preset")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # steps of milliseconds: two threads wait for one another
    text = strict_json(report(options.parts, options.only, options.minutes, quick=options.quick))
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
