"""A pipeline: each process prepares and updates its own stage, and all stages clip and skip together.

A schedule of torch.distributed.pipelining runs the forward and backward passes of all micro-batches, so the loop is
written by hand (`TrainStep` runs these passes itself). The loss is scaled on the last stage, which scales the gradients
of all of them. Each stage has a scaler of its own; they stay equal because every stage gets one verdict, from the norm
of all gradients: one number is summed over the stages in an update. It is the same loop under every policy, and in bf16
too, where nothing is scaled, an update that is not finite is skipped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.multiprocessing.spawn import spawn

import halfstep as hs

STAGES, MICRO_BATCHES, UPDATES, CLIP = 2, 4, 40, 1.0


def update(
    schedule: PipelineScheduleSingle,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: hs.GradScaler,
    inputs: tuple[Tensor, ...],
    target: Tensor | None,
) -> tuple[float, float, bool]:
    """Make one update of a stage.

    Returns:
        The loss on the last stage, else nan; the norm of the gradients of all stages; whether the update was skipped.

    Args:
        schedule: of torch.distributed.pipelining; on the last stage its `loss_fn` returns a scaled loss.
        stage: this process' part of the model, prepared.
        optimizer: over its parameters.
        scaler: from `hs.prepare`, one for each stage.
        inputs: the batch, on the first stage; else ().
        target: on the last stage; else None.
    """
    parameters = list(stage.parameters())
    scale = scaler.scale_on(parameters[0].device)  # stages without a loss have it too
    losses: list[Tensor] = []
    optimizer.zero_grad()
    schedule.step(*inputs, target=target, losses=losses)
    loss = float(torch.stack(losses).mean() / scale) if losses else float("nan")
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.float().square()
    dist.all_reduce(square)  # the norm of all stages, and with it the verdict
    norm = square.sqrt()
    bad = norm.isfinite().logical_not()
    if not bad:
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        optimizer.step()
    scaler.record(bad, optimizer=optimizer)
    scaler.update()
    return loss, float(norm), bool(bad)


def stage_of(rank: int) -> nn.Module:
    """Return a part of the model: the last one ends in the output."""
    torch.manual_seed(rank)
    if rank + 1 < STAGES:
        return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU())
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def train(rank: int) -> dict[str, Any]:
    """Train this rank's stage; return norms, the updates that were skipped, and the scale at the end."""
    stage = stage_of(rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    stage, optimizer, scaler = hs.prepare(stage, optimizer, policy=hs.Policy.of("O2", dtype="fp16"))
    pipeline = PipelineStage(stage, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, loss_fn=lambda *given: scaler.scale(F.mse_loss(*given)))
    data = torch.Generator().manual_seed(0)
    losses, norms, skipped = [], [], []
    for number in range(UPDATES):
        x = torch.randn(32, 8, generator=data)
        y = (x[:, :1] * x[:, 1:2]).tanh()
        if number == UPDATES // 2:
            y[0] = float("inf")  # a broken target, of which the last stage alone has a loss that is not finite
        loss, norm, bad = update(
            schedule, stage, optimizer, scaler, (x,) if rank == 0 else (), y if rank + 1 == STAGES else None
        )
        losses.append(loss)
        norms.append(norm)
        if bad:
            skipped.append(number)
    return {"losses": losses, "norms": norms, "skipped": skipped, "scale": scaler.get_scale()}


def worker(rank: int, folder: str) -> None:
    """Join the group, train, and leave the outcome in a file."""
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()  # one machine: a file; several: "env://" and torchrun
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=STAGES)
    torch.save(train(rank), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> dict[str, Any]:
    """Start the processes; return first and last loss, the skipped updates of each stage and whether they agree."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(folder,), nprocs=STAGES, join=True)
        first, last = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(STAGES))
    losses = last["losses"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; skipped: {first['skipped']} and {last['skipped']}")
    equal = all(first[key] == last[key] for key in ("skipped", "scale")) and repr(first["norms"]) == repr(last["norms"])
    return {"first": losses[0], "last": losses[-1], "skipped": first["skipped"], "equal": equal}


if __name__ == "__main__":
    main()
