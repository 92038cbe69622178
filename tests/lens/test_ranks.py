"""Two gloo processes: the verdict names the rank whose batch was bad, on both, and training goes on equally."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from tests.two_processes import in_two_processes

pytestmark = pytest.mark.dist


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _train(rank: int, policy: hs.Policy) -> tuple[Any, ...]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer, scaler = hs.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2), policy=policy)
    step = hs.TrainStep(nn.parallel.DistributedDataParallel(model), optimizer, _loss, scaler=scaler)
    skipped, kinds = [], []
    for i in range(4):
        generator = torch.Generator().manual_seed(10 * i + rank)
        x, y = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        if i == 1 and rank == 1:
            x[0, 0] = math.nan
        skipped.append(step(x, y).host().skipped)
        box = step._box
        kinds.append(None if box is None or box.verdict is None else (box.verdict.kind, box.verdict.rank))
    weights = [p.detach().float().sum().item() for p in model.parameters()]
    return skipped, kinds, weights


def _trained(rank: int) -> list[tuple[Any, ...]]:
    return [_train(rank, hs.Policy.of("mixed", dtype=dtype)) for dtype in ("fp16", "bf16")]


def test_the_bad_rank_is_named_on_both(tmp_path: Path) -> None:
    for mine, other in zip(*in_two_processes(_trained, tmp_path), strict=True):
        assert mine[0] == other[0] == [False, True, False, False]
        assert mine[1] == other[1] == [None, ("bad_batch", 1), ("bad_batch", 1), ("bad_batch", 1)]
        assert mine[2] == other[2]
