"""megengine.autodiff: `GradManager`."""

from halfstep.compat.megengine.autodiff.grad_manager import GradManager, GradManagerGroup

__all__ = ["GradManager", "GradManagerGroup"]
