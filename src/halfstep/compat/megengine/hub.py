"""megengine.hub: models by name. They are built here, with fresh weights; nothing is downloaded.

ResNet-18 (He et al. 2015, arXiv:1512.03385) is that of table 1: basic blocks, 2 in each of four stages.
"""

import builtins
import inspect
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from halfstep.compat.megengine.tensor import device_of
from halfstep.errors import StepError, did_you_mean

__all__ = ["list", "load", "resnet18"]

REPOSITORY = "megengine/models"
SOURCES = ("git_host", "use_cache", "commit", "protocol")
"""Arguments about where models are downloaded from."""


class _Block(nn.Module):
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
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))  # type: ignore[no-any-return]


def resnet18(num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> nn.Module:
    """Return a ResNet-18 with fresh weights: 11,689,512 parameters at the default width.

    Args:
        num_classes: outputs: it returns logits, (batch, num_classes).
        in_channels: channels of the images, (batch, in_channels, height, width).
        width: channels of the first stage; each next has twice as many.
    """
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(in_channels, width, 7, 2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, 2, padding=1),
    }
    blocks, channels = [_Block(width, width, 1), _Block(width, width, 1)], width
    for _ in range(3):
        blocks += [_Block(channels, 2 * channels, 2), _Block(2 * channels, 2 * channels, 1)]
        channels *= 2
    layers["layers"] = nn.Sequential(*blocks)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels, num_classes)}
    network = nn.Sequential(OrderedDict(layers))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def load(repo_info: str, entry: str, *args: Any, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return a new model on the default device.

    Args:
        repo_info: "megengine/models", with or without ":branch".
        entry: "resnet18".
        *args: for the model.
        pretrained: must be False: there are no weights here.
        **kwargs: for the model; ``git_host``, ``use_cache``, ``commit`` and ``protocol`` have no meaning here.
    """
    _check(repo_info)
    if entry != "resnet18":
        near = did_you_mean(entry, ["resnet18"])
        raise StepError(f"hub.load: no model {entry!r} here; there is resnet18{near}. Any torch.nn.Module serves")
    if pretrained:
        remedy = "nothing is downloaded; use pretrained=False and load_state_dict"
        raise StepError(f"hub.load({entry!r}, pretrained=True): {remedy}")
    options = {k: v for k, v in kwargs.items() if k not in SOURCES}
    try:
        inspect.signature(resnet18).bind(*args, **options)
    except TypeError as error:
        raise StepError(f"hub.load({entry!r}): {error}; it takes {inspect.signature(resnet18)}") from None
    return resnet18(*args, **options).to(device_of())


def list(repo_info: str, **kwargs: Any) -> builtins.list[str]:
    """Return the models there are.

    Args:
        repo_info: "megengine/models", with or without ":branch".
        **kwargs: those of `SOURCES`, which have no meaning here.
    """
    unknown = [name for name in kwargs if name not in SOURCES]
    if unknown:
        raise StepError(f"hub.list takes no argument {', '.join(unknown)}")
    _check(repo_info)
    return ["resnet18"]


def _check(repo_info: str) -> None:
    if not isinstance(repo_info, str) or repo_info.partition(":")[0].lower() != REPOSITORY:
        raise StepError(f"hub: repository {repo_info!r}; nothing is downloaded, and only {REPOSITORY!r} is built in")
