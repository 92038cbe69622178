"""The older address of `halfstep.compat.mindspore.amp`; the same objects."""

from halfstep.compat.mindspore.amp import *  # noqa: F403  # the names are listed there
from halfstep.compat.mindspore.amp import __all__ as __all__
