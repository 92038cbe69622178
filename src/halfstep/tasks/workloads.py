"""Workloads: three models whose step is bound by different things, so that each shows where a low format pays.

`products` is bound by matrix products, `tail` by what is done to each weight after the backward pass (casts, clipping,
the optimizer), `tiny` by the interpreter. Data is random, a few batches that come again and again: speed and bytes
depend on shapes alone, and no metric is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from halfstep.tasks.gpt import GPT
from halfstep.tasks.task import Task

BATCHES = 4  # that come again and again
CLASSES, VOCABULARY = 10, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model to time, and what its step is bound by."""

    task: Task
    bound_by: str  # what takes most of a step, in a few words
    lesson: str  # what that means for low formats, in one sentence


def workloads(device: str, *, units: bool) -> tuple[Workload, ...]:
    """Return the three models in sizes for a device; on an accelerator the first two are larger.

    Without units for bf16, torch's own bf16 kernels can take a hundred times fp32's time, so that the model bound by
    products gets a batch of a sixteenth.
    """
    large = device != "cpu"
    width, layers, length, rows = (1024, 8, 512, 8) if large else (384, 2, 128, 8 if units else 1)
    hidden, positions = (8192 if large else 2048), length if units else length // 2
    gpt_heads = 6 if width == 384 else 16

    def gpt() -> nn.Module:
        return GPT(vocabulary=VOCABULARY, width=width, layers=layers, heads=gpt_heads, length=positions)

    about = f"GPT, {layers} layers of {width}, batch {rows} x {positions}"
    deep = f"MLP, 1024-{hidden}-{hidden}-{hidden}-{CLASSES}, batch 32"
    return (
        Workload(
            task=_task("products", gpt, (rows, positions), about, 3e-4, text=True),
            bound_by="matrix products",
            lesson="a low format pays by the speed of its units for products",
        ),
        Workload(
            task=_task("tail", lambda: _mlp(1024, hidden, hidden, hidden, CLASSES), (32, 1024), deep, 1e-4),
            bound_by="its tail (casts, clipping, optimizer)",
            lesson="low weights pay by the bytes that casts and optimizer do not move",
        ),
        Workload(
            task=_task("tiny", lambda: _mlp(32, 32, 32, CLASSES), (16, 32), "MLP, 32-32-32-10, batch 16", 1e-3),
            bound_by="the interpreter",
            lesson="its tensors are too small for a format to matter, and each cast adds to the step",
        ),
    )


def _task(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, int], about: str, rate: float, *, text: bool = False
) -> Task:
    """Return a task with inputs of `shape`: numbers with a class a row, or words with a word each."""

    def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(step % BATCHES)
        if text:
            return tuple(torch.randint(0, VOCABULARY, (2, *shape), generator=source))
        return torch.randn(shape, generator=source), torch.randint(0, CLASSES, shape[:1], generator=source)

    return Task(
        name=name, model=model, batches=batches, about=about, clip_norm=1.0,
        loss_fn=lambda model, x, y: F.cross_entropy(model(x).flatten(0, -2), y.flatten()),
        optimizer=lambda net: AdamW(net.parameters(), lr=rate),
    )  # fmt: skip


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
