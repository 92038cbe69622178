"""A precision plan in a TOML file: a preset, changed for some operators and some modules.

The file is data that can be committed and diffed. `diff` shows how it differs from its preset, `explain` which rule
decides for an operator or a module, and `hs.resolve` what the policy means for this model before anything is trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

FILE = Path(__file__).with_suffix(".toml")


class Net(nn.Module):
    """Three residual blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 16) to logits (batch, 2)."""
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(model(x), y)


def watch_formats(model: nn.Module) -> dict[str, str]:
    """Return a dictionary that the next forward pass fills: the format each linear layer computes in."""
    formats: dict[str, str] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def note(_: nn.Module, __: object, out: Tensor, path: str = path) -> None:
                formats[path] = str(out.dtype).removeprefix("torch.")

            layer.register_forward_hook(note)
    return formats


def main() -> dict[str, object]:
    """Read the file, say what it means, train under it; return losses and the format of every layer."""
    policy = hs.Policy.of(FILE)
    print(f"differs from mixed in:\n{policy.diff('mixed')}\n")
    print(policy.explain("softmax"))
    print(policy.explain("blocks.0"))

    torch.manual_seed(0)
    model = Net()
    plan = hs.resolve(policy, model, "cpu")  # print(plan) is the whole of it
    print(f"{sum(bool(m.rule) for m in plan.modules)} of {len(plan.modules)} modules have a rule")

    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=policy)
    formats = watch_formats(model)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 16, generator=data)
        losses.append(float(step(x, (x.sum(dim=1) > 0).long()).loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {step.scaler.get_scale():g}")
    return {
        "first": losses[0],
        "last": losses[-1],
        "scale": step.scaler.get_scale(),
        "formats": formats,
        "round_trip": hs.Policy.from_toml(policy.to_toml()) == policy,
    }


if __name__ == "__main__":
    main()
