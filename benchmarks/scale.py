"""Compare every strategy of several processes with one process, and write three JSON files.

    python -m benchmarks.scale --json benchmarks/results [--only STRATEGY]

parity.json: how far the weights are from those of one process on the same global batches, under a bound that is part of
the strategy's definition, beside torch's own loop of that strategy and its distance from torch's loop of one process.
ranks.json: updates in which losses of random ranks are not finite, and whether the ranks skip the same ones, have the
same scales and end with the same weights. collectives.json: what a step sends beside the forward and backward passes.

The strategies are those of `tests.distributed.strategies`, in gloo processes on this machine. With --only the rows of
other strategies stay as they are in the files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reports import load
from benchmarks.stamp import commit, write
from halfstep.tasks import machine
from tests.distributed.checks import added, deviation, overflows, parity, reference
from tests.distributed.strategies import STRATEGIES
from tests.two_processes import in_processes

PARITY, OVERFLOWS = 20, 1000
PATIENCE = 900.0  # seconds for one strategy in one group


def overflowing(name: str, count: int) -> str:
    """Return the policy under which a strategy overflows: in two processes one with a scale, in more the last."""
    policies = STRATEGIES[name].policies
    return policies[-1] if count > 2 else next((each for each in policies if ":fp16" in each), policies[0])


def work(rank: int, name: str, updates: int) -> dict[str, Any]:
    """Run all checks of a strategy on this rank."""
    warnings.filterwarnings("ignore", category=UserWarning)
    policies, chosen = STRATEGIES[name].policies, overflowing(name, dist.get_world_size())
    return {
        "parity": {each: parity(rank, name, each, PARITY) for each in policies},
        "ranks": {chosen: overflows(rank, name, chosen, updates)},
        "collectives": {each: added(rank, name, each) for each in policies},
    }


# ------------------------------------------------------------------ rows


def parity_row(name: str, which: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = reference(name, which, len(found), PARITY)
    start = wanted["start"]
    first, torchs = found[0]["weights"], found[0]["torch"]
    return {
        "deviation": deviation(first, wanted["weights"], start),
        "bound": STRATEGIES[name].bound(which),
        "ranks_equal": all(deviation(each["weights"], first, start) == 0.0 for each in found),
        "torch": torchs if isinstance(torchs, str) else deviation(torchs, wanted["torch"], start),
    }


def ranks_row(name: str, which: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    first = found[0]
    return {
        "updates": len(first["skipped"]),
        "overflows": sum(first["expected"]),
        "skipped_as_expected": all(each["skipped"] == first["expected"] for each in found),
        "scales_equal": all(each["scales"] == first["scales"] for each in found),
        "scales": sorted({min(first["scales"]), max(first["scales"])}),
        "weights_equal": all(each["weights"] for each in found),
        "finite": all(each["finite"] for each in found),
    }


def collectives_row(name: str, which: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what halfstep and torch send beside the passes: number and bytes, of the rank that sends most."""
    row: dict[str, Any] = {}
    for key in ("good", "bad", "torch", "torch bad"):
        extra: list[Any] = [beyond(each[key], each["passes"]) for each in found]
        row[key] = extra[0] if isinstance(extra[0], str) else max(extra, key=lambda one: one["number"])
    passes = found[0]["passes"]
    return {**row, "passes": {"number": len(passes), "bytes": sum(size for _, size in passes)}}


def beyond(seen: list[tuple[str, int]] | str, passes: list[tuple[str, int]]) -> dict[str, Any] | str:
    if isinstance(seen, str):
        return seen
    kinds = Counter(name for name, _ in seen)
    kinds.subtract(name for name, _ in passes)
    return {
        "number": len(seen) - len(passes),
        "bytes": sum(size for _, size in seen) - sum(size for _, size in passes),
        "operators": {name: count for name, count in kinds.items() if count},
    }


ROWS: dict[str, Callable[[str, str, list[Any]], dict[str, Any]]] = {
    "parity": parity_row,
    "ranks": ranks_row,
    "collectives": collectives_row,
}
"""File, without .json -> (strategy, policy, what each rank found) -> a row of it."""


# ------------------------------------------------------------------ reports


def measure(name: str, updates: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a strategy, for every number of processes that it runs in."""
    rows: dict[str, list[dict[str, Any]]] = {each: [] for each in ROWS}
    for count in STRATEGIES[name].ranks:
        print(f"{name}, {count} processes", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = in_processes(count, work, folder, name, updates, patience=PATIENCE)
        for file in ROWS:
            for which in found[0][file]:
                seen = [each[file][which] for each in found]
                made = ROWS[file](name, which, seen)
                rows[file].append({"strategy": name, "processes": count, "policy": which, **made})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the folder of the three files")
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="a strategy; may be given several times")
    parser.add_argument("--updates", type=int, default=OVERFLOWS, help="with overflows; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    for name in options.only or STRATEGIES:
        rows = measure(name, options.updates)
        for file in ROWS:  # after each strategy: an interrupted run goes on with --only
            known = load(f"{file}.json").get("rows", [])
            kept = [row for row in known if row["strategy"] in STRATEGIES and row["strategy"] != name]
            order = list(STRATEGIES)
            report = {
                "command": "python -m benchmarks.scale --json benchmarks/results",
                "commit": commit(),
                "machine": machine(),
                "rows": sorted([*kept, *rows[file]], key=lambda row: order.index(row["strategy"])),
            }
            write(options.json / f"{file}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
