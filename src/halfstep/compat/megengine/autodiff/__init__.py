"""megengine.autodiff: `GradManager` and `Function`."""

from halfstep.compat.megengine.autodiff.function import Function
from halfstep.compat.megengine.autodiff.grad_manager import GradManager, GradManagerGroup

__all__ = ["Function", "GradManager", "GradManagerGroup"]
