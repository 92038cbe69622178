"""Shell completion: the values that an option or argument of a command may have, beginning with what was typed.

`halfstep --install-completion` sets it up in bash, zsh, fish and PowerShell.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import halfstep as hs

__all__ = ["devices", "gpus", "operators", "policies", "policy", "severities", "task", "workings"]

FORMATS = ("bf16", "fp16")


def policy(incomplete: str) -> list[str]:
    """Return presets, policy files (.toml) and folders; behind a colon the formats."""
    name, colon, _ = incomplete.partition(":")
    if colon and name in hs.policy.PRESETS:
        return _beginning((f"{name}:{each}" for each in FORMATS), incomplete)
    return _beginning(hs.policy.PRESETS, incomplete) + _paths(incomplete, ".toml")


def policies(incomplete: str) -> list[str]:
    """Return the same for the last of several policies with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{each}" for each in policy(last)]


def task(incomplete: str) -> list[str]:
    """Return the tasks that halfstep brings, Python files and folders."""
    from halfstep.tasks import task_names

    return _beginning(task_names(), incomplete) + _paths(incomplete, ".py")


def operators(incomplete: str) -> list[str]:
    """Return the operators that a rule can name."""
    return _beginning(hs.policy.operator_names("*"), incomplete)


def gpus(incomplete: str) -> list[str]:
    """Return the GPUs that `halfstep plan` has numbers of."""
    from halfstep.advise.plan import gpu_names

    return _beginning(gpu_names(), incomplete)


def devices(incomplete: str) -> list[str]:
    """Return the device types of this machine."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _beginning(["cpu", *([accelerator.type] if accelerator else [])], incomplete)


def severities(incomplete: str) -> list[str]:
    """Return the severities of findings."""
    return _beginning(("note", "warning", "error"), incomplete)


def workings(incomplete: str) -> list[str]:
    """Return how devices may share the work of a planned step."""
    return _beginning(("ddp", "fsdp2"), incomplete)


def _beginning(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files with a suffix, and folders with a slash, that begin with what was typed."""
    folder, slash, _ = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return []
    names = (f"{folder}{slash}{e.name}{'/' if e.is_dir() else ''}" for e in entries if e.is_dir() or e.suffix == suffix)
    return [name for name in _beginning(names, incomplete) if not name.rpartition("/")[2].startswith(".")]
