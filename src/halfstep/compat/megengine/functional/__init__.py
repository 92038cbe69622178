"""megengine.functional: MegEngine's names and argument order for torch's operators.

A wrong argument raises StepError, whose message has the value and what was expected.
"""

from halfstep.compat.megengine.functional import elemwise, loss, math, metric, nn, tensor, vision
from halfstep.compat.megengine.functional.elemwise import *  # noqa: F403 - the original's flat names
from halfstep.compat.megengine.functional.math import *  # noqa: F403
from halfstep.compat.megengine.functional.metric import *  # noqa: F403
from halfstep.compat.megengine.functional.nn import *  # noqa: F403
from halfstep.compat.megengine.functional.tensor import *  # noqa: F403

__all__ = ["elemwise", "loss", "math", "metric", "nn", "tensor", "vision"]
__all__ += sorted({*elemwise.__all__, *math.__all__, *metric.__all__, *nn.__all__, *tensor.__all__})
