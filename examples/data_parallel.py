"""Data parallel training in two processes: prepare first, then DistributedDataParallel, then the step.

The processes average their gradients, once in an accumulation window, at its last micro-batch. A batch that overflows
on one rank is skipped on both, because the verdict is read from the averaged gradients: the ranks stay bit-equal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

RANKS, UPDATES, ACCUMULATE = 2, 40, 2


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), (x[:, :1] * x[:, 1:2]).tanh())


def train(rank: int) -> dict[str, Any]:
    """Train this rank's share; return losses, the updates that were skipped, and the fp32 weights."""
    torch.manual_seed(0)  # the same initial weights everywhere
    net = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, scaler = hs.prepare(net, optimizer, policy=hs.Policy.of("O2", dtype="fp16"))
    parallel = DistributedDataParallel(model)
    step = hs.TrainStep(parallel, optimizer, loss_fn, scaler=scaler, accumulate=ACCUMULATE, clip_norm=1.0)
    data = torch.Generator().manual_seed(100 + rank)  # other batches on every rank
    losses, skipped = [], []
    for update in range(UPDATES):
        for _ in range(ACCUMULATE):
            x = torch.randn(32, 8, generator=data)
            if rank == 1 and update == UPDATES // 2:
                x[0, 0] = float("inf")  # a broken sample, on one rank only
            result = step(x).host()
        losses.append(result.loss)
        if result.skipped:
            skipped.append(update)
    return {"losses": losses, "skipped": skipped, "weights": model.state_dict()}


def worker(rank: int, folder: str) -> None:
    """Join the group, train, and leave the outcome in a file."""
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()  # one machine: a file; several: "env://" and torchrun
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        torch.save(train(rank), Path(folder) / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> dict[str, Any]:
    """Start the processes; return rank 0's losses, the skipped updates of each rank and whether the weights agree."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(folder,), nprocs=RANKS, join=True)
        outcomes = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(RANKS)]
    first, second = outcomes
    equal = all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    print(f"rank 0: loss {first['losses'][0]:.3f} -> {first['losses'][-1]:.3f}")
    print(f"skipped on rank 0: {first['skipped']}, on rank 1: {second['skipped']}; weights equal: {equal}")
    return {
        "first": first["losses"][0],
        "last": first["losses"][-1],
        "skipped": [outcome["skipped"] for outcome in outcomes],
        "equal": equal,
    }


if __name__ == "__main__":
    main()
