"""Accumulating many micro-batches over low weights: in which format gradients are summed.

Under `O2` a gradient has the format of its weight, and so has the sum over micro-batches: in bf16 each addition rounds
to 8 bits, and the errors add up. `grads="fp32"` sums in fp32, for 4 bytes a parameter instead of 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

ACCUMULATE = 64


def make_model() -> nn.Sequential:
    """Return the same network every time, with weights that bf16 holds exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    return model.bfloat16().float()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


def first_update(policy: hs.Policy) -> Tensor:
    """Return the gradient of one window: what SGD with a learning rate of 1 subtracts from the fp32 weights."""
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = hs.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, policy=policy, accumulate=ACCUMULATE
    )
    data = torch.Generator().manual_seed(1)
    for _ in range(ACCUMULATE):
        step(torch.randn(16, 8, generator=data))
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


def train(policy: hs.Policy) -> tuple[float, float]:
    """Train for 12 updates of 64 micro-batches; return the mean loss of the first and of the last window."""
    model = make_model()
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=2e-2), loss_fn, policy=policy, accumulate=ACCUMULATE
    )
    data = torch.Generator().manual_seed(1)
    losses = [float(step(torch.randn(16, 8, generator=data)).loss) for _ in range(12 * ACCUMULATE)]
    return sum(losses[:ACCUMULATE]) / ACCUMULATE, sum(losses[-ACCUMULATE:]) / ACCUMULATE


def main() -> dict[str, dict[str, float]]:
    """Compare both formats with fp32; return the relative error of a window's gradient, and losses."""
    exact = first_update(hs.Policy.of("O0"))
    runs: dict[str, dict[str, float]] = {}
    for name, policy in (
        ("param", hs.Policy.of("O2", dtype="bf16", grads="param")),
        ("fp32", hs.Policy.of("O2", dtype="bf16", grads="fp32")),
    ):
        first, last = train(policy)
        error = float((first_update(policy) - exact).norm() / exact.norm())
        runs[name] = {"error": error, "first": first, "last": last}
        print(f"grads={name!r}: gradient of a window {error:.3%} off, loss {first:.3f} -> {last:.4f}")
    return runs


if __name__ == "__main__":
    main()
