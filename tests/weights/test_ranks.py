"""Two gloo processes: ranks that begin with different weights train the same; sharded optimizers are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from tests.two_processes import run_all

pytestmark = pytest.mark.dist

MASTERS = ("master", "split", "kahan", "stochastic")


def _prepared(rank: int, master: Any) -> nn.Module:
    torch.manual_seed(rank)
    policy = hs.Policy.of("O2", dtype="bf16", master=master)
    return hs.prepare(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)), policy=policy)


def _batch(rank: int, i: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + rank))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def _of_first(value: Tensor) -> Tensor:
    copy = value.clone()
    dist.broadcast(copy, 0)
    return copy


def _same(model: nn.Module) -> None:
    low = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    assert torch.equal(low, _of_first(low)) and torch.equal(_flat(model), _of_first(_flat(model)))


def _steps(rank: int) -> None:
    """A TrainStep: fp32 weights are those of the first rank, bit for bit, and stay equal."""
    for master in MASTERS:
        model = _prepared(rank, master)
        wanted = _of_first(_flat(model))
        parallel = DistributedDataParallel(model)
        step = hs.TrainStep(parallel, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).square().mean())
        assert torch.equal(_flat(model), wanted), master
        for i in range(4):
            step(_batch(rank, i))
        _same(model)


def _loops(rank: int) -> None:
    """Loops of one's own, in which nothing is called between the wrapper and its first forward pass."""
    for master in MASTERS:
        model = _prepared(rank, master)
        wanted = _of_first(_flat(model))
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with torch.no_grad():
            if rank == 0:
                parallel(_batch(rank, 0))  # one rank evaluates
        for i in range(4):
            with parallel.no_sync():
                parallel(_batch(rank, 50 + i)).float().square().mean().backward()
            loss = parallel(_batch(rank, i)).float().square().mean()
            assert i or torch.equal(_flat(model), wanted), master
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _same(model)


def _looked_at(rank: int) -> None:
    """What compiled code or a look at the weights leaves: no element may keep what other ranks cannot know."""
    for master in MASTERS:
        model = _prepared(rank, master)
        DistributedDataParallel(model)
        _same(model)


def _sharded(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # deprecated code of torch is run by the import

    model = hs.prepare(nn.Linear(8, 4), policy=hs.Policy.of("pure", dtype="bf16"))
    parallel = DistributedDataParallel(model)
    parallel(_batch(rank, 0)).float().sum().backward()
    before = _flat(model)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for call in (
        sharded.step,
        lambda: hs.prepare(model, sharded, policy=hs.prepared_policy(model) or ""),
        lambda: hs.TrainStep(parallel, sharded, lambda m, x: m(x).sum()),
    ):
        with pytest.raises(hs.HalfstepError, match=r"ZeroRedundancyOptimizer sends low weights.*'mixed'"):
            call()
    assert torch.equal(_flat(model), before)
    fresh = nn.Linear(8, 4)
    sharded = ZeroRedundancyOptimizer(fresh.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(hs.HalfstepError, match="ZeroRedundancyOptimizer"):
        hs.prepare(fresh, sharded, policy=hs.Policy.of("O2", dtype="bf16"))
    assert fresh.weight.dtype is torch.float32 and hs.prepared_policy(fresh) is None
    hs.prepare(fresh, sharded, policy="mixed")  # fp32 parameters: it works


WORK: dict[str, Callable[[int], None]] = {
    "TrainStep": _steps,
    "loops": _loops,
    "looked at": _looked_at,
    "sharded": _sharded,
}


def _worker(rank: int, meeting: str, work: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        WORK[work](rank)
        dist.barrier()
        os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done
    except BaseException:
        dist.destroy_process_group()
        raise


@pytest.mark.parametrize("work", WORK)
def test_ranks_hold_the_same_weights(work: str, tmp_path: Path) -> None:
    run_all(_worker, ((tmp_path / "meeting").as_uri(), work))
