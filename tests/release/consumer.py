"""A user's program with every main name, in which mypy and pyright, both strict, must find no error.

It is read by type checkers where halfstep is installed as a wheel, and never run. `assert_type` fixes types that a
caller relies on: a name that became Any would pass without it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import assert_type

import halfstep as hs


class Net(nn.Module):
    """A model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(x)
        return logits


def loss_fn(model: Net, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@hs.operator("fp32", name="consumer::energy")
def energy(x: Tensor) -> Tensor:
    """Return the sum of squares."""
    return x.square().sum(-1)


def trained(folder: Path) -> float:
    """Train, save, load and examine."""
    policy = hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["softmax"]).with_modules({"head": "fp32"})
    assert_type(policy, hs.Policy)
    assert_type(policy.to_toml(), str)
    assert_type(policy.explain("softmax"), str)
    model = Net()
    step = hs.TrainStep(model, sgd(model), loss_fn, policy=policy, clip_norm=1.0)
    result = step(torch.randn(2, 8), torch.zeros(2, dtype=torch.long))
    assert_type(result, hs.step.StepResult)
    host = result.host()
    assert_type(host, hs.step.HostStepResult)
    assert_type(host.skipped, bool)
    assert_type(host.scale, float)
    assert_type(step.scaler, hs.GradScaler)
    for record in step.metrics(every=50).poll():
        assert_type(record, hs.step.StepMetrics)
    with hs.on_preemption(step, folder):
        hs.save(step, folder, extra={"epoch": 1})
    loaded = hs.load(step, folder, missing_ok=True)
    assert_type(loaded, "hs.checkpoints.Loaded | None")
    monitor = hs.Monitor(step, every=10)
    for finding in monitor.findings():
        print(finding)
    assert_type(energy(torch.ones(2, 2)), Tensor)
    return host.loss


def looped() -> None:
    """Run a hand-written loop."""
    given = Net()
    model, optimizer, scaler = hs.prepare(given, sgd(given), policy="O2")
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.SGD)
    assert_type(scaler, hs.GradScaler)
    loss = loss_fn(model, torch.randn(2, 8), torch.zeros(2, dtype=torch.long))
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    with hs.edit_weights(model) as weights:
        assert_type(weights, Net)
    assert_type(hs.prepared_policy(model), "hs.Policy | None")
    assert_type(hs.unprepare(model), Net)
    assert_type(hs.lowered(given), Net)
    with hs.autocast("cpu", dtype=torch.bfloat16), hs.suspended():
        given(torch.ones(1, 8))
    alone = hs.GradScaler("cpu", init_scale=2.0**10, rule=hs.ScaleRule(interval=100))
    assert_type(alone.get_scale(), float)
    box = hs.BlackBox(model, loss_fn, optimizer)
    print(box)


def decided() -> None:
    """Ask for advice."""
    task = hs.Task(
        name="mine",
        model=Net,
        batches=lambda seed, step: (torch.randn(2, 8), torch.zeros(2, dtype=torch.long)),
        loss_fn=loss_fn,
        optimizer=sgd,
    )
    batch = torch.randn(2, 8), torch.zeros(2, dtype=torch.long)
    audit = hs.audit(Net(), [batch], loss_fn, hs.Policy.of("mixed"))
    assert_type(audit, hs.lens.Audit)
    plan = hs.plan(Net, batch, loss_fn, sgd, policy="O2")
    print(plan, audit, hs.tune(task, minutes=1.0))
    for finding in hs.lint("train.py"):
        print(finding)
    try:
        hs.Policy.of("no such preset")
    except hs.HalfstepError as error:
        print(error)
    print(hs.Lion(Net().parameters()), hs.resolve(hs.Policy(), Net()), hs.__version__)
