"""A language model over a large vocabulary: its last layer and its loss in one, by `hs.linear_cross_entropy`.

The scores of all tokens over the whole vocabulary are the largest tensor of such a model, and they are needed for
nothing but the loss. `hs.linear_cross_entropy` computes a part of them at a time, so that no scores are kept. The model
returns its loss when it is given targets, and scores when it is not.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

VOCABULARY, WIDTH, LENGTH, BATCH = 2048, 16, 32, 8


class LanguageModel(nn.Module):
    """A recurrent language model.

    Args:
        in_one: whether the last layer and the loss are computed in one.
    """

    def __init__(self, *, in_one: bool) -> None:
        super().__init__()
        self.in_one = in_one
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) to scores (B, T, VOCABULARY), or with targets (B, T) to their mean cross-entropy."""
        x = self.norm(self.mix(self.tokens(tokens))[0])
        if targets is None:
            return self.head(x)  # type: ignore[no-any-return]  # module calls are Any
        if not self.in_one:
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return hs.linear_cross_entropy(x, self.head.weight, targets, linear_bias=self.head.bias)


class Kept:
    """Counts the bytes that autograd keeps for the backward pass while it is open."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[int, Tensor]] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), (storage.nbytes(), tensor.detach()))
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of all storages kept so far."""
        return sum(size for size, _ in self.storages.values())


def train(policy: hs.Policy, *, in_one: bool) -> dict[str, float]:
    """Train to repeat the token before; return the first and the last loss, and the bytes kept in one step."""
    torch.manual_seed(0)
    model = LanguageModel(in_one=in_one)
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=3e-2), lambda net, x, y: net(x, y), policy=policy
    )
    batch = partial(torch.randint, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens = batch()
    kept = Kept()
    with kept.hooks:
        first = step(tokens, tokens).host().loss
    for _ in range(14):
        last = step(tokens, tokens).host().loss
    return {"first": first, "last": last, "kept": float(kept.bytes)}


def main() -> dict[str, dict[str, float]]:
    """Train with scores and without, in `mixed` and `pure`; return losses and bytes kept."""
    runs = {}
    for name in ("mixed", "pure"):
        for in_one in (False, True):
            label = f"{name}, {'linear_cross_entropy' if in_one else 'scores'}"
            runs[label] = train(hs.Policy.of(name, dtype="bf16"), in_one=in_one)
    for label, run in runs.items():
        print(f"{label}: loss {run['first']:.3f} -> {run['last']:.3f}, {run['kept'] / 1e6:.2f} MB kept for backward")
    return runs


if __name__ == "__main__":
    main()
