"""A language model whose head is its embedding: one weight under two names, also with low weights and fp32 masters.

Under `O2` the tied weight becomes one low tensor with one master. It stays tied in the model, in `state_dict` (both
names, equal values) and in a copy.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

VOCABULARY, WIDTH = 16, 64


class TiedModel(nn.Module):
    """Embedding, two layers that see the previous token, and a head that is the embedding transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(2 * WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits of the next token."""
        here = self.embed(tokens)
        before = F.pad(here[:, :-1], (0, 0, 1, 0))
        out: Tensor = self.head(self.body(torch.cat([here, before], dim=-1)))
        return out


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the tokens after the second, in nats."""
    return F.cross_entropy(model(tokens[:, 1:-1])[:, 1:].flatten(0, 1), tokens[:, 3:].flatten())


def batch(generator: torch.Generator) -> Tensor:
    """Return sequences in which each token is the sum of the two before it, modulo the vocabulary."""
    tokens = torch.randint(0, VOCABULARY, (64, 2), generator=generator)
    for _ in range(10):
        tokens = torch.cat([tokens, (tokens[:, -1:] + tokens[:, -2:-1]) % VOCABULARY], dim=1)
    return tokens


def main() -> dict[str, float]:
    """Train under O2 in bf16; return the losses at both ends and whether the weights are still tied."""
    torch.manual_seed(0)
    model = TiedModel()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss_fn,
        policy=hs.Policy.of("O2", dtype="bf16"),
        clip_norm=1.0,
    )
    generator = torch.Generator().manual_seed(1)
    losses = [float(step(batch(generator)).loss) for _ in range(200)]
    state, clone = model.state_dict(), copy.deepcopy(model)
    tied = {
        "model": model.head.weight is model.embed.weight,
        "state": torch.equal(state["head.weight"], state["embed.weight"]),
        "copy": clone.head.weight is clone.embed.weight,
    }
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the weight is {model.embed.weight.dtype} in the model")
    print(f"tied in: {', '.join(name for name, yes in tied.items() if yes)}")
    return {"first": losses[0], "last": losses[-1], **{f"tied_{name}": yes for name, yes in tied.items()}}


if __name__ == "__main__":
    main()
