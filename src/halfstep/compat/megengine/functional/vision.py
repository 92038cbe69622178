"""megengine.functional.vision: resizing."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import StepError

__all__ = ["interpolate"]

SMOOTH = ("bilinear", "linear", "trilinear")
MODES = (*SMOOTH, "bicubic", "nearest")


def interpolate(
    inp: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "bilinear", align_corners: bool | None = None
) -> Tensor:
    """Resize sequences ("linear"), images or volumes ("trilinear").

    Args:
        inp: (batch, channels, ...).
        size: of the result: a number for all axes, or one for each.
        scale_factor: instead of `size`.
        mode: one of `MODES`.
        align_corners: whether the outermost elements stay where they are; for linear modes.
    """
    name = str(mode).lower()
    if name not in MODES:
        raise StepError(f"interpolate(mode={mode!r}): expected one of {', '.join(map(repr, MODES))}")
    if (size is None) == (scale_factor is None):
        given = "neither" if size is None else "both"
        raise StepError(f"interpolate takes size or scale_factor, and was given {given}")
    if name not in SMOOTH and align_corners is not None:
        raise StepError(f"interpolate(align_corners={align_corners!r}): mode {name!r} has no such choice; leave it out")
    return F.interpolate(inp, size, scale_factor, name, bool(align_corners) if name in SMOOTH else None)
