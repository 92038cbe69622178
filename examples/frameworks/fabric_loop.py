"""A training loop with Lightning Fabric, under a policy.

One line differs from Fabric's own loop: the Fabric. With ``--devices 2`` it starts a process for each device.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs


class Counter(nn.Module):
    """A GRU that reads a sequence of bits and says whether there are more ones than zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 16)
        self.read = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, bits: Tensor) -> Any:
        """Return two scores for each sequence: (batch, length) -> (batch, 2)."""
        return self.head(self.read(self.embed(bits))[0][:, -1])


def sequences(count: int, seed: int) -> TensorDataset:
    """Return `count` sequences of 15 bits, and their answers."""
    bits = torch.randint(0, 2, (count, 15), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(bits, (bits.sum(1) > 7).long())


def main(
    policy: str | hs.Policy = "O2",
    *,
    seed: int = 0,
    epochs: int = 4,
    folder: str | Path | None = None,
    devices: int | str = "auto",
) -> dict[str, float]:
    """Train; return the mean loss over data that is not trained on, and how much of it is answered right.

    Args:
        policy: what `hs.integrations.lightning.Fabric` takes.
        seed: of weights and batches.
        epochs: passes over the data.
        folder: where a checkpoint is written and, if there is one, read to go on; None: nowhere.
        devices: how many; "auto" is all accelerators, or one CPU.
    """
    fabric = hs.integrations.lightning.Fabric(policy=policy, devices=devices)  # was: Fabric(precision="bf16-mixed", ...
    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    model = Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(sequences(512, 1), batch_size=32))
    state = {"model": model, "optimizer": optimizer, "precision": fabric.precision, "epoch": 0}
    file = None if folder is None else Path(folder, "fabric.ckpt")
    if file is not None and file.exists():
        fabric.load(file, state)
    for epoch in range(state["epoch"], epochs):
        for bits, answers in loader:
            loss = F.cross_entropy(model(bits), answers)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] = epoch + 1
        if file is not None:
            fabric.save(file, state)
    model.eval()
    bits, answers = (tensor.to(fabric.device) for tensor in sequences(256, 2).tensors)
    with torch.no_grad():
        scores = model(bits)
    right = (scores.argmax(1) == answers).float().mean()
    return {"validation": float(F.cross_entropy(scores, answers)), "right": float(right)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="O2", help="a preset's name or a TOML file")
    parser.add_argument("--devices", default="auto", help="how many")
    given = parser.parse_args()
    print(main(given.policy, devices=given.devices))
