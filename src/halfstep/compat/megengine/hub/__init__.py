"""megengine.hub: models by name. They are built here, with fresh weights; nothing is downloaded."""

from halfstep.compat.megengine.hub.hub import list, load
from halfstep.compat.megengine.hub.resnet import resnet18

__all__ = ["list", "load", "resnet18"]
