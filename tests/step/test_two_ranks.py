"""Two gloo processes: DDP and FSDP2 train, stay equal on both ranks, and agree on a skip that only one rank caused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import halfstep as hs

pytestmark = pytest.mark.dist


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * (float("inf") if x[0, 0] > 90 else 1.0)


def _batch(i: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * i + rank)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def _train(step: hs.TrainStep, rank: int) -> tuple[list[bool], list[float]]:
    skips, scales = [], []
    for i in range(5):
        x, y = _batch(i, rank)
        if i == 2 and rank == 1:
            x[0, 0] = 100.0
        result = step(x, y).host()
        skips.append(result.skipped)
        scales.append(result.scale)
    return skips, scales


def _ddp(rank: int, policy: hs.Policy) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    net = _net()
    model, optimizer, scaler = hs.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), policy=policy)
    parallel = nn.parallel.DistributedDataParallel(model)
    scaler = hs.GradScaler("cpu", init_scale=8.0) if scaler.is_enabled() else scaler
    step = hs.TrainStep(parallel, optimizer, _loss, clip_norm=1.0, scaler=scaler)
    skips, scales = _train(step, rank)
    return skips, scales, model.state_dict()


def _fsdp(rank: int, policy: hs.Policy) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    from torch.distributed.fsdp import fully_shard

    model = hs.prepare(_net(), policy=policy)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = hs.GradScaler("cpu", init_scale=8.0) if policy.dtype == "fp16" else None
    step = hs.TrainStep(model, optimizer, _loss, clip_norm=1.0, scaler=scaler)
    skips, scales = _train(step, rank)
    return skips, scales, {k: v.full_tensor() for k, v in model.state_dict().items()}


def _worker(rank: int, meeting: str, kind: str, name: str, dtype: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        run = _ddp if kind == "ddp" else _fsdp
        skips, scales, state = run(rank, hs.Policy.of(name, dtype=dtype))
        queue.put((rank, skips, scales, {k: v.tolist() for k, v in state.items()}))
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done
    except BaseException:
        dist.destroy_process_group()
        raise


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("ddp", "mixed", "fp16"), ("ddp", "O2", "bf16"), ("fsdp", "torch", "fp16"), ("fsdp", "mixed", "bf16")],
)
def test_ranks_agree(kind: str, name: str, dtype: str, tmp_path: Path) -> None:
    meeting = (tmp_path / "meeting").as_uri()  # a file: a free port may be taken before it is used
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    spawn(_worker, args=(meeting, kind, name, dtype, queue), nprocs=2, join=True)
    first, second = sorted((queue.get(), queue.get()), key=lambda r: r[0])
    assert first[1] == second[1] == [False, False, True, False, False]
    assert first[2] == second[2]
    if dtype == "fp16":
        assert first[2] == [8.0, 8.0, 8.0, 4.0, 4.0]
    assert first[3] == second[3]
