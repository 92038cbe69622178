"""What watching costs while nothing is wrong: operators, counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.testing import Counts, count_step


class Average(nn.Module):
    """Keeps a running average in a buffer that only its own forward pass knows."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().float().mean((0, 2, 3)), 0.1)
        return x


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def counted(dtype: str, middle: nn.Module, *, box: bool, monitor: bool) -> Counts:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), middle, nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters()), loss_fn, policy=hs.Policy.of("mixed", dtype=dtype), blackbox=box
    )
    if monitor:
        hs.Monitor(step, every=100, activations=True)
    return count_step(step, torch.randn(4, 3, 8, 8), torch.arange(4))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_idle_black_box_and_a_monitor_between_samples_run_no_operator(dtype: str) -> None:
    plain = counted(dtype, nn.Identity(), box=False, monitor=False)
    assert counted(dtype, nn.Identity(), box=True, monitor=True) == plain


def test_a_buffer_that_the_forward_pass_changes_costs_one_copy_a_step() -> None:
    plain = counted("bf16", Average(), box=False, monitor=False)
    assert counted("bf16", Average(), box=True, monitor=False).launches() == plain.launches() + 1


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")
@pytest.mark.parametrize(("by_hand", "runs"), [(False, True), (True, False)])
def test_a_step_that_overflows_after_the_scale_was_set_by_hand_is_not_replayed(by_hand: bool, runs: bool) -> None:
    model = nn.Linear(4, 4)
    scaler = hs.GradScaler("cpu", rule=hs.ScaleRule.static(2.0**24))
    if by_hand:
        scaler.update(2.0**24)
    policy = hs.Policy.of("mixed", dtype="fp16")
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, policy=policy, scaler=scaler)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert step(torch.randn(2, 4), torch.arange(2)).skipped
    step.state_dict()
    assert (len(calls) > 1) is runs
