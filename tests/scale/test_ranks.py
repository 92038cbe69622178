"""Two gloo processes: sharded gradients (DTensor) make the ranks agree on a skip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from halfstep.events import WEIGHTS_ATTRIBUTE
from halfstep.scale import GradScaler
from tests.two_processes import run_all


def train(rank: int, folder: str) -> None:
    """Overflow on rank 1 only, in the second of three steps, and check that both ranks skip it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    scales = []
    for fused, unscale, dtype in (
        (False, False, torch.float32),
        (True, False, torch.float32),
        (True, True, torch.float32),
        (False, True, torch.bfloat16),
    ):
        # The replicated one comes first: grouped with it, the sharded one would not be reduced.
        weights = [
            torch.nn.Parameter(distribute_tensor(torch.ones(4, 2, dtype=dtype), mesh, [placement]))
            for placement in (Replicate(), Shard(0))
        ]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
        if dtype is torch.bfloat16:
            setattr(optimizer, WEIGHTS_ATTRIBUTE, object())
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for bad, scale in ((False, 8.0), (True, 4.0), (False, 4.0)):
            for weight in weights:
                weight.grad = None  # a gradient of another dtype may be there
                weight.grad = torch.full_like(weight, 8.0)
            if bad and rank == 1:
                sharded = weights[1].grad
                assert isinstance(sharded, DTensor)
                sharded.to_local().view(-1)[0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
                for weight in weights:
                    assert weight.grad is not None and weight.grad.dtype == torch.float32
            if dtype is torch.float32:  # AdamW itself wants gradients in the parameters' dtype
                scaler.step(optimizer)
                assert bool(scaler.skipped(optimizer)) is bad, (rank, fused, unscale)
            scaler.update()
            assert scaler.get_scale() == scale, (rank, fused, unscale, dtype)
            scales.append(scaler.get_scale())
    Path(folder, f"{rank}.json").write_text(json.dumps(scales), encoding="utf-8")
    dist.barrier()  # neither goes while the other still talks
    dist.destroy_process_group()


@pytest.mark.dist
def test_ranks_agree_on_a_skip(tmp_path: Path) -> None:
    run_all(train, (str(tmp_path),))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second == 4 * [8.0, 4.0, 4.0]
