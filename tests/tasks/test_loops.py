from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import halfstep as hs
from halfstep.tasks.candidates import Candidate, candidates
from halfstep.tasks.loops import TorchLoop, fused, make_loop
from tests.tasks.small import batches, small_task

MIXED = Candidate(label="mixed fp16", dtype="fp16", policy=hs.Policy.of("mixed", dtype="fp16"))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def by_hand(model: nn.Module, steps: int, *, low: bool) -> Tensor:
    """Train as in the documentation of torch.amp, bf16."""
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    for i in range(steps):
        x, y = batches(0, i)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("label", ["fp32", "torch.amp bf16"])
def test_the_baselines_are_what_one_writes_by_hand(label: str) -> None:
    model = net()
    loop = make_loop({c.label: c for c in candidates([], "cpu")}[label], small_task(), model, 5)
    for i in range(5):
        loop(batches(0, i))
    assert torch.equal(weights(model), by_hand(net(), 5, low=label != "fp32"))
    assert (loop.skipped(), loop.scale()) == ((), 1.0)


def explode(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y) * (float("inf") if x[0, 0] == 100 else 1.0)


@pytest.mark.parametrize("candidate", [Candidate(label="torch.amp fp16", dtype="fp16"), MIXED], ids=lambda c: c.label)
def test_a_skipped_step_is_counted_and_does_not_move_the_learning_rate(candidate: Candidate) -> None:
    made: list[StepLR] = []

    def scheduler(optimizer: Optimizer, steps: int) -> StepLR:
        made.append(StepLR(optimizer, step_size=1, gamma=0.5))
        return made[-1]

    model = net()
    task = small_task(loss_fn=explode, scheduler=scheduler)
    loop = make_loop(candidate, task, model, 4)
    for i in range(4):
        x, y = batches(0, i)
        before = weights(model)
        if i == 1:
            x[0, 0] = 100
        loop((x, y))
        assert torch.equal(before, weights(model)) is (i == 1)
    if isinstance(loop, TorchLoop):
        assert made[0].last_epoch == 3
    assert loop.skipped() == (1,)
    assert loop.scale() == 2.0**15


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: Adam(p, lr=0.3, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True),
        lambda p: AdamW(p, lr=0.3, eps=1e-3),
        lambda p: SGD(p, lr=0.3, momentum=0.9, nesterov=True),
        lambda p: Adagrad(p, lr=0.3, lr_decay=0.1),
    ],
)
def test_the_fused_form_is_the_same_optimizer(optimizer: Callable[[Any], Optimizer]) -> None:
    plain, quick = net(), net()
    first = optimizer([{"params": plain[0].parameters(), "lr": 0.1}, {"params": plain[2].parameters()}])
    second = fused(optimizer([{"params": quick[0].parameters(), "lr": 0.1}, {"params": quick[2].parameters()}]))
    assert type(second) is type(first) and all(g["fused"] for g in second.param_groups)
    for a, b in zip(first.param_groups, second.param_groups, strict=True):
        assert {k: a[k] for k in a if k not in {"params", "fused", "foreach"}} == {
            k: b[k] for k in b if k not in {"params", "fused", "foreach"}
        }
    for model, made in ((plain, first), (quick, second)):
        for i in range(3):
            x, y = batches(0, i)
            F.mse_loss(model(x), y).backward()
            made.step()
            made.zero_grad()
    torch.testing.assert_close(weights(plain), weights(quick), rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_a_fused_form_or_with_a_choice_stays_as_it_is() -> None:
    chosen = AdamW(net().parameters(), foreach=True)
    assert fused(chosen) is chosen
    other = torch.optim.RMSprop(net().parameters())
    assert fused(other) is other


def test_every_loop_evaluates_as_its_user_would() -> None:
    seen = []

    def metric(model: nn.Module) -> float:
        seen.append((torch.is_autocast_enabled("cpu"), model(torch.ones(1, 8)).dtype))
        return 0.0

    task = small_task(metric=metric)
    for candidate in candidates(["mixed"], "cpu"):
        make_loop(candidate, task, copy.deepcopy(net()), 1).evaluate(task)
    # under a policy the model opens its own region, so outside it autocast is off; outputs are fp32 by the policy
    assert seen == [(False, torch.float32), (True, torch.bfloat16), (False, torch.float32)]


@pytest.mark.parametrize(
    "candidate",
    [*candidates(["mixed", "O2:fp16"], "cpu"), Candidate(label="torch.amp fp16", dtype="fp16")],
    ids=lambda c: c.label,
)
def test_the_loss_handed_out_is_the_one_of_the_step_unscaled_and_without_its_graph(candidate: Candidate) -> None:
    seen: list[float] = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x).float(), y)
        seen.append(float(loss.detach()))
        return loss

    loop = make_loop(candidate, small_task(loss_fn=watched), net(), 3)
    assert torch.isnan(loop.loss)
    kept = []
    for i in range(3):
        loop(batches(0, i))
        kept.append(loop.loss)
    assert all(loss.dim() == 0 and not loss.requires_grad for loss in kept)
    assert [float(loss) for loss in kept] == seen  # none is overwritten by a later step
