"""One case measured: every candidate in turns, then counted, then its stages, its curve and its limit."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.candidates import FOREIGN, LIMIT, start
from benchmarks.cases import AGAIN, AMP, LINEAR_LOSS, OURS, Batch, Case
from benchmarks.counts import Counts, Seen, count
from benchmarks.curves import STEPS, judge
from benchmarks.limits import ideal_tail
from benchmarks.loops import Absent, Run
from benchmarks.stages import recast
from benchmarks.turns import Track, beyond, in_turns, ratio
from halfstep.timing import WARM_UP, paired_ratio

STAGED = (AMP, "mixed", "O2", "pure", LIMIT)  # whose stages are timed
PROFILED = (AMP, "mixed", "pure")
COUNTED = ("fp32", AMP, *OURS, "lean", *LINEAR_LOSS)  # what can be counted again without a compiler or another library
SHOWN = 8  # operators of a profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: the least; with warm-up they make the steps of a loss curve.
        share: of a case's seconds that rounds may take.
        stages: rounds in which stages are timed.
    """

    rounds: int
    share: float
    stages: int


FULL = Effort(rounds=STEPS - WARM_UP, share=1.0, stages=12)
QUICK = Effort(rounds=3, share=0.0, stages=2)


def say(text: str) -> None:
    """Tell who waits."""
    print(text, file=sys.stderr, flush=True)


def measure(case: Case, device: str, effort: Effort, bandwidth: float) -> dict[str, Any]:
    """Measure one case.

    Args:
        case: which.
        device: device type.
        effort: how much.
        bandwidth: bytes a second of a copy on the device.

    Returns:
        Plain values, as the JSON has them.
    """
    begun = time.perf_counter()
    torch._dynamo.reset()  # compiled functions of another case share their code, and a limit of versions of it
    half = case.dtype == "fp16"
    baseline, twin = ("fp32", "fp32 again") if half else (AMP, AGAIN)
    here = started(case, (*case.candidates(device), *(() if half else (LIMIT,))), device)
    rare = {label: min(n, effort.rounds) for label, n in case.rare}
    rounds = rounds_for(case, {k: t for k, t in here.steady.items() if k in here.runs and k not in rare}, effort)
    say(f"{case.name}: {len(here.runs)} candidates, {rounds} rounds; {time.perf_counter() - begun:.0f} s to start")
    in_turns(
        {label: run.step for label, run in here.runs.items()},
        case.batch,
        here.tracks,
        device,
        rounds=range(WARM_UP, WARM_UP + rounds),
        rare=rare,
    )
    batch = tuple(t.to(device) for t in case.batch(0))
    counted = counts_of({k: run for k, run in here.runs.items() if k not in {*rare, LIMIT, twin}}, batch, here.absent)
    seen = {label: what for label, (_, what) in counted.items()}
    tail = ideal_tail(sum(p.numel() for p in case.model().parameters()), bandwidth)
    judged = curves(here.tracks, "torch.amp bf16" if half else AMP, skip={*rare, LIMIT})
    rows = {
        label: {
            **times_of(here.tracks, label, tail),
            "counts": asdict(counted[label][0]) if label in counted else None,
            "curve": judged.get(label),
        }
        for label in here.tracks
        if label != LIMIT
    }
    staged = {} if half else stages_of(here.runs, seen, batch, device, effort.stages)
    limit = staged.pop(LIMIT, None)
    result = {
        "title": case.title,
        "about": case.about,
        "dtype": case.dtype,
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "baseline": baseline,
        "control": rows.pop(twin)["to_fp32" if half else "to_amp"],
        "rounds": rounds,
        "rows": rows,
        "absent": here.absent,
        "first_step_seconds": here.first,
        "losses": {label: losses_of(track) for label, track in here.tracks.items() if label != LIMIT},
        "limit": limit and {"low_ms": limit["forward_ms"] + limit["backward_ms"], "tail_ms": 1e3 * tail},
        "stages": staged,
        "profile": {k: profile_of(here.runs[k], batch, device) for k in PROFILED if not half and k in here.runs},
    }
    del here
    gc.collect()
    result["seconds"] = round(time.perf_counter() - begun, 1)
    say(f"{case.name}: {result['seconds']} s")
    return result


