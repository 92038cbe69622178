"""A GPT on one process or many: data parallel, sharded with 8 bytes a parameter, or tensor parallel and sharded.

    torchrun --nproc-per-node 2 examples/at_scale.py --way pure --folder checkpoints

Ways: `ddp` (DistributedDataParallel, policy mixed), `pure` (hs.shard: bf16 weights with their 16-bit remainders and
optimizer states in bf16, 2 + 2 + 4 bytes a parameter over all ranks together), `tp` (the same, over pairs of ranks that
split each layer). Without torchrun it trains alone, with the same batches. The checkpoint of any number of ranks opens
on any other number: start it again with another --nproc-per-node, and it goes on. Each process takes an accelerator if
there are enough for all, else the CPU.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

WIDTH, HEADS, LENGTH, ROWS = 64, 4, 32, 16  # ROWS: sequences of a batch, of all ranks together
PURE = hs.Policy.of("pure", dtype="bf16", master="split", state="low", reduce="fp32")
TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map a residual stream (rows, length, width) to the next one."""
        y = self.norm1(x)
        # -1: a rank of a tensor parallel pair has half of the heads
        q, k, v = (f(y).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Two blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, length) to scores of the next one."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()  # type: ignore[no-any-return]  # fully_shard warns of views


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(number: int, part: int, parts: int) -> Tensor:
    """Return part `part` of `parts` of global batch `number`, (ROWS / parts, LENGTH + 1)."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(number))
    rows = [torch.frombuffer(bytearray(TEXT[i : i + LENGTH + 1]), dtype=torch.uint8).long() for i in starts.tolist()]
    return torch.stack(rows).chunk(parts)[part]


def device_here() -> torch.device:
    """Return the device of this process: an accelerator of its own, or the CPU."""
    found, processes = torch.accelerator.current_accelerator(check_available=True), os.environ.get("LOCAL_WORLD_SIZE")
    if found is None or torch.accelerator.device_count() < int(processes or 1):
        return torch.device("cpu")
    device = torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    return device


def build(way: str, ranks: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Return the model, its optimizer, and how many ranks share one part of the batch."""
    torch.manual_seed(0)  # the same initial weights on every rank
    model, together = GPT().to(device), 1
    if ranks > 1 and way == "pure":
        hs.shard(model, PURE)
    elif ranks > 1 and way == "tp":
        together = 2
        mesh = init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
        parallelize_module(model, mesh["tensor"], {**columns, **rows})
        hs.shard(model, PURE, mesh=mesh["data"])
    else:
        hs.prepare(model, policy="mixed" if way == "ddp" else PURE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wrapped = DistributedDataParallel(model) if ranks > 1 and way == "ddp" else model
    return wrapped, optimizer, together


def arguments() -> tuple[str, int, str]:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("ddp", "pure", "tp"), default="pure")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--folder", default="")
    found = parser.parse_args()
    return found.way, found.updates, found.folder


def main(way: str = "", updates: int = 60, folder: str = "") -> dict[str, Any]:
    """Train; return the loss of the last updates over all ranks, and what this rank stores."""
    if not way:
        way, updates, folder = arguments()
    torchrun, device = "RANK" in os.environ, device_here()
    if torchrun:
        dist.init_process_group(dist.get_default_backend_for_device(device))  # nccl on CUDA, gloo on a CPU
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if torchrun else (1, 0)
    model, optimizer, together = build(way, ranks, device)
    step = hs.TrainStep(model, optimizer, loss_fn, clip_norm=1.0)
    if folder:
        hs.load(step, folder, missing_ok=True)
    first, losses = step.record.done, []
    for number in range(first, updates):
        losses.append(step(batch(number, rank // together, ranks // together).to(device)).loss)
    if folder:
        hs.save(step, folder)
    last = torch.stack(losses[-10:]).mean()
    if torchrun:
        dist.all_reduce(last)
    stored = [*model.parameters()] + [s for state in optimizer.state.values() for s in state.values()]
    size = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in stored)
    if rank == 0:
        print(f"{way}, {ranks} ranks: from update {first} to {updates}, loss {float(last) / ranks:.4f}")
        print(f"parameters and optimizer state of this rank: {size:,} bytes")  # and 2 a parameter of remainders
    if torchrun:
        dist.destroy_process_group()
    return {"loss": float(last) / ranks, "bytes": size, "first": first}


if __name__ == "__main__":
    main()
