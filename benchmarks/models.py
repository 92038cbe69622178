"""Networks of the benchmarks that no task of halfstep has: ResNet-18, a ConvNeXt, a wide MLP, GPT-2's smallest."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.tasks.gpt import GPT

CLASSES = 10


# ------------------------------------------------------------------ ResNet-18


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm beside a shortcut (He et al., "Deep Residual Learning", 2015)."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        projection = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if stride == 1 and width == out else projection

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for (B, 3, 32, 32) images: a 3x3 stem instead of 7x7 and pooling, four stages of two blocks.

    Args:
        width: channels of the first stage; the standard is 64 (11.2M parameters).
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, last = [], width
        for stage in range(4):
            out = width * 2**stage
            blocks += [BasicBlock(last, out, 1 if stage == 0 else 2), BasicBlock(out, out, 1)]
            last = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]  # module calls are Any


# ------------------------------------------------------------------ ConvNeXt


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over channels, a four times wider MLP, a learned factor (Liu et al., 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.factor = nn.Parameter(torch.full((width,), 0.1))  # 1e-6 in the paper, for 300 epochs: here some steps

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.factor * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    """A small ConvNeXt for (B, 3, 32, 32) images: 4x4 patches, two stages; most of its work is norms and activations.

    Args:
        widths: channels of the stages.
        depth: blocks of a stage.
    """

    def __init__(self, widths: tuple[int, ...] = (96, 192), depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 2, 2)
        stages: list[nn.Module] = []
        for i, width in enumerate(widths):
            if i:
                stages.append(nn.Conv2d(widths[i - 1], width, 2, 2))
            stages += [ConvNeXtBlock(width) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(self.norm(x.mean((2, 3))))  # type: ignore[no-any-return]


# ------------------------------------------------------------------ MLP


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers from width to width with ReLU between them: at a small batch the weights are the work."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------ GPT


def gpt(width: int, layers: int, heads: int, length: int, vocabulary: int = 4096) -> GPT:
    """Return the decoder of the task `gpt` in another size."""
    return GPT(vocabulary=vocabulary, width=width, layers=layers, heads=heads, length=length)


def gpt124m() -> GPT:
    """Return GPT-2's smallest: 12 layers of 768, its vocabulary rounded up to 50,304, one matrix for in and out."""
    model = gpt(768, 12, 12, 1024, 50304)
    model.head.weight = model.tokens.weight
    return model


def hidden(model: GPT, tokens: Tensor) -> Tensor:
    """Return what the head reads, (B * T, width): for losses that take head and targets together."""
    x = model.tokens(tokens) + model.places(torch.arange(tokens.shape[1], device=tokens.device))
    for block in model.blocks:
        x = block(x)
    return model.norm(x).flatten(0, 1)  # type: ignore[no-any-return]
