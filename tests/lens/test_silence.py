"""Monitor: gradients that are not there, and gradients that are no numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


def watched(model: nn.Module, factor: float, steps: int = 3, lr: float = 1e-2, **fields: str) -> hs.Monitor:
    policy = hs.Policy.of("mixed", **fields)
    step = hs.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        lambda model, x: model(x).float().square().mean() * factor,
        policy=policy,
        blackbox=False,
    )
    monitor = hs.Monitor(step, every=1)
    torch.manual_seed(1)
    for _ in range(steps):
        step(torch.randn(16, 8))
        monitor.poll()
    return monitor


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def test_gradients_that_are_all_zero_in_a_narrow_format_are_underflow() -> None:
    (finding,) = watched(layers(), 1e-12, dtype="fp16", scale="none").findings()
    assert finding.kind == "underflow" and len(finding.where) == 8 and finding.step == 2
    assert "8 of 8 parameters" in finding.cause and "loss scale" in finding.remedy and "graph is cut" in finding.remedy


def test_a_wide_format_and_a_single_sample_say_nothing() -> None:
    for steps, dtype in ((3, "bf16"), (1, "fp16")):
        found = watched(layers(), 1e-12, steps, dtype=dtype, scale="none").findings()
        assert "underflow" not in {finding.kind for finding in found}


class Gated(nn.Module):
    """A branch behind a gate that begins as zero: in the first step no gradient passes it."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gate = layers(), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gate * self.branch(x)
        return out


@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_what_a_closed_gate_holds_back_is_no_finding(lr: float) -> None:
    monitor = watched(Gated(), 1.0, lr=lr, dtype="fp16", scale="none")
    assert not any("all of its gradient is zero" in finding.cause for finding in monitor.findings())


def test_gradients_that_are_no_numbers_at_no_scale_are_a_finding() -> None:
    (finding,) = watched(layers(), float("nan"), dtype="bf16").findings()
    assert finding.kind == "bad_gradient" and finding.role == "weight gradient" and len(finding.where) == 8
    assert "all of its gradient is nan" in finding.cause


def test_gradients_that_overflow_on_the_way_of_a_loss_scale_are_none() -> None:
    monitor = watched(layers(), 1e6, dtype="fp16")
    assert "bad_gradient" not in {finding.kind for finding in monitor.findings()}
