"""The address of `RECORDERS` for programs outside."""

from halfstep.step.graphs import RECORDERS

__all__ = ["RECORDERS"]
