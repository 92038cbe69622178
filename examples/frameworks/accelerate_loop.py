"""A training loop with Hugging Face accelerate, under a policy.

One line differs from accelerate's own loop: the Accelerator. Start it with ``python`` or, on several processes, with
``torchrun --nproc-per-node 2``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs


def make_data(count: int = 256) -> TensorDataset:
    """Return points on two rings, and the ring of each."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (count,), generator=generator)
    angles = 6.2832 * torch.rand(count, generator=generator)
    radii = 1.0 + labels + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], 1), labels)


def train(policy: str | hs.Policy, *, seed: int = 0, epochs: int = 8, folder: str | None = None) -> float:
    """Train a small network; return its mean loss over the data.

    Args:
        policy: what `hs.prepare` takes.
        seed: of weights, batches and dropout.
        epochs: passes over the data.
        folder: where to save weights and state at the end; None: nowhere.
    """
    accelerator = hs.integrations.accelerate.Accelerator(  # was: accelerate.Accelerator(mixed_precision="bf16",
        policy=policy, gradient_accumulation_steps=2
    )
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = DataLoader(make_data(), batch_size=24, shuffle=True)  # 11 batches: the last window has one
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        x, y = (t.to(accelerator.device) for t in make_data().tensors)
        last = float(F.cross_entropy(model(x), y))
    if folder is not None:
        accelerator.save_state(folder)  # model, optimizer, scheduler, loss scale, random generators
    accelerator.free_memory()
    return last


def main(policy: str = "O2", folder: str | None = None) -> dict[str, float]:
    """Train in fp32 and under `policy`; return both losses."""
    losses = {"fp32": train("O0"), policy: train(policy, folder=folder)}
    print("  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="O2")
    parser.add_argument("--folder")
    main(**vars(parser.parse_args()))
