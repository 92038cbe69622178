"""megengine.functional: MegEngine's names and argument order for torch's operators.

A wrong argument raises StepError, whose message has the value and what was expected.
"""

import sys

from halfstep.compat.megengine.functional import elemwise, math, nn, tensor
from halfstep.compat.megengine.functional.elemwise import *  # noqa: F403 - the original's flat names
from halfstep.compat.megengine.functional.math import *  # noqa: F403
from halfstep.compat.megengine.functional.nn import *  # noqa: F403
from halfstep.compat.megengine.functional.tensor import *  # noqa: F403

__all__ = ["elemwise", "loss", "math", "metric", "nn", "tensor", "vision"]
__all__ += sorted({*elemwise.__all__, *math.__all__, *nn.__all__, *tensor.__all__})

loss, metric, vision = nn, math, nn  # the original's small modules: their names are in a larger one here
sys.modules |= {f"{__name__}.loss": loss, f"{__name__}.metric": metric, f"{__name__}.vision": vision}
