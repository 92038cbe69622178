"""Measure what a wheel's compiled kernels are worth beside those compiled here, and beside none; write a JSON file.

    python -m benchmarks.wheel --json benchmarks/results/wheel.json

A step of the GPT (d = 512, one sequence) under O2 and pure beside torch.amp. Each process has kernels from one source,
and runs its candidates in turns, in an order shuffled each round: a process's figure is the median of ratios within
its rounds. The sources take turns too, REPEATS processes each; the result is the median of the processes, with the
least and the largest. The portable kernels are those `setup.py` puts into a wheel, for AVX-512 and AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import halfstep as hs
from benchmarks.cases import AGAIN, AMP, GPT512
from benchmarks.markdown import table
from benchmarks.measure import milliseconds, started
from benchmarks.stamp import ROOT, commit, write
from benchmarks.turns import in_turns, ratio
from halfstep.kernels.native import compiler
from halfstep.tasks import machine
from halfstep.timing import WARM_UP

OURS = ("O2", "pure")
REPEATS, ROUNDS = 3, 60
SOURCES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "compiled on the machine": {"HALFSTEP_NATIVE": "build"},
        "of the wheel, AVX-512": {"HALFSTEP_NATIVE": "", "ATEN_CPU_CAPABILITY": "avx512"},
        "of the wheel, AVX2": {"HALFSTEP_NATIVE": "", "ATEN_CPU_CAPABILITY": "avx2"},
        "none": {"HALFSTEP_NATIVE": "0"},
    }
)
"""Kernels -> the environment that chooses them. ATEN_CPU_CAPABILITY limits torch's own kernels too."""


def measured(rounds: int) -> dict[str, Any]:
    """Return the figures of this process."""
    here = started(GPT512, (AMP, AGAIN, *OURS), "cpu")
    steps = {label: run.step for label, run in here.runs.items()}
    in_turns(steps, GPT512.batch, here.tracks, "cpu", rounds=range(WARM_UP, WARM_UP + rounds), rare={})
    rows = {label: asdict(ratio(here.tracks[label], here.tracks[AMP])) for label in (AGAIN, *OURS)}
    return {
        "kernels": hs.step.cpu_kernels(),
        "to_amp": rows,
        "ms": {label: milliseconds(track) for label, track in here.tracks.items()},
    }


def in_process(environment: Mapping[str, str], source: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of a new process that imports halfstep from `source`."""
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, (source, ROOT)))}
    command = [sys.executable, "-m", "benchmarks.wheel", "--process", str(rounds)]
    done = subprocess.run(command, env=env, cwd=source, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def wheel_table(report: dict[str, Any]) -> str:
    """Return a row for each source of kernels."""
    if not report:
        return "Not measured here."
    rows = []
    for name, processes in report["sources"].items():
        cells = []
        for label in (*OURS, AGAIN):
            found = [each["to_amp"][label]["median"] for each in processes]
            cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        rows.append([name, *cells])
    head = ["kernels", *(f"`{label}` / torch.amp" for label in OURS), "torch.amp again / torch.amp"]
    text = table(head, rows)
    return f"**Few rounds (`--quick`), which measure nothing.**\n\n{text}" if report["quick"] else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        print(json.dumps(measured(options.process)))
        return 0
    repeats, rounds = (1, 3) if options.quick else (REPEATS, ROUNDS)
    sources: dict[str, list[dict[str, Any]]] = {name: [] for name in SOURCES}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(ROOT / "src" / "halfstep", source / "halfstep")
        compiler.ship(source / "halfstep" / "kernels" / "native")
        for repeat in range(repeats):
            for name, environment in SOURCES.items():
                print(f"{name}, {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
                sources[name].append(in_process(environment, source, rounds))
    report = {
        "command": " ".join(["python -m benchmarks.wheel", *sys.argv[1:]]),
        "commit": commit(),
        "quick": options.quick,
        "machine": machine(),
        "case": f"{GPT512.title}: {GPT512.about}",
        "rounds": rounds,
        "sources": sources,
    }
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
