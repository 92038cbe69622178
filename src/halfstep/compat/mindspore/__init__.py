"""MindSpore's mixed precision on PyTorch: scripts run with their import lines changed.

``import halfstep.compat.mindspore as mindspore``. A Cell is a torch module, a Tensor a torch tensor; levels and flags
are halfstep policies, loss scales halfstep's scaler with MindSpore's rules. docs/compat_mindspore.md lists every name.
A wrong argument raises MindSporeTypeError or MindSporeValueError: a HalfstepError that is also the built-in class. Its
message has the value, what was expected, and the fix.
"""

from halfstep.compat.mindspore import amp, common, nn, ops, train
from halfstep.compat.mindspore.common import dtype
from halfstep.compat.mindspore.common.dtype import *  # noqa: F403  # the formats are listed there
from halfstep.compat.mindspore.common.dtype import __all__ as _formats
from halfstep.compat.mindspore.ops.grad import grad, value_and_grad
from halfstep.compat.mindspore.precision import add_flags, add_flags_recursive, to_float
from halfstep.compat.mindspore.tensor import Parameter, Tensor
from halfstep.compat.mindspore.train.model import Model

__all__ = [
    "Model", "Parameter", "Tensor", "add_flags", "add_flags_recursive", "amp", "common", "dtype", "grad", "nn", "ops",
    "to_float", "train", "value_and_grad", *_formats,
]  # fmt: skip
