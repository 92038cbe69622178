"""Train small models for many steps with everything on, and measure whether memory, objects and files stay flat.

    python -m benchmarks.soak --json benchmarks/results/soak.json

Four programs take turns in one process. Their loss scales grow every 10 good steps, so windows overflow all the time
and are retried; some batches are not finite, and the black box explains them and keeps evidence; monitors and metrics
are read; steps are saved to a folder and loaded again, copied, interrupted by an exception, and built anew from their
checkpoint. Samples are taken after a garbage collection. A quantity is flat if its median over the last quarter of the
run exceeds that over the second quarter by no more than its bound in `BOUNDS`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import commit, told, write
from halfstep.errors import StepError
from halfstep.tasks import machine

STEPS = 20_000
SAMPLES = 80  # of a run
KEPT = 2  # checkpoints of each program

BOUNDS: dict[str, tuple[int, str]] = {
    "rss": (8 << 20, "resident memory, bytes"),
    "objects": (1000, "objects that Python's collector tracks"),
    "tensors": (20, "tensors among them"),
    "tensor_bytes": (1 << 20, "bytes of their storages"),
    "files": (0, "open files"),
    "threads": (0, "threads"),
    "evidence_files": (0, "files in the folder of evidence"),
    "evidence_bytes": (1 << 16, "bytes in it"),
    "checkpoint_files": (0, "checkpoints kept"),
}
"""Quantity -> by how much it may grow from the second quarter of a run to the last, and what it is.

8 MiB over 10,000 steps are less than one KiB a step: any batch or gradient that stays exceeds it.
"""

POLICIES: dict[str, hs.Policy] = {
    name: hs.Policy.of(preset, dtype="fp16", scale=hs.ScaleRule(interval=10), **more)
    for name, preset, more in (
        ("mixed, BatchNorm, AdamW", "mixed", {}),
        ("mixed, RMSprop", "mixed", {}),
        ("O2, kahan, windows of 2", "O2", {"master": "kahan"}),
    )
}
POLICIES["pure bf16, split"] = hs.Policy.of("pure", dtype="bf16", master="split")


class Interruption(Exception):
    """Raised by a loss function now and then."""


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, fails: bool) -> Tensor:
    """Return the loss; raise if the batch `fails`."""
    loss = F.cross_entropy(model(x).float(), y)
    if fails:
        raise Interruption
    return loss


@dataclass
class Program:
    """One of the programs that take turns.

    Args:
        name: a key of `POLICIES`.
        folder: for checkpoints; beside it is the folder of the evidence of all programs.
    """

    name: str
    folder: Path
    counts: Counter[str]
    step: hs.TrainStep = field(init=False)
    saved: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.build()

    def build(self) -> None:
        """Make model, optimizer and step anew."""
        windows = "windows" in self.name
        middle = nn.BatchNorm1d(32) if "BatchNorm" in self.name else nn.LayerNorm(32)
        model = nn.Sequential(nn.Linear(16, 32), middle, nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
        optimizer: torch.optim.Optimizer
        if "RMSprop" in self.name:
            optimizer = torch.optim.RMSprop(model.parameters(), 1e-4)
        elif windows:
            optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        self.step = hs.TrainStep(
            model,
            optimizer,
            loss_fn,
            policy=POLICIES[self.name],
            clip_norm=1.0,
            accumulate=2 if windows else 1,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.99),
            blackbox=self.folder.parent / "evidence",
            retry=True,
        )
        self.monitor = hs.Monitor(self.step, every=10, activations=windows)
        self.metrics = self.step.metrics(every=10)

    def train(self, chance: random.Random, number: int) -> hs.step.StepResult | None:
        """Run one micro-batch; None if it was interrupted."""
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        if chance.random() < 0.008:
            x[0, 0] = float("inf")
            self.counts["batches not finite"] += 1
        fails = chance.random() < 0.002
        try:
            result = self.step(x, y, fails=fails)
        except Interruption:
            self.counts["interruptions"] += 1
            return None
        if result.due:
            self.counts["updates"] += 1
            self.counts["updates retried"] += result.retries > 0
            self.counts["updates skipped"] += int(result.skipped)
        if number % 25 == 0:
            self.counts["monitor records"] += len(self.monitor.poll())
            self.counts["metrics records"] += len(self.metrics.poll())
        if result.due and bool(result.skipped) and chance.random() < 0.2:
            self.explain()
        return result

    def explain(self) -> None:
        """Ask for the verdict on the last step."""
        try:
            self.step.explain()
            self.counts["calls of explain"] += 1
        except StepError:  # it was examined, and there is nothing to replay any more
            pass

    def save(self) -> Path:
        """Save the step to a file, and remove the oldest."""
        self.step.flush()
        path = self.folder / f"{self.saved}.pt"
        torch.save(self.step.state_dict(), path)
        (self.folder / f"{self.saved - KEPT}.pt").unlink(missing_ok=True)
        self.saved += 1
        self.counts["checkpoints"] += 1
        return path

    def load(self, path: Path) -> None:
        """Load what `save` has saved."""
        self.step.load_state_dict(torch.load(path, weights_only=True))

    def branch(self, chance: random.Random) -> None:
        """Train a copy of the step for a while, and drop it."""
        self.step.flush()
        own, self.step = self.step, copy.deepcopy(self.step)
        self.counts["copies"] += 1
        for _ in range(4):
            self.train(chance, 1)
        self.step = own

    def restart(self) -> None:
        """Build everything anew from a checkpoint."""
        path = self.save()
        self.build()
        self.load(path)
        self.counts["restarts"] += 1


# ------------------------------------------------------------------ samples


def sample(folder: Path) -> dict[str, int]:
    """Measure this process after a garbage collection."""
    gc.collect()
    everything = gc.get_objects()
    kinds = (Tensor, nn.Parameter)
    tensors = [one for one in everything if type(one) in kinds and one.layout is torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    evidence = [path for path in folder.glob("evidence/*") if path.is_file()]
    own = Path("/proc/self")
    found = {
        "objects": len(everything),
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "evidence_files": len(evidence),
        "evidence_bytes": sum(path.stat().st_size for path in evidence),
        "checkpoint_files": len([*folder.glob("[0-9]/*.pt")]),
    }
    if own.exists():  # Linux
        found["rss"] = int((own / "statm").read_text().split()[1]) * 4096
        found["files"] = len([*(own / "fd").iterdir()])
        found["threads"] = len([*(own / "task").iterdir()])
    return found


def growths(samples: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Return for each quantity its medians over the second and the last quarter, its bound and whether it is flat."""
    quarter = len(samples) // 4
    found = {}
    for name, (bound, what) in BOUNDS.items():
        if name not in samples[0]:
            continue
        second, last = (
            statistics.median(s[name] for s in part) for part in (samples[quarter : -2 * quarter], samples[-quarter:])
        )
        found[name] = {
            "what": what,
            "second": second,
            "last": last,
            "most": max(s[name] for s in samples),
            "bound": bound,
            "flat": last - second <= bound,
        }
    return found