def count_again(case: Case, device: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured of a case before, `known`, with new counts of its eager candidates; times stay."""
    labels = [label for label in COUNTED if known["rows"].get(label, {}).get("counts") is not None]
    runs, batch = started(case, labels, device).runs, tuple(t.to(device) for t in case.batch(0))
    for run in runs.values():
        run.step(batch)  # the black box samples the first steps that are powers of two
    found = counts_of(runs, batch, {})
    rows = {k: {**row, "counts": asdict(found[k][0])} if k in found else row for k, row in known["rows"].items()}
    say(f"{case.name}: counted {', '.join(found)}")
    return {**known, "rows": rows}


def milliseconds(track: Track) -> float:
    """Return the median time of a step."""
    return 1e3 * statistics.median(track.seconds.values())


def times_of(tracks: Mapping[str, Track], label: str, tail: float) -> dict[str, Any]:
    """Return a candidate's median time and its paired ratios to the baselines and to the limit.

    Args:
        tracks: by label.
        label: the candidate.
        tail: seconds of an ideal tail.
    """
    row: dict[str, Any] = {"ms": milliseconds(tracks[label])}
    for name, other in (("to_amp", AMP), ("to_fp32", "fp32"), ("to_compiled_amp", "torch.amp compiled")):
        if other in tracks and other != label:
            row[name] = asdict(ratio(tracks[label], tracks[other]))
    row["faults"] = statistics.median(tracks[label].faults.values())
    if LIMIT in tracks:
        row["to_limit"] = asdict(ratio(tracks[label], tracks[LIMIT], plus=tail))
        row["beyond_us"] = 1e6 * statistics.median(beyond(tracks[label], tracks[LIMIT]))
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Candidates that have made their first steps.

    Attributes:
        runs: by label.
        tracks: by label; losses of the first steps, no times.
        absent: what cannot run here, and why.
        first: seconds of the first step, in which what compiles compiles.
        steady: seconds of the last step of the warm-up.
    """

    runs: dict[str, Run]
    tracks: dict[str, Track]
    absent: dict[str, str]
    first: dict[str, float]
    steady: dict[str, float]


def started(case: Case, labels: Sequence[str], device: str) -> Started:
    """Start every candidate of a case and warm it up."""
    made = Started(runs={}, tracks={}, absent={}, first={}, steady={})
    rare = dict(case.rare)
    for label in labels:
        try:
            run, track = start(case, label, device), Track()
            for number in range(1 if label in rare else WARM_UP):
                begun = time.perf_counter()
                track.losses.append(run.step(tuple(t.to(device) for t in case.batch(number))).clone())
                made.steady[label] = time.perf_counter() - begun
                made.first.setdefault(label, made.steady[label])
        except Absent as reason:
            made.absent[label] = str(reason)
            continue
        except Exception as error:
            if label not in FOREIGN:
                raise
            made.absent[label] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        made.runs[label], made.tracks[label] = run, track
    return made


def counts_of(runs: Mapping[str, Run], batch: Batch, absent: dict[str, str]) -> dict[str, tuple[Counts, Seen]]:
    """Count a step of every run; a peer that cannot be counted is noted in `absent`."""
    found = {}
    for label, run in runs.items():
        try:
            found[label] = count(run, batch)
        except Exception as error:
            if label not in FOREIGN:
                raise
            absent[f"{label} (counts)"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def rounds_for(case: Case, steady: Mapping[str, float], effort: Effort) -> int:
    """Return how many rounds fit into the case's seconds, within its bounds."""
    fitting = int(effort.share * case.seconds / sum(steady.values()))
    return max(effort.rounds, min(case.rounds, fitting))


def losses_of(track: Track) -> list[float]:
    """Return the first losses of a track, on the host, to seven digits."""
    return [float(f"{float(loss):.7g}") for loss in track.losses[:STEPS]]


def curves(tracks: Mapping[str, Track], spread: str, skip: set[str]) -> dict[str, Any]:
    """Return each candidate's curve beside fp32's; `spread` is the label of torch.amp."""
    found = {label: losses_of(track) for label, track in tracks.items() if label not in skip}
    return {label: asdict(judge(losses, found["fp32"], found[spread])) for label, losses in found.items()}


def stages_of(
    runs: Mapping[str, Run], seen: Mapping[str, Seen], batch: Batch, device: str, rounds: int
) -> dict[str, Any]:
    """Time the stages of a step in turns.

    What a candidate casts of its weights in a forward pass is cast once more by itself, and belongs to its tail: it
    makes the weights low for the next forward pass, which others do when they write them.

    Returns:
        By label the median milliseconds of each stage, and the paired ratio of tail and casts to torch.amp's.
    """
    chosen = [label for label in STAGED if label in runs]
    casts_of = {label: seen[label].weights if label in seen else [] for label in chosen}
    times: dict[str, list[tuple[float, float, float, float]]] = {label: [] for label in chosen}
    for number in range(rounds):
        for label in chosen if number % 2 else reversed(chosen):
            run = runs[label]
            assert run.stages is not None
            parts = run.stages.run(lambda run=run: run.step(batch))  # type: ignore[misc]  # bound now
            times[label].append((*parts, recast(casts_of[label], device)))
    tails = {label: [tail + casts for _, _, tail, casts in taken] for label, taken in times.items()}
    result: dict[str, Any] = {}
    for label, taken in times.items():
        forward, backward, tail, casts = (1e3 * statistics.median(part) for part in zip(*taken, strict=True))
        result[label] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "tail_ms": tail,
            "weight_casts_ms": casts,
            "weight_casts": len(casts_of[label]),
            "tail_to_amp": asdict(paired_ratio(tails[label], tails[AMP])),
        }
    return result


def profile_of(run: Run, batch: Batch, device: str) -> list[dict[str, Any]]:
    """Return the operators that take most of a step: name, calls, milliseconds of their own."""
    cuda = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as record:
        run.step(batch)
    own = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e) for e in record.key_averages()]
    own.sort(key=lambda pair: -pair[0])
    return [{"operator": e.key, "calls": e.count, "ms": taken / 1e3} for taken, e in own[:SHOWN]]
