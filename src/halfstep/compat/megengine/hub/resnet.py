"""ResNet-18 (He et al. 2015, arXiv:1512.03385), table 1: basic blocks, 2 in each of four stages."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["BasicBlock", "ResNet", "resnet18"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which projects where the shape changes.

    Args:
        inputs: channels in.
        outputs: channels out.
        stride: of the first convolution and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, outputs, height / stride, width / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A residual network of basic blocks.

    Args:
        blocks: blocks in each stage.
        num_classes: outputs.
        in_channels: channels of the images.
        width: channels of the first stage; each next has twice as many.
    """

    def __init__(self, blocks: tuple[int, ...], num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for block in range(count):
                stages.append(BasicBlock(channels, outputs, 2 if stage and not block else 1))
                channels = outputs
        self.layers = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, num_classes), for images (batch, in_channels, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.pool(self.layers(x)).flatten(1))  # type: ignore[no-any-return]


def resnet18(num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> ResNet:
    """Return a ResNet-18 with fresh weights: 11,689,512 parameters at the default width."""
    return ResNet((2, 2, 2, 2), num_classes, in_channels, width)
