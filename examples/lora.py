"""Fine-tuning with LoRA: the base is frozen, and two small matrices beside each layer learn the difference.

The optimizer is given the trainable parameters alone. Under `mixed` the base stays in fp32 and is cast for use. Under
`O2` it is rounded once and stored low with nothing behind it, which is where the memory goes in real fine-tuning; the
adapters have fp32 values behind them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of two matrices of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first the layer is the base

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + up(down(x))."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def loss_fn(model: nn.Module, x: Tensor, shift: float) -> Tensor:
    """Return the mean squared error of a task that `shift` changes."""
    return F.mse_loss(model(x), (x + shift).sin().sum(dim=1, keepdim=True))


def pretrain() -> dict[str, Tensor]:
    """Train the base on the task without shift; return its weights."""
    torch.manual_seed(0)
    model = make_base()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, policy="O0")
    data = torch.Generator().manual_seed(1)
    for _ in range(150):
        step(torch.randn(64, 8, generator=data), shift=0.0)
    return model.state_dict()


def make_base() -> nn.Sequential:
    """Return the network to be fine-tuned."""
    return nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))


def fine_tune(weights: dict[str, Tensor], policy: hs.Policy) -> dict[str, float]:
    """Fine-tune on the shifted task; return losses, and how many frozen and trainable parameters changed."""
    torch.manual_seed(0)
    model = make_base()
    model.load_state_dict(weights)
    for i in (0, 2, 4):
        layer = model[i]
        assert isinstance(layer, nn.Linear)
        model[i] = LoRA(layer)
    trainable = [p for p in model.parameters() if p.requires_grad]
    step = hs.TrainStep(model, torch.optim.AdamW(trainable, lr=1e-2), loss_fn, policy=policy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = torch.Generator().manual_seed(2)
    losses = [float(step(torch.randn(64, 8, generator=data), shift=0.5).loss) for _ in range(150)]
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    return {
        "first": losses[0],
        "last": sum(losses[-10:]) / 10,
        "frozen_changed": sum(".base." in name for name in changed),
        "trained_changed": sum(".base." not in name for name in changed),
        "frozen_bytes": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
    }


def main() -> dict[str, dict[str, float]]:
    """Pretrain once, fine-tune in fp32 and under four policies."""
    weights = pretrain()
    policies = {"fp32": hs.Policy.of("O0")}
    policies |= {f"{p} {d}": hs.Policy.of(p, dtype=d) for p in ("mixed", "O2") for d in ("bf16", "fp16")}
    runs = {name: fine_tune(weights, policy) for name, policy in policies.items()}
    for name, run in runs.items():
        print(
            f"{name:10}",
            f"loss {run['first']:.3f} -> {run['last']:.3f}, frozen weights: {run['frozen_bytes']:.0f} bytes",
        )
    return runs


if __name__ == "__main__":
    main()
