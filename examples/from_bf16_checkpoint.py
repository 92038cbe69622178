"""Fine-tuning from a bf16 checkpoint, the form in which most published weights come.

The model may be built in bf16 or in fp32. Under `mixed` its parameters become fp32; under `O2` they stay bf16 and get
fp32 masters that start at the checkpoint's values. Either way updates smaller than the last bit of a bf16 weight add
up. `O3`, which is plain bf16 training without masters, loses them, and is here for comparison only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

LEARNING_RATE = 1e-4  # fine-tuning: most updates are below half the last bit of a bf16 weight


def make_model() -> nn.Sequential:
    """Return the network, with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor, shift: float) -> Tensor:
    """Return the mean squared error of a task that `shift` changes."""
    return F.mse_loss(model(x), (x + shift).sin().sum(dim=1, keepdim=True))


def pretrained() -> dict[str, Tensor]:
    """Return a checkpoint in bf16, from pretraining on the task without shift."""
    model = make_model()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy="O0")
    data = torch.Generator().manual_seed(1)
    for _ in range(150):
        step(torch.randn(64, 8, generator=data), shift=0.0)
    return {name: value.bfloat16() for name, value in model.state_dict().items()}


def fine_tune(checkpoint: dict[str, Tensor], policy: hs.Policy, built_in: torch.dtype) -> list[float]:
    """Fine-tune on the shifted task under `policy`, the model built in `built_in`; return the losses."""
    model = make_model().to(built_in)
    model.load_state_dict(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy)
    data = torch.Generator().manual_seed(2)
    return [float(step(torch.randn(64, 8, generator=data), shift=0.2).loss) for _ in range(300)]


def main() -> dict[str, dict[str, float]]:
    """Fine-tune one checkpoint in five ways; return the mean loss of the first and of the last twenty batches."""
    checkpoint = pretrained()
    runs = {}
    for name, policy, built_in in (
        ("fp32", hs.Policy.of("O0"), torch.float32),
        ("mixed, built in bf16", hs.Policy.of("mixed", dtype="bf16"), torch.bfloat16),
        ("O2, built in bf16", hs.Policy.of("O2", dtype="bf16"), torch.bfloat16),
        ("O2, built in fp32", hs.Policy.of("O2", dtype="bf16"), torch.float32),
        ("O3, no masters", hs.Policy.of("O3", dtype="bf16"), torch.bfloat16),
    ):
        losses = fine_tune(checkpoint, policy, built_in)
        runs[name] = {"first": sum(losses[:20]) / 20, "last": sum(losses[-20:]) / 20}
        print(f"{name:21} loss {runs[name]['first']:.4f} -> {runs[name]['last']:.4f}")
    return runs


if __name__ == "__main__":
    main()
