"""Stages of a pipeline, updated as examples/pipeline.py does, train as one process on the same micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.optim import AdamW

import halfstep as hs
from tests.distributed.checks import deviation
from tests.distributed.strategies import BOUNDS, CLIP, Net, batches, policy, whole
from tests.examples.loading import load
from tests.two_processes import in_two_processes

pytestmark = [pytest.mark.dist, pytest.mark.hours]

POLICIES = ("O0", "torch:bf16", "mixed:fp16", "O2:fp16", "pure:bf16", "pure:bf16:grads=fp32")
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
UPDATES, MICRO_BATCHES, BAD = 6, 4, 3


class First(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.rows, self.block = net.rows, net.blocks[0]

    def forward(self, index: Tensor) -> Tensor:
        return cast(Tensor, self.block(self.rows(index)))


class Last(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.block, self.norm, self.head = net.blocks[1], net.norm, net.head

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.norm(self.block(x))))


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten()) * (1.0 if target[0, 0] >= 0 else torch.inf)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    """Return a batch; in update `BAD` the third micro-batch has a loss that is not finite."""
    index, target, _ = next(batches(number, 0))
    if number == BAD:
        target[4, 0] = -100  # what cross_entropy leaves out, and what `_loss` makes inf
    return index, target


def train(rank: int, name: str, kind: str) -> dict[str, Any]:
    stage: nn.Module = Last(_net()) if rank else First(_net())
    stage, optimizer, scaler = hs.prepare(stage, AdamW(stage.parameters(), 1e-2), policy=policy(name))
    pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[kind](pipeline, MICRO_BATCHES, loss_fn=lambda *given: scaler.scale(_loss(*given)))
    update = partial(load("pipeline").update, schedule, stage, optimizer, scaler)
    done = []
    for number in range(UPDATES):
        index, target = _batch(number)
        done.append(update(() if rank else (index,), target if rank else None))
    place = "blocks.1." if rank else "blocks.0."
    weights = {key.replace("block.", place): value for key, value in whole(stage).items()}
    return {
        "weights": weights,
        "done": repr([each[1:] for each in done]),
        "skipped": [each[-1] for each in done],
        "scale": scaler.get_scale(),
    }


def _all(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, kind): train(rank, name, kind) for name in POLICIES for kind in SCHEDULES}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return in_two_processes(_all, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", POLICIES)
def test_stages_train_as_one_process_and_skip_together(
    both: list[dict[Any, dict[str, Any]]], name: str, kind: str
) -> None:
    first, last = (each[name, kind] for each in both)
    assert first["skipped"] == last["skipped"] == [number == BAD for number in range(UPDATES)]
    assert first["done"] == last["done"] and first["scale"] == last["scale"]
    net = _net()
    step = hs.TrainStep(
        net,
        AdamW(net.parameters(), 1e-2),
        lambda model, index, target: _loss(model(index), target),
        policy=policy(name),
        accumulate=MICRO_BATCHES,
        clip_norm=CLIP,
        blackbox=False,
    )
    for number in range(UPDATES):
        for micro_batch in zip(*(part.chunk(MICRO_BATCHES) for part in _batch(number)), strict=True):
            step(*micro_batch)
    start = whole(_net())
    assert deviation({**first["weights"], **last["weights"]}, whole(net), start) <= BOUNDS[policy(name).dtype]


def test_the_recipe_learns() -> None:
    out = load("pipeline").main()
    assert out["last"] < 0.5 * out["first"] and out["skipped"][-1] == 20 and out["equal"]
