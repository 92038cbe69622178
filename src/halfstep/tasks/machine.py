"""The machine that numbers are measured on, and what of torch a measurement leaves as it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import TaskError, did_you_mean
from halfstep.torch_private.devices import has_mkldnn

UNITS = ("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "fphp", "asimdhp")
"""Instruction sets in /proc/cpuinfo (x86 flags, ARM features) that decide how fast low formats are."""


def machine() -> dict[str, Any]:
    """Return what decides the numbers: processor, cores, accelerator, versions and torch's switches; plain values."""
    model, flags = _processor()
    kind = _type_here()
    named = getattr(torch.get_device_module(kind), "get_device_name", None) if kind else None
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "instruction_sets": [name for name in UNITS if name in flags],
        "accelerator": kind if named is None else str(named()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": has_mkldnn,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def threads_of_torch(wanted: int) -> Iterator[None]:
    """Set the number of torch's threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def generators_kept() -> AbstractContextManager[None]:
    """Return a block after which torch's generators go on as before it: the CPU's and the accelerator's (not mps)."""
    kind = _type_here()
    if kind in {"", "mps"}:  # torch.mps.get_rng_state has no device, which fork_rng gives it
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(device_type=kind)


def _type_here() -> str:
    """Return the type of this machine's accelerator, "" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def device_types() -> tuple[str, ...]:
    """Return the device types that this machine has, the default first."""
    return tuple(filter(None, (_type_here(), "cpu")))


def device_type(wanted: str) -> str:
    """Return `wanted` if this machine has it; for "" the accelerator, if there is one, else "cpu"."""
    there = device_types()
    if wanted and wanted not in there:
        raise TaskError(f"device {wanted!r} is not here{did_you_mean(wanted, there)}; there is {' and '.join(there)}")
    return wanted or there[0]


def _processor() -> tuple[str, frozenset[str]]:
    """Return the processor's name and its flags; on systems without /proc/cpuinfo the name alone."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or fields.get("CPU part") or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("Features") or "").split())
