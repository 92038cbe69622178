"""Activation checkpointing: blocks are recomputed in the backward pass instead of kept, in the same precision.

Recomputation starts below the model's forward, where a region opened around the model would be over. A prepared model
carries its policy into every block, so both kinds of checkpointing give the gradients of the plain model, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus what the block adds to it."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Residual blocks, checkpointed or not."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 1)."""
        h = self.first(x)
        for block in self.blocks:
            h = block(h) if self.use_reentrant is None else checkpoint(block, h, use_reentrant=self.use_reentrant)
        out: Tensor = self.last(h)
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), (x[:, :1] * x[:, 1:2]).tanh())


def bytes_kept(net: nn.Module, x: Tensor) -> int:
    """Return how many bytes of activations the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x).sum()
    return sum(size for storage, size in kept.items() if storage not in own)


def train(use_reentrant: bool | None, policy: hs.Policy) -> tuple[list[float], int]:
    """Train for 60 updates; return the losses and the bytes kept for one backward pass."""
    torch.manual_seed(0)
    net = Net(use_reentrant)
    step = hs.TrainStep(net, torch.optim.AdamW(net.parameters(), lr=3e-3), loss_fn, policy=policy)
    data = torch.Generator().manual_seed(1)
    losses = [float(step(torch.randn(64, 8, generator=data)).loss) for _ in range(60)]
    return losses, bytes_kept(net, torch.randn(64, 8, generator=data))


def main() -> dict[str, dict[str, float]]:
    """Train without and with both kinds of checkpointing; return losses, equality and bytes."""
    runs = {}
    for dtype in ("bf16", "fp16"):
        policy = hs.Policy.of("mixed", dtype=dtype)
        plain, plain_bytes = train(None, policy)
        for use_reentrant in (True, False):
            losses, kept = train(use_reentrant, policy)
            runs[f"{dtype}, use_reentrant={use_reentrant}"] = {
                "first": losses[0],
                "last": losses[-1],
                "equal": losses == plain,
                "bytes": kept / plain_bytes,
            }
    for name, run in runs.items():
        print(
            f"{name}: loss {run['first']:.4f} -> {run['last']:.4f}, {run['bytes']:.0%} of the activations kept, ",
            end="",
        )
        print("losses equal to the plain run's" if run["equal"] else "losses differ from the plain run's")
    return runs


if __name__ == "__main__":
    main()
