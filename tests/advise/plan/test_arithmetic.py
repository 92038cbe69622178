"""What persists of Llama 7B and 70B under every preset is what a reader computes by hand, and so is the least peak."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

STORED = {"O0": 4 + 8, "torch": 4 + 8, "O1": 4 + 8, "mixed": 4 + 8, "O2": 2 + 2 + 8, "pure": 2 + 2 + 8, "lean": 2 + 4}
"""Preset in bf16 -> bytes of a parameter between steps: parameter, what is behind a low one, two states of AdamW."""

GRADIENTS = {"O0": 4, "torch": 4, "O1": 4, "mixed": 4, "O2": 2, "pure": 2, "lean": 2}
"""Preset in bf16 -> bytes of a parameter's gradient."""

SHAPES = {"7B": (4096, 11_008, 4096, 32, 32_000), "70B": (8192, 28_672, 1024, 80, 128_256)}
"""Width, width of the feed-forward part, width of keys and values, layers, vocabulary."""

COUNTS = {"7B": 6_738_415_616, "70B": 70_553_706_496}
"""Their parameters, as their model cards' configurations give them."""


class Layer(nn.Module):
    """The parameters of a layer; what it computes does not matter here."""

    def __init__(self, width: int, wide: int, keys: int) -> None:
        super().__init__()
        self.norm, self.q, self.o = (
            nn.RMSNorm(width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, False),
        )
        self.k, self.v = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.norm2, self.gate, self.up = (
            nn.RMSNorm(width),
            nn.Linear(width, wide, bias=False),
            nn.Linear(width, wide, False),
        )
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.norm2(self.o(self.q(x)) + (self.k(x).mean() + self.v(x).mean()))
        found: Tensor = self.down(self.gate(x) * self.up(x))
        return found


class Llama(nn.Module):
    def __init__(self, width: int, wide: int, keys: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width, wide, keys) for _ in range(layers)), nn.RMSNorm(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(words)))
        return scores


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    loss: Tensor = model(words).float().mean()
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@pytest.mark.parametrize(
    ("size", "preset"),
    [
        (size, preset) if (size, preset) == ("7B", "lean") else pytest.param(size, preset, marks=pytest.mark.hours)
        for size in SHAPES
        for preset in STORED
    ],
)
def test_bytes_of_a_large_model_are_those_of_hand_arithmetic(size: str, preset: str) -> None:
    make: Callable[[], nn.Module] = partial(Llama, *SHAPES[size])
    policy = hs.Policy.of(preset) if preset == "O0" else hs.Policy.of(preset, dtype="bf16")
    plan = hs.plan(make, (torch.zeros(1, 8, dtype=torch.int64),), loss_fn, adamw, policy=policy)
    count = COUNTS[size]
    assert plan.parameters == count
    assert plan.persistent_bytes == pytest.approx(STORED[preset] * count, rel=1e-4)
    # every gradient is there when the update begins; the batch is too small for anything else to matter
    least = (STORED[preset] + GRADIENTS[preset]) * count
    assert least * (1 - 1e-4) < max(plan.peak_bytes, plan.first_peak) < 1.15 * least
