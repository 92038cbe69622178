"""What MindSpore has under ``mindspore.common``: the number formats and how weights begin."""

from halfstep.compat.mindspore.common import dtype, initializer

__all__ = ["dtype", "initializer"]