# ------------------------------------------------------------------ a run


def soak(
    steps: int, samples_taken: int = SAMPLES, after: Callable[[hs.step.StepResult | None], object] = lambda result: None
) -> dict[str, Any]:
    """Train for so many micro-batches; return counts, samples and growths.

    Args:
        steps: of all programs together.
        samples_taken: how many samples.
        after: called with each result.
    """
    chance = random.Random(0)
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    samples = []
    every = max(1, steps // samples_taken)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        programs = [Program(name, folder / str(i), counts) for i, name in enumerate(POLICIES)]
        for number in range(1, steps + 1):
            program = programs[number % len(programs)]
            after(program.train(chance, number))
            turn = number // len(programs)
            if turn % 50 == 10:
                program.load(program.save())
            if turn % 50 == 20:
                program.branch(chance)
            if turn % 200 == 30:
                program.restart()
            if number % every == 0:
                samples.append(sample(folder))
    return {"steps": steps, "counts": dict(sorted(counts.items())), "growths": growths(samples), "samples": samples}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--steps", type=int, default=STEPS, help="micro-batches of all programs together")
    options = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # verdicts, one line each
    torch.set_num_threads(1)
    began, measured = time.monotonic(), commit()
    found = soak(options.steps)
    samples = found.pop("samples")
    report = {
        "command": " ".join(["python -m benchmarks.soak", *sys.argv[1:]]),
        "commit": measured,
        "machine": {**machine(), "torch_threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
        **found,
        "samples": {name: [s[name] for s in samples] for name in samples[0]},
    }
    write(options.json, report)
    grown = [name for name, found in report["growths"].items() if not found["flat"]]
    if grown:
        print(f"not flat: {', '.join(grown)}", file=sys.stderr)
    return bool(grown)


# ------------------------------------------------------------------ its table


def soak_table(report: dict[str, Any]) -> str:
    """Return what was trained, and each quantity in the second and the last quarter of the run."""
    counts = ", ".join(f"{number:,} {what}" for what, number in report["counts"].items())
    rows = [
        [
            g["what"],
            *(f"{g[key]:,.0f}" for key in ("second", "last", "most", "bound")),
            "yes" if g["flat"] else "**no**",
        ]
        for g in report["growths"].values()
    ]
    head = ["quantity", "second quarter", "last quarter", "most", "may grow by", "flat"]
    text = f"{report['steps']:,} micro-batches of four programs: {counts}. {told(report['commit'])}"
    return f"{text}\n\n{table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
