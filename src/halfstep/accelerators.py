"""Accelerators: what is asked of a device through torch's interface for all of them, so that no type is named.

torch has a module for each type (``torch.cuda``, ``torch.xpu``, ``torch.npu`` of torch_npu, ``torch.mps``), and
backends outside of torch follow their conventions. What a module lacks is answered as if the device could not do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_private.devices import get_privateuse1_backend_name, mps_generator

TYPES = ("cuda", "xpu", "mps", "mtia", "maia", "hpu", "xla", "ipu")
"""Types of torch's own that have torch.autocast."""


def types() -> tuple[str, ...]:
    """Return the types with torch.autocast but the CPU: torch's own, and the one from outside if a backend named it."""
    outside = get_privateuse1_backend_name()
    return TYPES if outside == "privateuseone" else (*TYPES, outside)


def type_here() -> str:
    """Return the type of this machine's accelerator, "" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def supports_bf16(device_type: str) -> bool | None:
    """Return whether the module of a device that is here counts bf16 among its formats; None: it does not say."""
    module: Any = getattr(torch, device_type, None)
    asked = getattr(module, "is_bf16_supported", None)
    if asked is None or not module.is_available():
        return None
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # torch_npu's takes no arguments
        return bool(asked())


def default_generators() -> tuple[torch.Generator, ...]:
    """Return the default generator of each device of the accelerator; () as long as this process has not used it."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return ()
    module = torch.get_device_module(device)
    if device.type == "mps":
        return (mps_generator(module),)
    used = getattr(module, "is_initialized", bool)()
    return tuple(getattr(module, "default_generators", ())) if used else ()


def initialise(device_type: str) -> None:
    """Have torch start a device type, whose generators exist from then on."""
    getattr(torch.get_device_module(device_type), "init", bool)()


def capturing(device_type: str) -> bool:
    """Return whether what a device is given is recorded in a graph and not done; halfstep records on CUDA alone."""
    return device_type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def copies_behind_events(device_type: str) -> bool:
    """Return whether a device copies to pinned memory while the host goes on, and has events that say when it is done.

    Apple's is left out: its memory is the host's, and copies from it were never tried.
    """
    if device_type in {"", "cpu", "meta", "mps"}:
        return False
    if device_type == "cuda":  # also for fake tensors, which have no device behind them
        return True
    try:
        module: Any = torch.get_device_module(device_type)
    except RuntimeError:
        return False
    return hasattr(module, "Event") and hasattr(module, "current_stream")


class Landing:
    """Tensors of one device on their way to pinned memory of the host, for which nothing waits.

    An event says when they are there. Sending again takes the place of the last ones.
    """

    devices: frozenset[str] = frozenset()  # types that send something; chosen for this machine unless a subclass does

    def __init__(self) -> None:
        if not self.devices:
            self.devices = frozenset(kind for kind in ("cuda", type_here()) if copies_behind_events(kind))
        self.flag: Tensor | None = None  # the first tensor, on its device; None: nothing was sent
        self.waits = 0  # how often the host has waited
        self._pinned: list[Tensor] = []
        self._event: Any = None

    def send(self, found: Sequence[Tensor]) -> None:
        """Have tensors copied to the host by the copy engine, behind the work that is queued; waits for nothing.

        One on another device than the first would need an event of its own, and is ignored. While a graph is captured
        nothing is sent.
        """
        device = found[0].device
        if capturing(device.type):
            return
        module = torch.get_device_module(device)
        if self.flag is None or self.flag.device != device:  # an event belongs to the device that recorded it first
            self._pinned, self._event = [], module.Event()
        here = [t for t in found if type(t) is Tensor and t.device == device]
        if [(t.dtype, t.shape) for t in here] != [(t.dtype, t.shape) for t in self._pinned]:
            self._pinned = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in here]
        for place, value in zip(self._pinned, here, strict=True):  # one copy each: joining them is a kernel
            place.copy_(value, non_blocking=True)
        self._event.record(module.current_stream(device))
        self.flag = found[0]

    def take(self, found: Sequence[Tensor]) -> Landing:
        """Send tensors, or hold them as they are where their device sends nothing; return itself."""
        if found[0].device.type in self.devices:
            self.send(found)
        else:
            self._pinned = [*found]
        return self

    def there(self) -> bool:
        """Return whether what was sent has landed."""
        return self._event is None or self._event.query()

    def landed(self) -> list[Tensor]:
        """Return what was sent, on the host; waits until it is there."""
        if not self.there():
            self.waits += 1
            self._event.synchronize()
        return self._pinned


def empty_cache(device_type: str) -> None:
    """Give memory that torch keeps for a device type, and does not use, back to the system."""
    getattr(torch.get_device_module(device_type), "empty_cache", bool)()
