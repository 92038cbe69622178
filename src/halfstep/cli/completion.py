"""Shell completion: the values that an option or argument of a command may have, beginning with what was typed.

`halfstep --install-completion` sets it up in bash, zsh, fish and PowerShell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import halfstep as hs
from halfstep.tasks import task_names

__all__ = ["among", "devices", "gpus", "operators", "policies", "policy", "task"]

FORMATS = ("bf16", "fp16")

Completion = Callable[[str], list[str]]


def among(values: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion that offers some of `values`."""

    def offered(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return offered


def policy(incomplete: str) -> list[str]:
    """Return presets, policy files (.toml) and folders; behind a colon the formats."""
    name, colon, _ = incomplete.partition(":")
    if colon and name in hs.policy.PRESETS:
        return among(lambda: (f"{name}:{each}" for each in FORMATS))(incomplete)
    return among(lambda: hs.policy.PRESETS)(incomplete) + _paths(incomplete, ".toml")


def policies(incomplete: str) -> list[str]:
    """Return the same for the last of several policies with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{each}" for each in policy(last)]


def task(incomplete: str) -> list[str]:
    """Return the tasks that halfstep brings, Python files and folders."""
    return among(task_names)(incomplete) + _paths(incomplete, ".py")


def _gpus() -> Iterable[str]:
    from halfstep.advise.plan.gpus import gpu_names

    return gpu_names()


def _devices() -> Iterable[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([accelerator.type] if accelerator else [])]


devices, gpus, operators = among(_devices), among(_gpus), among(lambda: hs.policy.operator_names("*"))


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files with a suffix, and folders with a slash, that begin with what was typed."""
    folder, slash, _ = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return []
    shown = [e for e in entries if not e.name.startswith(".") and (e.is_dir() or e.suffix == suffix)]
    return among(lambda: (f"{folder}{slash}{e.name}{'/' if e.is_dir() else ''}" for e in shown))(incomplete)
