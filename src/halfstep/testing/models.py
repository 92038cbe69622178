"""The two models whose steps `halfstep.testing.count` counts: a small GPT and ResNet-18 for 32 x 32 pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "ResNet18"]


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = x + self.narrow(F.gelu(self.wide(self.before_mlp(x))))
        return after


class GPT(nn.Module):
    """A decoder of 5.29M parameters in 53 tensors: 4 layers of width 256, 4 heads, 4,096 words, 128 positions."""

    def __init__(self, *, words: int = 4096, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128):
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, length) of word numbers -> (batch, length, words), logits of the next word."""
        return self.head(self.hidden(words))  # type: ignore[no-any-return]

    def hidden(self, words: Tensor) -> Tensor:
        """(batch, length) of word numbers -> (batch, length, width), what the head takes."""
        x = self.word(words) + self.position(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(taken, given, 3, stride, 1, bias=False), nn.BatchNorm2d(given)
        self.second, self.norm2 = nn.Conv2d(given, given, 3, 1, 1, bias=False), nn.BatchNorm2d(given)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or taken != given:
            self.shortcut = nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, taken, height, width) -> (batch, given, height / stride, width / stride)."""
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a stem for small pictures: 11.2M parameters in 62 tensors, 100 classes."""

    def __init__(self, *, width: int = 64, classes: int = 100) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        blocks, taken = [], width
        for stage in range(4):
            for place in range(2):
                given = width * 2**stage
                blocks.append(Residual(taken, given, 2 if stage and not place else 1))
                taken = given
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(taken, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, classes), logits."""
        x = self.blocks(F.relu(self.norm(self.stem(pictures))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]
