"""What `test_replayed.py` runs in processes of their own: bad steps of many loops, and replays of their evidence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.lens import Verdict
from tests.two_processes import in_processes

PATIENCE = 400.0  # seconds for two ranks, on a busy machine
GOOD = 5  # steps before the bad one
OPTIONS: dict[str, dict[str, Any]] = {
    "retry": {"retry": True},
    "accumulate": {"accumulate": 2},
    "clipped": {"clip_norm": 1.0},
}
AMP = {"amp", "past the scaler"}
LOOPS = ("plain", "low", "accumulate", "checkpointed", "retry", "clipped", "ddp", "amp", "past the scaler")
CASES = [(loop, "overflow") for loop in LOOPS]
CASES += [(loop, fault) for loop in ("plain", "amp") for fault in ("log", "nan", "outlier", "state", "divergence")]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, factor: Tensor) -> Any:
        logits = (self.q(x) * factor) @ (self.k(x) * factor).transpose(-2, -1)
        return self.norm(logits.softmax(-1) @ x)


class Net(nn.Module):
    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputed = recomputed
        self.attention, self.drop, self.head = Attention(), nn.Dropout(0.1), nn.Linear(8 * 16, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, factor: Tensor) -> Any:
        h = checkpoint(self.attention, x, factor, use_reentrant=False) if self.recomputed else self.attention(x, factor)
        return self.norm(self.head(self.drop(h).flatten(1)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, factor: Tensor, positive: Tensor) -> Tensor:
    return F.cross_entropy(model(x, factor).float(), y) + 1e-3 * positive.log().mean()


def loss_of_amp(model: nn.Module, *batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return loss_fn(model, *batch)


def optimizer_of(model: nn.Module, fault: str = "") -> torch.optim.Optimizer:
    if fault == "divergence":
        return torch.optim.SGD(model.parameters(), lr=30.0)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(fault: str) -> Iterator[tuple[Tensor, ...]]:
    """Yield good batches and one with a fault; where training diverges, or a state is bad, all are good."""
    generator = torch.Generator().manual_seed(1)
    for step in range(GOOD + (30 if fault == "divergence" else 2)):
        bad = step == GOOD
        x = torch.randn(4, 8, 16, generator=generator)
        if bad and fault in {"nan", "outlier"}:
            x[1, 2, 3] = torch.nan if fault == "nan" else 1e30
        factor = torch.tensor(600.0 if bad and fault == "overflow" else 1.0)
        positive = torch.tensor([1.0, 0.0 if bad and fault == "log" else 2.0])
        yield x, torch.arange(4), factor, positive


def run(loop: str, fault: str, folder: Path) -> Verdict:
    """Return the verdict on the bad step of a loop, whose evidence is written into `folder`."""
    model: nn.Module = Net(recomputed=loop == "checkpointed")
    optimizer = optimizer_of(model, fault)
    if loop in AMP:
        return _of_amp(model, optimizer, fault, folder, past=loop != "amp")
    policy = hs.Policy.of("O2" if loop == "low" else "mixed", dtype="fp16")
    options: dict[str, Any] = {
        "policy": policy if loop == "retry" else policy.replace(scale=64.0),
        **OPTIONS.get(loop, {}),
    }
    if loop == "ddp":
        hs.prepare(model, optimizer, policy=options.pop("policy"))
        model = DistributedDataParallel(model)
    step = hs.TrainStep(model, optimizer, loss_fn, blackbox=folder, **options)
    rank, count = (dist.get_rank(), 1) if loop == "ddp" else (0, step.accumulate)
    for number, batch in enumerate(batches(fault)):
        if number == GOOD and fault == "state":
            _spoil(optimizer)
        for part in range(rank, rank + count):
            result = step(*[_part(one, part) for one in batch] if loop in {"ddp", "accumulate"} else batch)
        if result.host().skipped or not result.host().loss < torch.inf:
            break
    return step.explain()


def _part(tensor: Tensor, part: int) -> Tensor:
    return tensor[2 * part : 2 * part + 2] if tensor.dim() and len(tensor) == 4 else tensor


def _of_amp(model: nn.Module, optimizer: torch.optim.Optimizer, fault: str, folder: Path, *, past: bool) -> Verdict:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    box = hs.BlackBox(model, loss_of_amp, optimizer, evidence=folder)
    for number, batch in enumerate(batches(fault)):
        if number == GOOD and fault == "state":
            _spoil(optimizer)
        scaler.scale(box(*batch)).backward()
        if past:
            scaler.unscale_(optimizer)
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if box.verdict is not None:
            break
    return box.explain()


def _spoil(optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["exp_avg"][0, 0] = torch.nan


def task(loop: str, fault: str) -> hs.Task:
    return hs.Task(
        name="replayed",
        model=lambda: Net(recomputed=loop == "checkpointed"),
        loss_fn=loss_of_amp if loop in AMP else loss_fn,
        optimizer=lambda model: optimizer_of(model, fault),
        batches=lambda seed, step: next(batches(fault)),
    )


def _in_rank(rank: int, folder: str, fault: str) -> None:
    run("ddp", fault, Path(folder)).to_json(Path(folder) / f"run{rank}.json")


def in_ranks(folder: Path) -> None:
    """Write evidence and verdicts of the loops of two ranks."""
    for loop, fault in CASES:
        if loop == "ddp":
            where = _place(folder, loop, fault)
            in_processes(2, _in_rank, where, str(where), fault, patience=PATIENCE)


def alone(rank: int, what: str, folder: str) -> None:
    """Write evidence and verdicts of the other loops ("run"), or replay all evidence and write verdicts beside it."""
    torch.set_num_threads(1)
    for loop, fault in CASES:
        where = _place(Path(folder), loop, fault)
        if what == "replay":
            for file in where.glob("*.pt"):
                hs.lens.replay(file, task(loop, fault)).to_json(file.with_suffix(".json"))
        elif loop != "ddp":
            run(loop, fault, where).to_json(where / "run0.json")


def _place(folder: Path, loop: str, fault: str) -> Path:
    where = folder / f"{loop}-{fault}"
    where.mkdir(exist_ok=True)
    return where
