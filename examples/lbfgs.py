"""LBFGS and other optimizers that need a closure: a hand-written loop, in bf16 or fp32, without a loss scale.

Such an optimizer evaluates the loss several times within one step, so a step cannot be skipped, nor a gradient
unscaled, from outside. A scaler that is on, low weights with fp32 masters, and `TrainStep` refuse it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


def make_data() -> tuple[Tensor, Tensor]:
    """Return points of a smooth curve."""
    x = torch.linspace(-2, 2, 128)[:, None]
    return x, (2 * x).sin()


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same small network every time, and its LBFGS."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, history_size=10)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(x), y)


def train(policy: hs.Policy) -> tuple[float, float]:
    """Fit the curve under `policy`; return the loss before and after."""
    x, y = make_data()
    model, optimizer = make_model()
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(10):
        scaler.step(optimizer, closure=closure)  # the scaler is off without fp16, and hands the closure on
        scaler.update()
    return first, float(loss_fn(model, x, y).detach())


def refused(attempt: Callable[[], object]) -> str:
    """Return the message of the error that `attempt` raises."""
    try:
        attempt()
    except hs.HalfstepError as error:
        return str(error)
    return ""


def main() -> dict[str, float | str]:
    """Fit in fp32 and in bf16; return the losses, and the errors of what cannot work."""
    first, fp32 = train(hs.Policy.of("O0"))
    _, bf16 = train(hs.Policy.of("mixed", dtype="bf16"))
    errors = {
        "scaler": refused(lambda: train(hs.Policy.of("mixed", dtype="fp16"))),
        "masters": refused(lambda: train(hs.Policy.of("O2", dtype="bf16"))),
        "step": refused(lambda: hs.TrainStep(*make_model(), loss_fn, policy="mixed")),
    }
    print(f"loss {first:.5f} -> fp32 {fp32:.6f}, bf16 {bf16:.6f}")
    for name, message in errors.items():
        print(f"{name}: {message}")
    return {"first": first, "fp32": fp32, "bf16": bf16, **errors}


if __name__ == "__main__":
    main()
