"""LSTM, GRU and plain RNN in bf16 and in emulated fp16: the sum of a sequence, with padding packed away.

The recurrent layer takes low inputs and weights, runs the sequence in fp32 and rounds its output once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import halfstep as hs

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Reader(nn.Module):
    """A recurrent layer over a padded batch; its last state gives the answer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = LAYERS[kind](2, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Map sequences (batch, length, 2) and their lengths to (batch, 1)."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, state = self.layer(packed)
        last = state[0] if isinstance(state, tuple) else state
        out: Tensor = self.head(last[-1])
        return out


def loss_fn(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean squared error of the sum of the values that are marked by a 1 beside them."""
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    target = (x[..., 0] * x[..., 1] * inside).sum(dim=1, keepdim=True)
    return F.mse_loss(model(x, lengths), target)


def train(kind: str, policy: hs.Policy) -> tuple[float, float]:
    """Train one kind of layer; return the mean loss of the first and of the last ten batches."""
    torch.manual_seed(0)
    model = Reader(kind)
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=policy, clip_norm=1.0)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(80):
        marks = (torch.rand(32, 10, generator=data) < 0.3).float()
        x = torch.stack([torch.randn(32, 10, generator=data), marks], dim=-1)
        losses.append(float(step(x, torch.randint(4, 11, (32,), generator=data)).loss))
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def main() -> dict[str, dict[str, float]]:
    """Train every kind of layer in three formats."""
    policies = {"fp32": hs.Policy.of("O0")} | {d: hs.Policy.of("mixed", dtype=d) for d in ("bf16", "fp16")}
    runs: dict[str, dict[str, float]] = {}
    for kind in LAYERS:
        runs[kind] = {}
        for name, policy in policies.items():
            runs[kind]["first"], runs[kind][name] = train(kind, policy)
        print(f"{kind:4}", ", ".join(f"{name} {loss:.3f}" for name, loss in runs[kind].items()))
    return runs


if __name__ == "__main__":
    main()
