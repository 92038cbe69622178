"""Bytes a GPT keeps for its backward pass: its loss from logits, and by hs.linear_cross_entropy.

    python benchmarks/saved.py

4 layers of 256, 8 x 256 tokens out of 4096; parameters are not counted.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.tasks import Task
from halfstep.tasks.candidates import candidates
from halfstep.tasks.gpt import GPT
from halfstep.tasks.loops import make_loop
from halfstep.tasks.measure import SavedForBackward

VOCABULARY, WIDTH, BATCH, LENGTH = 4096, 256, 8, 256
AMP = "torch.amp:bf16"
POLICIES = ("torch", "O1", "mixed", "O2", "pure")
FUSED = "linear_cross_entropy"


def from_logits(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss as people write it."""
    return F.cross_entropy(net(tokens).flatten(0, -2), targets.flatten())


class LossGPT(GPT):
    """A GPT that computes its last layer and its loss in one."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) and targets (B, T) to their mean cross-entropy."""
        if targets is None:
            return super().forward(tokens)
        return hs.linear_cross_entropy(self.features(tokens), self.head.weight, targets)


def fused(net: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss by linear_cross_entropy."""
    return net(tokens, targets)  # type: ignore[no-any-return]  # module calls are Any


def task(*, in_one: bool) -> Task:
    """The GPT on one fixed batch."""
    tokens, targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in "xy")
    kind = LossGPT if in_one else GPT
    return Task(
        name="gpt",
        model=lambda: kind(vocabulary=VOCABULARY, width=WIDTH, layers=4, heads=4, length=LENGTH),
        batches=lambda seed, step: (tokens, targets),
        loss_fn=fused if in_one else from_logits,
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4),
        metric=lambda net: 0.0,
        margin=1.0,
        clip_norm=1.0,
    )


def kept(label: str, *, in_one: bool) -> int:
    """Return the bytes kept between forward and backward of one training step of `label`."""
    this = task(in_one=in_one)
    (candidate,) = (c for c in candidates([label], "cpu") if c.label.replace(" ", ":") == label)
    torch.manual_seed(0)
    loop = make_loop(candidate, this, this.model(), 1000)
    with SavedForBackward(loop.model) as seen:
        loop(this.batches(0, 0))
    return seen.bytes


def saved() -> dict[str, Any]:
    """Return bytes and their ratio to torch.amp's, for each policy with both losses."""
    taken = {AMP.replace(":", " "): kept(AMP, in_one=False), "fp32": kept("fp32", in_one=False)}
    for policy in POLICIES:
        taken[policy] = kept(f"{policy}:bf16", in_one=False)
        if policy in {"mixed", "pure"}:
            taken[f"{policy}, {FUSED}"] = kept(f"{policy}:bf16", in_one=True)
    baseline = taken[AMP.replace(":", " ")]
    return {label: {"bytes": count, "ratio": count / baseline} for label, count in taken.items()}


if __name__ == "__main__":
    print(json.dumps(saved(), indent=1))
