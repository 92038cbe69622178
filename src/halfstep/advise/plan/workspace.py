"""Workspace: memory that kernels of the CPU take while they run and give back before they return."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["workspace"]


def workspace(name: str, args: Any, kwargs: Any, result: Any) -> tuple[int, torch.dtype] | None:
    """Return bytes and format of an operator's passing memory, None if it takes none worth naming."""
    return None
