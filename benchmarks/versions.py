"""Two checkouts of halfstep in turns: how long a step of the one takes beside a step of the other.

    python -m benchmarks.versions OLD NEW [--only CASE/CANDIDATE ...] [--json benchmarks/results/versions.json]

Each trains in a process of its own, from the same weights on the same batches. A round is some steps of one and the
same number of the other, in alternating order; a row is the median ratio new / old of all rounds with its first and
last decile. Ratios of two runs of `make bench` also contain the difference between two states of the machine; these do
not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS = 24
SECONDS = 0.4  # of a round, for each of the two
PLANNED = (
    *("lenet5/mixed", "lenet5/pure", "resnet_small/mixed", "resnet18/O2", "convnext/O2", "gpt256/mixed"),
    *("gpt512/torch", "gpt512/mixed", "mlp21m/mixed", "mlp21m/pure", "lenet5_fp16/mixed"),
)


def work(case_name: str, label: str) -> None:
    """Train in this process: answer each number of steps on stdin by the median seconds of a step on stdout."""
    import halfstep
    from benchmarks.candidates import start
    from benchmarks.cases import CASES

    case = CASES[case_name]
    run = start(case, label, "cpu")
    batches = [case.batch(step) for step in range(4)]

    def steps(count: int) -> float:
        times = []
        for number in range(count):
            began = time.perf_counter()
            run.step(batches[number % len(batches)])
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    steps(12)
    print(halfstep.__file__, flush=True)
    for line in sys.stdin:
        print(steps(int(line)), flush=True)


class Side:
    """One checkout, training one candidate of one case."""

    def __init__(self, root: Path, spec: str) -> None:
        paths = {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        worker = [sys.executable, str(Path(__file__).resolve()), *spec.split("/")]
        self._process = subprocess.Popen(
            worker, cwd=root, env={**os.environ, **paths}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        found = self._answer()
        if not Path(found).is_relative_to(root):
            raise SystemExit(f"{spec}: {root} imported {found}")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
        return line

    def steps(self, count: int) -> float:
        """Return the median seconds of `count` steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(old_root: Path, new_root: Path, spec: str) -> dict[str, Any]:
    """Return one row: the ratio new / old of the time of a step."""
    old, new = Side(old_root, spec), Side(new_root, spec)
    count = max(2, round(SECONDS / new.steps(3)))
    pairs = []
    for number in range(ROUNDS):
        if number % 2:
            after, before = new.steps(count), old.steps(count)
        else:
            before, after = old.steps(count), new.steps(count)
        pairs.append((before, after))
    old.end()
    new.end()
    ratios = sorted(after / before for before, after in pairs)
    best = [1e3 * min(side) for side in zip(*pairs, strict=True)]
    tenth = len(ratios) // 10
    return {
        "median": statistics.median(ratios),
        "low": ratios[tenth],
        "high": ratios[-1 - tenth],
        "best_ms": {"old": best[0], "new": best[1]},
        "rounds": ROUNDS,
        "steps": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--only", nargs="+", default=PLANNED, metavar="CASE/CANDIDATE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks.stamp import commit, write
    from halfstep.tasks import machine

    roots = [root.resolve() for root in (options.old, options.new)]
    commits = [commit(root) for root in roots]
    rows = {}
    for spec in options.only:
        rows[spec] = row = compared(roots[0], roots[1], spec)
        print(f"{spec}: {row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", flush=True)
    report = {
        "command": "python -m benchmarks.versions OLD NEW --json benchmarks/results/versions.json",
        "old": commits[0],
        "new": commits[1],
        "machine": machine(),
        "rows": rows,
    }
    if options.json is not None:
        write(options.json, report)


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) == 3 and "/" not in sys.argv[1] else main()
