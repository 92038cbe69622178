"""MegEngine's mixed-precision interface, carried out by halfstep on PyTorch.

Change ``megengine`` in the imports into ``halfstep.compat.megengine``. Tensors are torch's, models torch.nn.Modules.
What differs from MegEngine 1.13, and why, is in docs/compat_megengine.md.

Examples:
    >>> import halfstep.compat.megengine as mge
    >>> from halfstep.compat.megengine import amp
"""

from halfstep.compat.megengine import amp, autodiff, functional, hub, optimizer
from halfstep.compat.megengine.tensor import Parameter, Tensor, get_default_device, set_default_device, tensor

__all__ = [
    "Parameter", "Tensor", "amp", "autodiff", "functional", "get_default_device", "hub", "optimizer",
    "set_default_device", "tensor",
]  # fmt: skip
