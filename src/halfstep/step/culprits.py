"""Whose gradient was not finite: kept as one vector of norms, worked out if somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Culprits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprits:
    """The norms of an update's gradients and whose they are; calling it gives names and reads the device.

    Attributes:
        norms: (number of parameters,) fp32, on the device.
        parameters: in the order of `norms`.
        names: of the model's parameters, by id.
    """

    norms: Tensor
    parameters: Sequence[Tensor]
    names: Mapping[int, str]

    def __call__(self) -> tuple[str, ...]:
        """Return the names of the parameters whose norm is not finite."""
        finite = torch.isfinite(self.norms).tolist()
        return tuple(self.names.get(id(p), "?") for p, ok in zip(self.parameters, finite, strict=True) if not ok)
