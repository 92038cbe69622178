"""Units: which low formats a device computes in natively."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from halfstep.errors import PolicyError, did_you_mean

__all__ = ["Units", "check_device_type", "default_device_types", "units"]

BF16_FROM = (8, 0)
"""CUDA compute capability of the first tensor cores for bf16 (Ampere)."""

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "xla", "ipu")
"""Device types to suggest in errors; whether torch.autocast exists for a device is asked of torch."""


@dataclass(frozen=True, slots=True)
class Units:
    """Low formats that have arithmetic units on a device.

    Attributes:
        device: the device type asked about.
        bf16: whether products of bf16 numbers have units.
        fp16: whether products of fp16 numbers have units.
        reason: how this is known, in words for a note or an error.
    """

    device: str
    bf16: bool
    fp16: bool
    reason: str


@cache
def units(device_type: str) -> Units:
    """Return which low formats have arithmetic units on `device_type` here.

    On the CPU the instruction set is asked: bf16 needs avx512_bf16, amx_bf16 or ARM's bf16 extension, fp16 needs
    avx512_fp16, amx_fp16 or ARM's fp16 arithmetic. On CUDA bf16 needs compute capability 8.0 on every visible GPU and
    fp16 is always there. Elsewhere torch's default format for autocast is taken to be the one with units.

    Raises:
        PolicyError: torch.autocast does not exist for this device type.
    """
    check_device_type(device_type)
    if device_type == "cpu":
        return cpu_units(_cpu_capabilities(), platform.machine())
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return Units("cuda", bf16=False, fp16=True, reason="no CUDA device here; fp16 units assumed")
        return cuda_units([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())])
    native = torch.get_autocast_dtype(device_type)
    name = str(native).removeprefix("torch.")
    reason = f"{name} is torch's own format for autocast on {device_type}"
    return Units(device_type, bf16=native is torch.bfloat16 or device_type == "xpu", fp16=True, reason=reason)


def check_device_type(device_type: str) -> None:
    """Raise PolicyError unless `device_type` is a bare device type that torch.autocast knows, such as "cuda"."""
    try:
        known = ":" not in device_type and torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # not even a device type
        known = False
    if not known:
        hint = did_you_mean(device_type.partition(":")[0], DEVICE_TYPES) if isinstance(device_type, str) else ""
        raise PolicyError(
            f"device type {device_type!r} has no torch.autocast; expected one of {', '.join(DEVICE_TYPES)} "
            f"(without an index){hint}"
        )


def default_device_types() -> tuple[str, ...]:
    """Return the device types a region enters unless told: the accelerator, if there is one, then the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return (accelerator.type, "cpu")


def _cpu_capabilities() -> Mapping[str, Any]:
    """Return torch's description of this CPU's instruction sets, by private queries where there is no public one."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        found: Mapping[str, Any] = ask()
        return found
    old = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_fp16": "_is_amx_fp16_supported",
    }
    return {name: bool(getattr(torch.cpu, query, bool)()) for name, query in old.items()}


def cpu_units(capabilities: Mapping[str, Any], machine: str) -> Units:
    """Return the units of a CPU whose instruction sets are `capabilities` (name -> present) on a `machine` type."""
    present = {name for name, there in capabilities.items() if there is True}
    if machine.lower() in {"aarch64", "arm64"}:
        bf16 = sorted(present & {"bf16", "sve_bf16"})
        # nothing known (an older torch): 64-bit ARM cores that train models have ARMv8.2's fp16 arithmetic
        fp16 = sorted(present & {"fp16_arith"}) or ([] if present else ["ARMv8.2"])
    else:
        bf16 = sorted(present & {"avx512_bf16", "amx_bf16"})
        fp16 = sorted(present & {"avx512_fp16", "amx_fp16"})
    bf16_words = f"bf16 units ({', '.join(bf16)})" if bf16 else "no bf16 units"
    fp16_words = f"fp16 units ({', '.join(fp16)})" if fp16 else "no fp16 units"
    return Units("cpu", bf16=bool(bf16), fp16=bool(fp16), reason=f"this CPU has {bf16_words} and {fp16_words}")


def cuda_units(capabilities: list[tuple[int, int]]) -> Units:
    """Return the units that all of some GPUs have, given their compute capabilities (major, minor)."""
    oldest = min(capabilities)
    words = f"compute capability {oldest[0]}.{oldest[1]}"
    if oldest >= BF16_FROM:
        return Units("cuda", bf16=True, fp16=True, reason=f"{words} has bf16 and fp16 units")
    return Units("cuda", bf16=False, fp16=True, reason=f"{words} has fp16 units and none for bf16 (they need 8.0)")
