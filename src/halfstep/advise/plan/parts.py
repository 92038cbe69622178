"""What a plan is made of: the parts of memory, rows of bytes, moments of a step, and the error of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import halfstep as hs

__all__ = ["PARTS", "PHASES", "Moment", "PlanError", "Row"]

PARTS = (
    "parameters", "precise values", "buffers", "optimizer state", "low copies", "gathered parameters", "gradients",
    "saved for backward", "communication", "batch", "temporaries",
)  # fmt: skip
"""What memory is for.

parameters: as the model holds them, low ones under `params="low"`; precise values: what is kept behind low parameters;
buffers: of the model, with the copies that a step makes to restore them; low copies: casts of parameters;
gathered parameters: whole ones, while a sharded model computes with them; communication: buffers of collectives;
gradients: of parameters; saved for backward: made in a forward pass and alive when the backward pass begins, or made
again by checkpointing; batch: the step's inputs; temporaries: the rest.
"""

PHASES = ("forward", "backward", "update")


class PlanError(hs.HalfstepError, RuntimeError):
    """A step that cannot be planned: it needs values, which a plan has none of, or its arguments do not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Memory of one part, module and format.

    Attributes:
        part: one of `PARTS`.
        module: dotted name of the module that owns it or whose operator made it; "" for none or the model itself.
        format: number format, as "fp32", "bf16", "int64".
        bytes: sum over its tensors' memory; memory shared by tensors counts once.
        tensors: blocks of memory.
    """

    part: str
    module: str
    format: str
    bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The highest point of one stretch of a step.

    Attributes:
        phase: one of `PHASES`.
        operator: number of operators run before it in this step.
        name: the operator that made the last block before it, such as "aten::mm".
        module: dotted name of the module that was running, or whose backward pass was.
        bytes: of each part, in the order of `PARTS`.
    """

    phase: str
    operator: int
    name: str
    module: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.bytes)
