"""What MindSpore has under ``mindspore.common``: the number formats."""

from halfstep.compat.mindspore.common import dtype

__all__ = ["dtype"]
