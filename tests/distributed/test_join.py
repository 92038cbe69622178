"""Ranks with different numbers of batches: `step.join()` trains as one process does on all of them, and ends equal."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import halfstep as hs
from tests.distributed.checks import deviation
from tests.distributed.strategies import Net, batches, loss_of, policy, whole
from tests.two_processes import error_of, in_two_processes

pytestmark = [pytest.mark.dist, pytest.mark.hours]

AFTER = 2  # updates of even windows behind the uneven ones
RUNS: dict[str, tuple[str, int, tuple[int, int], dict[str, Any]]] = {
    "even": ("O0", 1, (3, 3), {}),
    "uneven": ("O0", 1, (3, 5), {}),
    "the first rank has more": ("mixed:bf16", 1, (4, 1), {}),
    "none at all": ("O0", 2, (0, 4), {}),
    "windows": ("O0", 3, (4, 8), {}),
    "a last short window": ("O0", 3, (2, 7), {"gradient_as_bucket_view": True}),
    "fp16": ("mixed:fp16", 1, (3, 6), {}),
    "fp16, retried": ("mixed:fp16", 1, (3, 6), {}),
    "fp16, windows retried": ("mixed:fp16", 2, (3, 7), {}),
    "pure": ("pure:bf16", 1, (2, 5), {}),
    "fp32 sums": ("pure:bf16:grads=fp32", 2, (3, 6), {}),
    "stochastic": ("pure:bf16:master=stochastic", 1, (2, 4), {}),
    "buffers": ("O0", 2, (1, 4), {}),
}
"""Name -> policy, accumulate, micro-batches of each rank, options of DistributedDataParallel."""


class Counting(Net):
    """It has a buffer, which DistributedDataParallel sends before the first forward pass of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, index: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(index)


def _step(wanted: str, accumulate: int, name: str, wrap: Any) -> tuple[hs.TrainStep, StepLR]:
    torch.manual_seed(0)
    net = Counting() if name == "buffers" else Net()
    optimizer = AdamW(net.parameters(), 1e-2)
    hs.prepare(net, optimizer, policy=policy(wanted))
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    retry = "retried" in name
    scaler = hs.GradScaler("cpu", init_scale=2.0**22 if retry else 8.0, growth_interval=2) if "fp16" in wanted else None
    options: dict[str, Any] = {"clip_norm": 1.0, "scheduler": scheduler, "scaler": scaler, "accumulate": accumulate}
    return hs.TrainStep(wrap(net), optimizer, loss_of, retry=retry, **options), scheduler


def run(rank: int, name: str) -> dict[str, Any]:
    wanted, accumulate, counts, options = RUNS[name]
    step, scheduler = _step(wanted, accumulate, name, lambda net: DistributedDataParallel(net, **options))
    with step.join():
        for i in range(counts[rank]):
            step(*next(batches(i, 0, part=(rank, 2))))
    ended = dict(whole(step.model))
    for i in range(AFTER * accumulate):
        step(*next(batches(100 + i, 0, part=(rank, 2))))
    step.flush()
    state = [value for each in step.optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return {
        "ended": ended,
        "weights": whole(step.model),
        "state": torch.cat([value.detach().float().flatten() for value in state]),
        "rest": (step.scaler.get_scale(), scheduler.last_epoch),
    }


def _alone(name: str) -> dict[str, Any]:
    """Make the updates in one process, each from the micro-batches that ranks have left."""
    wanted, accumulate, counts, _ = RUNS[name]
    step, scheduler = _step(wanted, 2, name, lambda net: net)  # windows of several, whose number is assigned
    start = whole(step.model)

    def update(micro_batches: list[Any]) -> None:
        step.accumulate = len(micro_batches)
        for batch in micro_batches:
            step(*batch)

    for first in range(0, max(counts), accumulate):
        window = range(first, first + accumulate)
        update([next(batches(i, 0, part=(r, 2))) for r in range(2) for i in window if i < counts[r]])
    ended = whole(step.model)
    for first in range(100, 100 + AFTER * accumulate, accumulate):
        update([next(batches(i, 0, part=(r, 2))) for r in range(2) for i in range(first, first + accumulate)])
    step.flush()
    return {"start": start, "ended": ended, "weights": whole(step.model), "epochs": scheduler.last_epoch}


def refused(rank: int) -> dict[str, str]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def step(net: nn.Module, **options: Any) -> hs.TrainStep:
        wrapped = net if isinstance(net, FSDPModule) else DistributedDataParallel(net, **options)
        return hs.TrainStep(wrapped, torch.optim.SGD(net.parameters(), 0.1), loss_of, policy="O0")

    words = {}
    torchs = step(Net())
    with cast(DistributedDataParallel, torchs.model).join():
        words["torch"] = error_of(lambda: torchs(*next(batches(0, 0))))
    hooked = step(Net())
    cast(DistributedDataParallel, hooked.model).register_comm_hook(None, fp16_compress_hook)
    words["hook"] = error_of(hooked.join)
    words["static"] = error_of(step(Net(), static_graph=True).join)
    synced = Net()
    made = step(synced)
    synced.extra = nn.SyncBatchNorm(4)  # which DistributedDataParallel takes on a GPU only
    words["sync"] = error_of(made.join)
    words["sharded"] = error_of(step(cast(nn.Module, fully_shard(hs.prepare(Net(), policy="O0")))).join)
    others = step(nn.Linear(2, 2)), step(Net())

    def join_one_of_two() -> None:
        with others[rank].join():
            pass

    words["two"] = error_of(join_one_of_two)
    return words


def _all(rank: int) -> dict[str, Any]:
    return {**{name: run(rank, name) for name in RUNS}, "refused": refused(rank)}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two_processes(_all, tmp_path_factory.mktemp("join"))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_run_out_of_batches_train_with_the_others_to_the_end(both: list[dict[str, Any]], name: str) -> None:
    first, second = (each[name] for each in both)
    for key in ("ended", "weights"):
        assert all(torch.equal(first[key][part], second[key][part]) for part in first[key] if part != "calls"), key
    assert torch.equal(first["state"], second["state"]) and first["rest"] == second["rest"]
    alone = _alone(name)
    assert first["rest"][1] == alone["epochs"]
    low = "O0" not in RUNS[name][0]
    for key in () if name == "stochastic" else ("ended", "weights"):  # whose draws differ
        ours, wanted, start = (
            {k: v for k, v in x.items() if k != "calls"} for x in (first[key], alone[key], alone["start"])
        )
        assert deviation(ours, wanted, start) <= (3e-2 if low else 1e-5), key


def test_a_join_that_would_wait_forever_is_refused(both: list[dict[str, Any]]) -> None:
    for words in (each["refused"] for each in both):
        assert "use `with step.join():` in its place" in words["torch"]
        assert "join() averages gradients outside of the backward pass, and the communication hook" in words["hook"]
        assert "a sharded model, whose passes gather" in words["sharded"]
        assert "ranks update models of different sizes" in words["two"]
        assert "static_graph=True" in words["static"] and "SyncBatchNorm" in words["sync"]
