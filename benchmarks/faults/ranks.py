"""List A, faults of one process among several: its gradients make those of all processes non-finite."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from benchmarks.faults.case import MIXED, Case, case, fault, normal, tokens


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        h = h * h  # FAULT one_bad_rank
        return self.out(h)


def parallel(batch: Any, before: Any = None) -> Case:
    """Return the case of this process; the default group is to be initialised, with two processes."""
    policy = MIXED.replace(scale=64.0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Gate())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hs.prepare(model, optimizer, policy=policy)
    wrapped = nn.parallel.DistributedDataParallel(model)
    grow: Any = {} if before is None else {"before": lambda step: before(step, model[2])}
    return case(wrapped, batch, policy=policy, optimizer=optimizer, steps=4, **grow)


@fault("overflow", "mul", "2", seed=131, step=3, rank=1, cures=("bf16",))
def one_bad_rank() -> Case:
    """On the second process, the third step's weights of a bias gate have grown: only there the square overflows."""

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(10 * step + dist.get_rank(), 6, 8)
        return x, tokens(step, (6,), 4)

    def grow(step: int, gate: Any) -> None:
        with torch.no_grad():
            gate.fc.bias.fill_(400.0 if step == 3 and dist.get_rank() == 1 else 0.0)

    return parallel(batch, grow)


@fault("bad_batch", seed=131, step=2, rank=0)
def one_bad_shard() -> Case:
    """The first process's shard of the data has an inf."""

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(10 * step + dist.get_rank(), 6, 8)
        if step == 2 and dist.get_rank() == 0:
            x[1, 1] = float("inf")
        return x, tokens(step, (6,), 4)

    return parallel(batch)
