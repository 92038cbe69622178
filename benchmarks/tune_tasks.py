"""Tasks for `benchmarks.tune`: small models in which some or all presets lose or fail, and others that they suit.

Each is learned in some tens of steps of milliseconds, from data that a seed makes, with a margin around its metric.

- `distances`: attention over points in space; its scores are squared distances out of one product, which overflows in
  fp16 and in bf16 is wrong by more than neighbours lie apart.
- `stream`: residual blocks whose stream has a large offset: a low stream cannot hold what the blocks add.
- `weights`: 2 million parameters, 8 rows: a step is mostly its tail. Its inputs are readings around a level that is
  taken off first; low inputs have lost what is left.
- `norms`: narrow layers between norms and activations; casts cost more than low products save.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.tasks import Task, load_task
from halfstep.tasks.task import STEPS_OF_A_SEED

__all__ = ["TASKS"]

BUNDLED_STEPS = 30  # of halfstep's own tasks: less than half of their excerpt
HELD_OUT = 999_999  # the step whose batch, with seed 0, the metric is computed on


def generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + step)


# ------------------------------------------------------------------ distances

POINTS, CLASSES, SIDE = 64, 16, 256.0
WRONG = 0.1  # of the classes: a loss that no model can undercut


class Nearest(nn.Module):
    """Attention of each place to points by distance, then a residual MLP (B, POINTS, width)."""

    def __init__(self, width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.values = nn.Embedding(CLASSES, width)
        self.sharpness = nn.Parameter(torch.tensor(0.05))
        self.blocks = nn.ModuleList(MLP(width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, places: Tensor, points: Tensor, classes: Tensor) -> Tensor:
        squares = places.square().sum(-1, keepdim=True) + points.square().sum(-1).unsqueeze(-2)
        distances = squares - 2.0 * (places @ points.transpose(-2, -1))
        x = torch.softmax(-self.sharpness * distances, -1) @ self.values(classes)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # module calls are Any


class MLP(nn.Module):
    """A pre-norm MLP beside the stream."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def near_points(seed: int, step: int, count: int = 4) -> tuple[Tensor, ...]:
    """Return places, each within a unit or so of a point, the points, their classes, and the class of the nearest."""
    source = generator(seed, step)
    points = SIDE * torch.rand(count, POINTS, 3, generator=source)
    classes = torch.randint(0, CLASSES, (count, POINTS), generator=source)
    order = torch.stack([torch.randperm(POINTS, generator=source) for _ in range(count)])
    places = points.gather(1, order[..., None].expand(-1, -1, 3)) + torch.randn(count, POINTS, 3, generator=source)
    answers = classes.gather(1, order)
    wrong = torch.rand(answers.shape, generator=source) < WRONG
    return (
        places,
        points,
        classes,
        torch.where(wrong, torch.randint(0, CLASSES, answers.shape, generator=source), answers),
    )


# ------------------------------------------------------------------ stream

OFFSET = 512.0


class Stream(nn.Module):
    """Residual MLPs on a stream that starts with a large offset in every channel."""

    def __init__(self, width: int = 160, depth: int = 2, inputs: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.offset = nn.Parameter(torch.full((width,), OFFSET))
        self.blocks = nn.ModuleList(MLP(width, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def clusters(seed: int, step: int, count: int = 256, inputs: int = 64) -> tuple[Tensor, Tensor]:
    """Return points around centres, with the centre's number: (count, inputs), (count,)."""
    source = generator(seed, step)
    centres = torch.randn(10, inputs, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, 10, (count,), generator=source)
    return 0.5 * centres[labels] + torch.randn(count, inputs, generator=source), labels


# ------------------------------------------------------------------ weights

READINGS, LEVEL = 64, 1000.0


class Readings(nn.Module):
    """2.4M parameters, most of them in one layer, behind readings whose level is taken off first."""

    def __init__(self) -> None:
        super().__init__()
        widths = (READINGS, 1024, 1536, 512)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x - LEVEL
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def readings(seed: int, step: int, count: int = 8) -> tuple[Tensor, Tensor]:
    """Return readings around a level and their class: (count, READINGS), (count,)."""
    deviations, labels = clusters(seed, step, count)
    return LEVEL + deviations, labels


# ------------------------------------------------------------------ norms


class Narrow(nn.Module):
    """Blocks of two narrow layers with three norms and gates: nearly all of the time is elementwise."""

    def __init__(self, width: int = 48, depth: int = 6, inputs: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Gated(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Two layers, three norms, a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.up = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = F.silu(self.norm2(self.gate(y))) * torch.tanh(self.up(y))
        return x + self.norm3(y)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ tasks


def classify(model: nn.Module, *batch: Tensor) -> Tensor:
    """Return the mean cross-entropy; the last tensor has the classes."""
    return F.cross_entropy(model(*batch[:-1]).flatten(0, -2), batch[-1].flatten())


def held_out(loss_fn: Callable[..., Tensor], batches: Callable[..., Any]) -> Callable[[nn.Module], float]:
    """Return the loss on a batch that is not trained on, of 512 rows, or of 16 with many places each."""

    def metric(model: nn.Module) -> float:
        return float(loss_fn(model, *batches(0, HELD_OUT, 16 if batches in {near_points, repeats} else 512)))

    return metric


def made(
    name: str, about: str, model: Callable[[], nn.Module], batches: Callable[..., Any],
    loss_fn: Callable[..., Tensor] = classify, *, rate: float = 1e-3, steps: int = 30, margin: float = 0.05,
) -> Task:  # fmt: skip
    """Return a task with AdamW and a margin that is a fraction of fp32's loss on held-out data."""
    return Task(
        name=name, about=about, model=model, batches=batches, loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=rate), metric=held_out(loss_fn, batches),
        metric_name="loss on held-out data", margin=margin, relative_margin=True, steps=steps, excerpt_steps=steps,
    )  # fmt: skip


def llama() -> nn.Module:
    """Return a Llama of transformers, tiny, with new weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def repeats(seed: int, step: int, count: int = 4, length: int = 48) -> tuple[Tensor]:
    """Return tokens that come again after half a sequence, (count, length)."""
    half = torch.randint(0, 256, (count, length // 2), generator=generator(seed, step))
    cycle = half % 16  # few of them: learned in some tens of steps
    return (torch.cat((cycle, cycle), 1),)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def shortened(name: str) -> Callable[[], Task]:
    return lambda: replace(load_task(name), excerpt_steps=BUNDLED_STEPS)


TASKS: dict[str, Callable[[], Task]] = {
    "distances": lambda: made("distances", "attention by distance, 4 x 64 places", Nearest, near_points),
    "stream": lambda: made("stream", "residual stream with an offset of 512", Stream, clusters),
    "weights": lambda: made("weights", "2.4M parameters, 8 rows, readings around 1000", Readings, readings),
    "norms": lambda: made("norms", "19 norms between narrow layers", Narrow, clusters, rate=3e-3),
    "llama": lambda: made("llama", "transformers' Llama, 2 layers of 128", llama, repeats, next_token),
    **{name: shortened(name) for name in ("lenet5", "resnet", "gpt")},
}
