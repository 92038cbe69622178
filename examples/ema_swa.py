"""Weight averages: an exponential moving average and SWA, with torch's `AveragedModel`, also over low weights.

`AveragedModel` copies the model; a copy of a prepared model has fp32 weights and the same policy. Under `O2` the model
itself holds low weights; `update_parameters`, or a loop of your own over parameters, reads their fp32 values, since an
average of rounded weights would not see updates smaller than their last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import halfstep as hs

UPDATES, SWA_FROM, DECAY = 200, 150, 0.9


def make_model() -> nn.Sequential:
    """Return the same small network every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(x), y)


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of a regression problem with noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(32, 8, generator=generator) for _ in range(count)]
    return [(x, x.sin().sum(dim=1, keepdim=True) + torch.randn(32, 1, generator=generator)) for x in inputs]


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """Return the loss on data the training has not seen."""
    model.eval()
    losses = [float(loss_fn(model, x, y)) for x, y in batches(30, seed=2)]
    model.train()
    return sum(losses) / len(losses)


def train(policy: hs.Policy) -> dict[str, float]:
    """Train under `policy` with both averages; return validation losses and the error of the moving average."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    swa = AveragedModel(model)
    constant = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    exact: Tensor | None = None  # the same average by hand, from the fp32 weights of state_dict
    for i, (x, y) in enumerate(batches(UPDATES, seed=1)):
        step(x, y)
        ema.update_parameters(model)
        if i >= SWA_FROM:
            swa.update_parameters(model)
            constant.step()
        weight = model.state_dict()["0.weight"].double()
        exact = weight if exact is None else DECAY * exact + (1 - DECAY) * weight
    update_bn(
        [x for x, _ in batches(50, seed=1)], swa
    )  # the statistics of an average are not the average of statistics
    assert exact is not None
    averaged = ema.module.state_dict()["0.weight"]
    return {
        "model": validate(model),
        "ema": validate(ema),
        "swa": validate(swa),
        "ema_error": float((averaged - exact).norm() / exact.norm()),
        "ema_is_fp32": averaged.dtype is torch.float32,
    }


def main() -> dict[str, dict[str, float]]:
    """Train under three policies; return the validation losses of the model and of both averages."""
    policies = {
        "fp32": hs.Policy.of("O0"),
        "mixed bf16": hs.Policy.of("mixed", dtype="bf16"),
        "O2 bf16": hs.Policy.of("O2", dtype="bf16"),
    }
    runs = {name: train(policy) for name, policy in policies.items()}
    print(f"validation loss before training: {validate(make_model()):.3f}")
    for name, run in runs.items():
        print(f"{name:10}", ", ".join(f"{what} {value:.3g}" for what, value in run.items()))
    return runs


if __name__ == "__main__":
    main()
