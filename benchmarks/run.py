"""Measure halfstep beside its peers and write a JSON file.

    python -m benchmarks.run --device cpu --json benchmarks/results/cpu.json
    python -m benchmarks.run --only gpt256 --only mlp21m --quick
    python -m benchmarks.run --dry-run

Candidates run in turns in one process, in an order shuffled each round; a figure is the median of ratios within
rounds, with its 90 % interval. The baseline runs twice, and what the two differ by cannot be resolved (A/A). ``--only``
measures some cases; with ``--json`` of a file that is there, its other cases stay. ``--counts`` counts the cases of
that file again, which takes a minute and no quiet machine, and leaves its times. ``--quick`` sees that everything
runs, and ``--dry-run`` that a GPU's candidates do, on a CPU: LeNet-5, without compilers and other libraries, its graphs
on the tape of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import micro
from benchmarks.candidates import FOREIGN
from benchmarks.cases import CASES, Case
from benchmarks.limits import copy_bandwidth
from benchmarks.loops import graphs_on_tape
from benchmarks.measure import FULL, QUICK, count_again, measure, say
from benchmarks.peers import versions
from benchmarks.stamp import commit, write
from halfstep.tasks import machine

MICRO = "micro"


def as_on_cuda(case: Case) -> Case:
    """Return `case` with the candidates of a GPU that need neither a compiler nor another library on a CPU."""
    return replace(case, cpu=tuple(k for k in case.cuda if "compiled" not in k and k not in FOREIGN))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", action="append", choices=(*CASES, MICRO), help="a case; may be given several times")
    parser.add_argument("--counts", action="store_true", help="only count again, in a file that is there: --json")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that everything runs")
    parser.add_argument("--dry-run", action="store_true", help="what runs on a GPU, small, on a CPU")
    options = parser.parse_args()
    if options.counts and not (options.json and options.json.exists()):
        parser.error("--counts needs --json of a file that is there")
    return options


def main() -> int:
    options = arguments()
    if options.device == "cuda" and not options.dry_run and not torch.cuda.is_available():
        print("benchmarks: --device cuda, and torch sees no CUDA device here; try --device cpu", file=sys.stderr)
        return 2
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)  # of peers and of torch's compiler; nothing of a result

    begun, device = time.perf_counter(), options.device
    effort = QUICK if options.quick or options.dry_run else FULL
    cases, wanted = CASES, options.only or (MICRO, *CASES)
    if options.dry_run:
        device, wanted = "cpu", options.only or ("lenet5",)
        cases = {name: as_on_cuda(case) for name, case in CASES.items()}
        graphs_on_tape()
    bandwidth = copy_bandwidth(device)
    fresh: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.run", *sys.argv[1:]]),
        "device": device,
        "quick": effort is QUICK,
        "commit": commit(),
        "machine": {**machine(), "copy_bytes_per_second": bandwidth},
        "peers": versions(),
        "cases": {},
    }
    report = fresh
    if options.counts:
        known = json.loads(options.json.read_text(encoding="utf-8"))
        for name in options.only or known["cases"]:
            counted = count_again(cases[name], device, known["cases"][name])
            known["cases"][name] = {**counted, "counted": fresh["commit"]}
            write(options.json, known)
        return 0
    if options.only and options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))
        report = {**fresh, "command": known["command"], "cases": known["cases"], MICRO: known.get(MICRO, {})}
    for name in wanted:
        if name == MICRO:
            if device == "cpu":
                few = options.quick
                report[MICRO] = {
                    "region_entry": micro.region_entry(6 if few else 120),
                    "norms": micro.norms(8 if few else 160),
                    "spread": micro.spread(2 if few else 6),
                }
            continue
        if cases[name].candidates(device):
            found = measure(cases[name], device, effort, bandwidth)
            report["cases"][name] = {**found, "commit": fresh["commit"], "quick": effort is QUICK}
            report["seconds"] = round(sum(case["seconds"] for case in report["cases"].values()), 1)
            if options.json is not None:
                write(options.json, report)  # what was measured stays if something later fails
    say(f"all: {time.perf_counter() - begun:.0f} s")
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
