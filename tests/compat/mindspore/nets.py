"""Small networks, and eyes for the formats in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import halfstep.compat.mindspore as ms

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

untyped: Any = ms
"""For calls that the annotations forbid."""


class LeNet5(ms.nn.Cell):
    """The document's network; `fp32_first` flags fc3 where the document does."""

    def __init__(self, *, fp32_first: bool = False) -> None:
        super().__init__()
        self.conv1 = ms.nn.Conv2d(1, 6, 5, pad_mode="valid")
        self.conv2 = ms.nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = ms.nn.Dense(16 * 5 * 5, 120)
        self.fc2 = ms.nn.Dense(120, 84)
        self.fc3 = ms.nn.Dense(84, 10)
        if fp32_first:
            self.fc3.add_flags_recursive(fp32=True)
        self.relu = ms.nn.ReLU()
        self.max_pool2d = ms.nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = ms.ops.Flatten()

    def construct(self, x: Tensor) -> Tensor:
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)  # type: ignore[no-any-return]


class Normed(ms.nn.Cell):
    """A convolution, a batch norm, a layer norm and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ms.nn.Conv2d(1, 4, 3)
        self.bn = ms.nn.BatchNorm2d(4)
        self.flatten = ms.nn.Flatten()
        self.ln = ms.nn.LayerNorm(64)
        self.fc = ms.nn.Dense(64, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.ln(self.flatten(self.bn(self.conv(x)))))  # type: ignore[no-any-return]


class TorchNet(nn.Module):
    """The same in torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.ln, self.fc = nn.LayerNorm(64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.ln(torch.flatten(self.bn(self.conv(x)), 1)))  # type: ignore[no-any-return]


def picture(net: nn.Module) -> Tensor:
    """Return an input for one of the networks above."""
    return torch.rand(2, 1, 32, 32) if isinstance(net, LeNet5) else torch.rand(2, 1, 4, 4)


@contextmanager
def watched(net: nn.Module) -> Iterator[dict[str, tuple[torch.dtype, torch.dtype]]]:
    """Fill a dict with name -> (format of the first input as it arrives, format of the output) of every part."""
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
                seen[name] = (args[0].dtype, output.dtype)

        return hook

    handles = [m.register_forward_hook(look(name)) for name, m in net.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def formats(net: nn.Module, *inputs: Any) -> dict[str, torch.dtype]:
    """Return name -> format of the output of every part, in one call."""
    with watched(net) as seen:
        net(*(inputs or (picture(net),)))
    return {name: made for name, (_, made) in seen.items()}


def training(net: nn.Module, **kwargs: Any) -> tuple[ms.nn.WithLossCell, Any]:
    """Return the network with a squared loss, and an optimizer."""
    optimizer = ms.nn.Momentum([p for p in net.parameters() if p.requires_grad], 0.05, 0.9, **kwargs)
    return ms.nn.WithLossCell(net, ms.nn.MSELoss()), optimizer
