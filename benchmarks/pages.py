"""Count the page faults of a step, and the largest memory of its process, and write a JSON file.

    python -m benchmarks.pages --json benchmarks/results/pages.json

A page fault is a page that the system had to map, and fill with zeros, because malloc had given it back. Every
candidate runs in a process of its own; then eight run in turns in one process. How busy the machine is does not matter.
For halfstep's presets the process runs a second time with malloc left as it is (`halfstep.kernels.pages` switched off).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidates import LIMIT, start
from benchmarks.cases import AGAIN, AMP, CASES, OURS
from benchmarks.stamp import commit, write
from benchmarks.turns import faults
from halfstep.kernels import pages
from halfstep.tasks import machine

WARM_UP, COUNTED = 4, 9
TOGETHER = ("fp32", AMP, AGAIN, *OURS, LIMIT)
CHOSEN = ("lenet5", "resnet18", "convnext", "gpt256", "gpt512", "mlp21m", "mlp25m")


def count(name: str, labels: list[str], *, keep: bool) -> dict[str, Any]:
    """Train candidates in turns in this process.

    Args:
        name: of the case.
        labels: the candidates; they start one after the other.
        keep: whether halfstep may tell malloc to keep pages.

    Returns:
        By label the median number of page faults of a step; under "MiB" the largest memory of the process.
    """
    if not keep:
        vars(pages)["_glibc"] = lambda: None
    case, shuffle = CASES[name], random.Random(0)
    runs = {}
    for label in labels:
        runs[label] = start(case, label, "cpu")
        for number in range(WARM_UP):
            runs[label].step(case.batch(number))
    found: dict[str, list[int]] = {label: [] for label in labels}
    for number in range(COUNTED):
        batch = case.batch(number)
        shuffle.shuffle(labels)
        for label in labels:
            before = faults()
            runs[label].step(batch)
            found[label].append(faults() - before)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**{label: statistics.median(seen) for label, seen in found.items()}, "MiB": round(most)}


def elsewhere(name: str, labels: tuple[str, ...], *, keep: bool = True) -> dict[str, Any]:
    """Return what `count` returns in a new process."""
    command = [sys.executable, "-m", "benchmarks.pages", "--count", name, "--labels", json.dumps(labels)]
    made = subprocess.run([*command, *([] if keep else ["--leave"])], capture_output=True, text=True, check=True)
    counted: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return counted


def measure(name: str) -> dict[str, Any]:
    """Count every candidate of a case alone, and all in one process."""
    print(name, file=sys.stderr, flush=True)
    together = elsewhere(name, TOGETHER)
    rows = {}
    for label in (AMP, *OURS):
        alone = elsewhere(name, (label,))
        row = {"alone": alone[label], "together": together[label], "MiB": alone["MiB"]}
        if label in OURS:
            left = elsewhere(name, (label,), keep=False)
            row |= {"alone_left": left[label], "MiB_left": left["MiB"]}
        rows[label] = row
    return {"title": CASES[name].title, "about": CASES[name].about, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--only", action="append", choices=CHOSEN, help="a case; may be given several times")
    parser.add_argument("--count", choices=CHOSEN, help=argparse.SUPPRESS)
    parser.add_argument("--labels", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--leave", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        warnings.filterwarnings("ignore", category=UserWarning)
        print(json.dumps(count(options.count, options.labels, keep=not options.leave)))
        return 0
    report = {
        "command": " ".join(["python -m benchmarks.pages", *sys.argv[1:]]),
        "commit": commit(),
        "machine": {**machine(), "torch_threads": torch.get_num_threads()},
        "together": len(TOGETHER),
        "cases": {name: measure(name) for name in options.only or CHOSEN},
    }
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
