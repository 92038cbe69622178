"""MegEngine's device names: "xpux" is the accelerator if there is one, else the CPU; "cpu0", "gpu0" name one."""

from __future__ import annotations

import re

import torch

from halfstep.errors import RegionError

__all__ = ["device_of", "get_default_device", "set_default_device"]

_default = ["xpux"]
"""The name new tensors and models go by; a list because it is set for the process."""


def get_default_device() -> str:
    """Return the name of the device that new tensors and models are made on."""
    return _default[0]


def set_default_device(device: str = "xpux") -> None:
    """Make new tensors and models on `device`.

    Raises:
        RegionError: not a device's name.
    """
    device_of(device)
    _default[0] = device


def device_of(name: str | torch.device | None = None) -> torch.device:
    """Return torch's device for one of MegEngine's (or torch's) names; None: the default.

    Raises:
        RegionError: not a device's name.
    """
    name = _default[0] if name is None else name
    if isinstance(name, torch.device):
        return name
    found = re.fullmatch(r"(xpu|gpu|cuda|cpu)(x|:?\d+)?(?::\d+)?", name) if isinstance(name, str) else None
    if found is None:
        raise RegionError(f"device={name!r}; expected 'xpux' (the accelerator or the CPU), 'gpu0', 'cpu0' or the like")
    kind, number = found.group(1), (found.group(2) or "").strip(":x")
    if kind == "cpu" or (kind == "xpu" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", int(number)) if number else torch.device("cuda")
