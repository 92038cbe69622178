"""The training loop: a bad step is known, named and leaves no trace; clipping cannot go wrong; nothing waits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pains.eyes import Casts, Waits
from tests.pains.pain import pain

INF = float("inf")


def summed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().sum()
    return loss


@pain(25, torch_fails_with=AssertionError, saying="learning rate advanced by a step that was skipped")
def test_a_skipped_step_does_not_advance_the_learning_rate(amp: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    seen: dict[int, float] = {}

    def loss_fn(model: nn.Module, x: Tensor, number: int) -> Tensor:
        seen.setdefault(number, optimizer.param_groups[0]["lr"])  # a step may be replayed to be explained
        return summed(model, x)

    step = amp.training(model, optimizer, loss_fn, scheduler=scheduler, init_scale=1.0)
    for number, x in enumerate((1.0, INF, 1.0)):
        step(torch.full((3, 4), x), number)
    rates = list(seen.values())
    assert rates == [1.0, 0.5, 0.5], f"the learning rate advanced by a step that was skipped: {rates}"


@pain(25, torch_fails_with=AssertionError, saying="same as a good one")
def test_a_skipped_step_is_known(amp: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu")
    told = []
    for bad in (False, True):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(model(torch.ones(3, 4)).sum() * (INF if bad else 1.0)))
        returned = scaler.step(optimizer)
        told.append(bool(scaler.skipped(optimizer)) if hasattr(scaler, "skipped") else returned)
        scaler.update()
    assert told[0] != told[1], f"a skipped step returns the same as a good one: {told[1]}"


@pain(27, torch_fails_with=AssertionError, saying="does not say which parameter")
def test_a_bad_step_names_the_parameters_that_did_it(amp: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            out: Tensor = self.head(hidden.detach()) * x.mean() + hidden.sum()
            return out

    model = Two()
    optimizer = torch.optim.SGD([*model.named_parameters()], lr=0.1)
    step = amp.training(model, optimizer, summed, init_scale=2.0**16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = step(torch.full((64, 4), 30.0))  # the head's gradient passes 65504 under this scale
    told = " ".join([str(getattr(result, "culprits", result)), *(str(w.message) for w in said)])
    assert "head.weight" in told, f"the bad step does not say which parameter it was: {told}"


@pain(28, torch_fails_with=AssertionError, saying="running statistics are .*nan")
def test_a_skipped_step_leaves_batch_norm_alone(amp: Any) -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    step = amp.training(model, torch.optim.AdamW(model.parameters()), summed)
    step(torch.full((8, 4), INF))
    statistics = norm.running_mean
    assert statistics is not None
    assert not bool(statistics.isnan().any()), f"running statistics are {statistics.tolist()} after a skipped step"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pain(32, torch_fails_with=AssertionError, saying="waited for the device 1 times")
def test_a_step_with_torchs_default_optimizer_never_waits(amp: Any) -> None:
    model = nn.Linear(4, 2)
    step = amp.training(model, torch.optim.AdamW(model.parameters()), summed, clip_norm=1.0)
    step(torch.ones(3, 4))
    with Waits() as waits:
        step(torch.ones(3, 4))
    assert waits.count == 0, f"one step waited for the device {waits.count} times"


@pain(34, torch_fails_with=AssertionError, saying="is .* of the one wanted")
def test_clipping_cannot_be_put_in_the_wrong_place(amp: Any) -> None:
    """Torch's loop is written as plain PyTorch is: clip between backward and step (examples#1196)."""
    model, x = nn.Linear(4, 2, bias=False), torch.ones(3, 4)
    plain = copy.deepcopy(model)
    summed(plain, x).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    wanted, before = plain.weight.detach(), model.weight.detach().clone()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if amp.name == "halfstep":
        amp.training(model, optimizer, summed, clip_norm=1.0, init_scale=1024.0)(x)
    else:
        scaler = amp.GradScaler("cpu", init_scale=1024.0)
        with amp.autocast("cpu", dtype=torch.float16):
            loss = summed(model, x)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    share = float((model.weight.detach() - before).norm() / (wanted - before).norm())
    assert share == pytest.approx(1.0, rel=1e-2), f"the update is {share:.1e} of the one wanted"


@pain(35, torch_fails_with=NotImplementedError, saying="[Ss]parse", cured_in=(2, 14))
def test_sparse_gradients_are_clipped(amp: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    model, before = nn.Sequential(table, nn.Linear(2, 1)), table.weight.detach().clone()
    step = amp.training(model, torch.optim.SGD(model.parameters(), lr=1.0), summed, clip_norm=0.1, init_scale=4.0)
    step(torch.tensor([1, 1, 2]))
    moved = table.weight.detach() - before
    assert 0 < float(moved.norm()) <= 0.1 + 1e-6 and not bool(moved[0].any())


@pain(39, torch_fails_with=AssertionError, saying="updates were lost")
def test_low_weights_do_not_lose_small_updates(amp: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    step = amp.training(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True),
        summed,
        dtype="bf16",
        weights="low",
    )
    for _ in range(100):
        step(torch.ones(3, 4, dtype=torch.bfloat16))
    moved = float(1.0 - model.state_dict()["weight"].float().mean())
    assert moved == pytest.approx(100 * 1e-4, rel=0.01), f"updates were lost: the weight moved by {moved}"


@pain(44, torch_fails_with=AssertionError, saying="weights were cast 8 times")
def test_micro_batches_do_not_cast_weights_again(amp: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp.training(model, optimizer, mse, dtype="bf16", weights="masters", accumulate=4)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(4):
        step(x, y)
    with Casts() as casts:
        for _ in range(4):
            step(x, y)
    weights = [shape for shape in casts.shapes if shape == (8, 8)]
    assert not weights, f"weights were cast {len(weights)} times in one update"


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)
