"""A LightningModule, trained by Lightning's Trainer under a policy.

One line differs from Lightning's own: the Trainer's `plugins`. Start it with ``python``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs


class Autoencoder(LightningModule):
    """Puts 8 x 8 pictures of one soft spot into 4 numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> Any:
        """Return the pictures that 4 numbers each are enough for, (batch, 64)."""
        return self.decoder(self.encoder(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        (x,) = batch
        loss = F.mse_loss(self(x), x)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss over data that is not trained on."""
        (x,) = batch
        self.log("validation", F.mse_loss(self(x), x))

    def configure_optimizers(self) -> Any:
        """Return AdamW and a schedule that moves with its steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=96)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def pictures(count: int, seed: int) -> TensorDataset:
    """Return `count` pictures, (count, 64)."""
    generator = torch.Generator().manual_seed(seed)
    place = 7 * torch.rand(count, 2, 1, generator=generator)
    rows = torch.exp(-((torch.arange(8) - place) ** 2) / 4)  # (count, 2, 8): down, across
    return TensorDataset((rows[:, 0, :, None] * rows[:, 1, None, :]).flatten(1))


def main(policy: str | hs.Policy = "O2", *, seed: int = 0, epochs: int = 6) -> dict[str, float]:
    """Train; return the last losses.

    Args:
        policy: what `HalfstepPrecision` takes; "" for Lightning's own fp32.
        seed: of weights and batches.
        epochs: passes over the data.
    """
    torch.manual_seed(seed)
    model = Autoencoder()
    trainer = Trainer(
        max_epochs=epochs,
        gradient_clip_val=1.0,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        plugins=[hs.integrations.lightning.HalfstepPrecision(policy)]
        if policy
        else None,  # was: precision="bf16-mixed"
    )
    generator = torch.Generator().manual_seed(seed)
    batches = DataLoader(pictures(256, 1), batch_size=16, shuffle=True, generator=generator)
    trainer.fit(model, batches, DataLoader(pictures(128, 2), batch_size=64))
    return {name: float(trainer.callback_metrics[name]) for name in ("loss", "validation")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="O2", help="a preset's name or a TOML file")
    print(main(parser.parse_args().policy))
