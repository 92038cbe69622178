"""Measure cross entropy over a vocabulary, alone and behind its linear layer, beside torch.amp; write a JSON file.

    python -m benchmarks.losses --json benchmarks/results/losses.json

Forward and backward pass in bf16, with 1 thread and with 2, all candidates in turns in one process, in an order
shuffled each round; a figure is the median of ratios within rounds, with its 90 % interval. malloc keeps freed memory,
as it does while a TrainStep exists. What the linear layer and its loss move on a GPU is counted on fake CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.markdown import megabytes, ratio, table
from benchmarks.stamp import commit, write
from benchmarks.turns import Step, Track, in_turns
from benchmarks.turns import ratio as paired
from halfstep.kernels.pages import keep_pages
from halfstep.tasks import machine
from halfstep.tasks.measure import SavedForBackward
from halfstep.testing import Counter, Counts, fake_cuda, run_python
from halfstep.timing import WARM_UP

AMP, AGAIN, KERNELS = "torch.amp", "torch.amp again", "HALFSTEP_NATIVE"
BF16 = torch.bfloat16
THREADS = (1, 2)
QUICK, MOST = 2, 60
SECONDS = 30.0  # what the rounds of a case may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Rows of logits, their classes, and the features of the linear layer before them (0: no layer)."""

    rows: int
    classes: int
    features: int = 0

    @property
    def title(self) -> str:
        """The size as a row of the table shows it."""
        layer = f"linear layer of {self.features} features and " if self.features else ""
        return f"{layer}cross entropy, {self.rows} x {self.classes}"


SIZES = (
    Size(rows=2048, classes=4096),
    Size(rows=2048, classes=50257),
    Size(rows=2048, classes=4096, features=256),
    Size(rows=1024, classes=50257, features=768),
)


HEADS = (
    Size(rows=16384, classes=32000, features=768),
    Size(rows=16384, classes=50257, features=768),
    Size(rows=8192, classes=128256, features=2048),
    Size(rows=16384, classes=128256, features=4096),
)
"""Sizes that are counted."""


