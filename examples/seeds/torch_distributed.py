"""DistributedDataParallel, one process for each device: the loop of one process, unchanged.

Source: the article "Automatic Mixed Precision Using PyTorch", part on DistributedDataParallel (its text without its
code). Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``. Here two processes on the CPU, and
a batch that overflows on one of them: gradients are averaged before the scaler looks, so both skip the step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

RANKS, STEPS, BAD = 2, 60, 40


def train(rank: int) -> dict[str, Any]:
    """Train this rank's share; return the losses, the scales and the weights."""
    torch.manual_seed(0)  # the same initial weights everywhere
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    data = torch.Generator().manual_seed(100 + rank)  # other batches on every rank
    losses, scales = [], []
    for step in range(STEPS):
        input = torch.randn(32, 8, generator=data)
        target = input.sum(1, keepdim=True) / 4
        if step == BAD and rank == 1:
            target[0] = float("inf")
        optimizer.zero_grad()
        with autocast():
            output = model(input)
            loss = F.mse_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, "weights": net.state_dict()}


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
    """Start the processes; return rank 0's losses, the scales of each rank and whether the weights agree."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(folder,), nprocs=RANKS, join=True)
        outcomes = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(RANKS)]
    first, second = outcomes
    equal = all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    scales = [outcome["scales"][-1] for outcome in outcomes]
    print(
        f"rank 0: loss {first['losses'][0]:.3f} -> {first['losses'][-1]:.3f}; scales {scales}, weights equal: {equal}"
    )
    return {"first": first["losses"][0], "last": first["losses"][-1], "scales": scales, "equal": equal}


if __name__ == "__main__":
    main()
