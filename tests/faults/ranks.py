"""List A, faults of one process among several: its gradients make everybody's non-finite."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from tests.faults.case import Case, fault, generator


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        h = h * h  # FAULT one_bad_rank
        return self.out(h)


def classify(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def parallel(batch: Any) -> Case:
    """Return the case of this process; the default group is to be initialised, with two processes."""
    torch.manual_seed(131)
    policy = hs.Policy.of("mixed", dtype="fp16", scale=64.0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Gate())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hs.prepare(model, optimizer, policy=policy)
    return Case(
        model=nn.parallel.DistributedDataParallel(model),
        optimizer=optimizer,
        loss_fn=classify,
        batch=batch,
        policy=policy,
        steps=4,
    )


@fault("A", kind="overflow", op="mul", module="2", phase="forward", step=3, rank=1, cures=("bf16",))
def one_bad_rank() -> Case:
    """On the second process, the third step's weights of a bias gate have grown: only there the square overflows."""

    def batch(step: int) -> tuple[Any, ...]:
        x = torch.randn(6, 8, generator=generator(10 * step + dist.get_rank()))
        return x, torch.randint(0, 4, (6,), generator=generator(step))

    case = parallel(batch)
    gate: Any = case.model.module[2]  # type: ignore[index]

    def grow(step: int) -> None:
        with torch.no_grad():
            gate.fc.bias.fill_(400.0 if step == 3 and dist.get_rank() == 1 else 0.0)

    return Case(**{**vars(case), "before": grow})


@fault("A", kind="bad_batch", step=2, rank=0)
def one_bad_shard() -> Case:
    """The first process's shard of the data has an inf."""

    def batch(step: int) -> tuple[Any, ...]:
        x = torch.randn(6, 8, generator=generator(10 * step + dist.get_rank()))
        if step == 2 and dist.get_rank() == 0:
            x[1, 1] = float("inf")
        return x, torch.randint(0, 4, (6,), generator=generator(step))

    return parallel(batch)