def candidates(size: Size) -> tuple[nn.Module, dict[str, Callable[[], Tensor]]]:
    """Return the linear layer and, by label, what computes the loss; the layer and its input are bf16 already."""
    torch.manual_seed(0)
    layer = nn.Linear(size.features or 1, size.classes, bias=False).to(BF16)
    input = torch.randn(size.rows, size.features or size.classes).to(BF16).requires_grad_()
    target = torch.randint(0, size.classes, (size.rows,))

    def logits() -> Tensor:
        return F.linear(input, layer.weight) if size.features else input

    def amp() -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return F.cross_entropy(logits(), target)

    def ours() -> Tensor:
        with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
            return F.cross_entropy(logits(), target)

    def without_kernels() -> Tensor:
        os.environ[KERNELS] = "0"
        return ours()

    def fused(*, recompute: bool) -> Callable[[], Tensor]:
        return lambda: hs.linear_cross_entropy(input, layer.weight, target, recompute=recompute)

    found = {AMP: amp, AGAIN: amp, "cross_entropy": ours, "cross_entropy without a compiler": without_kernels}
    if size.features:
        found |= {
            "linear_cross_entropy": fused(recompute=False),
            "linear_cross_entropy, recompute=True": fused(recompute=True),
        }

    def backward(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            value = loss()
            value.backward()
            os.environ.pop(KERNELS, None)
            input.grad = layer.weight.grad = None
            return value.detach()

        return run

    return layer, {label: backward(loss) for label, loss in found.items()}


def measure(size: Size, threads: int, *, quick: bool = False) -> dict[str, Any]:
    """Time every candidate in turns and count what it saves for backward."""
    print(size.title, threads, file=sys.stderr, flush=True)
    layer, runs = candidates(size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def step(run: Callable[[], Tensor]) -> Step:
        return lambda batch: run()

    try:
        steps = {label: step(run) for label, run in runs.items()}
        tracks = {label: Track() for label in steps}
        start = time.perf_counter()
        in_turns(steps, lambda number: (), {label: Track() for label in steps}, "cpu", rounds=range(WARM_UP), rare={})
        each = (time.perf_counter() - start) / WARM_UP
        rounds = QUICK if quick else max(3, min(MOST, int(SECONDS / each)))
        in_turns(steps, lambda number: (), tracks, "cpu", rounds=range(rounds), rare={})
    finally:
        torch.set_num_threads(before)
    rows = {}
    for label, run in runs.items():
        with SavedForBackward(layer) as saved:
            run()
        rows[label] = {
            "ms": 1e3 * statistics.median(tracks[label].seconds.values()),
            "to_amp": asdict(paired(tracks[label], tracks[AMP])),
            "saved_bytes": saved.bytes,
        }
    return {"title": size.title, "threads": threads, "rounds": rounds, "rows": rows}


def moved(size: Size) -> dict[str, float]:
    """Count on fake CUDA what `linear_cross_entropy` moves and saves, over linear layer and cross entropy."""
    x, weight = (torch.empty(n, size.features, device="cuda", dtype=BF16) for n in (size.rows, size.classes))
    x.requires_grad_(), weight.requires_grad_()
    target = torch.empty(size.rows, device="cuda", dtype=torch.long)

    def counts(loss: Callable[..., Tensor]) -> Counts:
        x.grad = weight.grad = None
        with Counter() as counter:
            with counter.saving(), hs.autocast("cuda", policy=hs.Policy.of("mixed", dtype="bf16")):
                value = loss(x, weight, target)
            value.backward()
        return counter.counts()

    pair, fused = counts(lambda x, w, y: F.cross_entropy(F.linear(x, w), y)), counts(hs.linear_cross_entropy)
    return {
        **asdict(size),
        "to_pair": fused.bytes() / pair.bytes(),
        "saved_to_logits": (fused.saved - 2 * (x.numel() + weight.numel())) / (2 * size.rows * size.classes),
        "launches": fused.launches(),
        "pair_launches": pair.launches(),
    }


def counted() -> list[dict[str, float]]:
    """Return `moved` of `HEADS`, from a process with the fake device."""
    done = run_python(["-m", "benchmarks.losses", "--moved"], stdout=subprocess.PIPE)
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


def moved_table(report: dict[str, Any]) -> str:
    """Return a row for each of `HEADS`."""
    if "moved" not in report:
        return "Not measured here."
    head = ["rows x features x classes", "bytes / those of the pair", "launches", "of the pair"]
    rows = [
        [
            f"{row['rows']} x {row['features']} x {row['classes']}",
            f"{row['to_pair']:.2f}",
            str(row["launches"]),
            str(row["pair_launches"]),
        ]
        for row in report["moved"]
    ]
    return table(head, rows)


def losses_table(report: dict[str, Any]) -> str:
    """Return a row for each candidate of each size, with the times under each number of threads."""
    if not report:
        return "Not measured here."
    rows = []
    for title in dict.fromkeys(case["title"] for case in report["cases"]):
        cases = {case["threads"]: case for case in report["cases"] if case["title"] == title}
        for label in next(iter(cases.values()))["rows"]:
            found = {threads: case["rows"][label] for threads, case in cases.items()}
            times = [cell for row in found.values() for cell in (f"{row['ms']:.1f}", ratio(row["to_amp"]))]
            saved = next(iter(found.values()))["saved_bytes"]
            rows.append([title, f"`{label}`", *times, megabytes(saved)])
            title = ""
    counts = [f"{n} thread{'s' if n > 1 else ''}" for n in dict.fromkeys(case["threads"] for case in report["cases"])]
    head = ["rows x classes", "candidate", *(cell for n in counts for cell in (f"ms, {n}", "/ torch.amp"))]
    text = table([*head, "saved for backward, MB"], rows)
    return f"**Few rounds (`--quick`), which measure nothing.**\n\n{text}" if report["quick"] else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--moved", action="store_true", help="print what is counted on fake CUDA, which must be there")
    options = parser.parse_args()
    if options.moved:
        with fake_cuda():
            print(json.dumps([moved(size) for size in HEADS]))
        return 0
    keep_pages(parser)
    report = {
        "command": " ".join(["python -m benchmarks.losses", *sys.argv[1:]]),
        "commit": commit(),
        "quick": options.quick,
        "machine": {**machine(), "torch_threads": max(THREADS)},
        "moved": counted(),
        "cases": [measure(size, threads, quick=options.quick) for size in SIZES for threads in THREADS],
    }
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
