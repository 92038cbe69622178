"""A run in fp16 that skips every step, explained, cured with the first policy the verdict offers, and trained on.

The second block's attention logits pass 65504. The black box, which is on by default, names operator, module and line,
and tries small changes of policy by replaying the step under them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

FP16 = hs.Policy.of("mixed", dtype="fp16")  # on a CPU without fp16 units: emulated


class Attention(nn.Module):
    """One head of attention that forgets to divide its logits before they are rounded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the positions of `x`, (batch, positions, width), tell each other."""
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1)
        return x + self.out(torch.softmax(logits / 4, -1) @ v)  # type: ignore[no-any-return]


def make_model() -> nn.Module:
    """Return two blocks and a head; the second block has learned large weights."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(16), Attention(16), nn.LayerNorm(16), nn.Linear(16, 4))
    with torch.no_grad():
        model.get_parameter("1.qkv.weight").mul_(200)
    return model


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Return sequences whose class is the largest of the first four features of their mean."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 8, 16, generator=generator) for _ in range(60)]
    return [(x, x.mean(1)[:, :4].argmax(1)) for x in inputs]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of the mean over positions."""
    return F.cross_entropy(model(x).mean(1), y)


def train(policy: hs.Policy) -> tuple[hs.TrainStep, list[float]]:
    """Train until a step is skipped although the loss scale is not to blame, or the data ends."""
    model = make_model()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, policy=policy, clip_norm=1.0)
    losses = []
    for x, y in make_batches():
        result = step(x, y).host()
        if result.skipped and step.explain().kind != "scale_too_high":
            break
        losses.append(result.loss)
    return step, losses


def main() -> dict[str, object]:
    """Let the run break, print why, and train under the first cure; return what was found and the losses."""
    step, _ = train(FP16)
    verdict = step.explain()
    print(verdict)
    cure = verdict.cures[0]
    _, losses = train(cure.policy)
    print(f"under {cure.text.splitlines()[0]}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    return {"op": verdict.op, "module": verdict.module, "line": verdict.line, "verified": cure.verified,
            "steps": len(losses), "first": first, "last": last}  # fmt: skip


if __name__ == "__main__":
    main()
