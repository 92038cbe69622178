"""megengine.optimizer: torch's optimizers with MegEngine's arguments, and clipping of gradients."""

from halfstep.compat.megengine.optimizer.optimizer import *  # noqa: F403  # the names are listed there
from halfstep.compat.megengine.optimizer.optimizer import __all__ as __all__
