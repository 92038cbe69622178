"""Which of torch's fused optimizers update a parameter correctly; every choice of a fused form calls `fused_works`.

Two defects of the kernels for CPUs, found by comparing them with the other forms over formats, sizes, options and
memory layouts (torch 2.13; SGD also in 2.11 and 2.12):

- SGD leaves all but the last few elements of a fp16 or bf16 parameter as they are (corrected in 2.14; the other
  form is taken there too, so that a run has the same bits on every version).
- All four go through parameter, gradient and state by position in memory. A parameter with gaps (a slice of another
  tensor) has gradients and state without, so wrong elements are updated. CUDA's kernels refuse such a parameter.
"""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from halfstep.formats import LOW_DTYPES
from halfstep.torch_private import operators

WITH_KERNELS = (SGD, Adam, AdamW, Adagrad)


def fused_works(kind: type[Optimizer], parameter: Tensor) -> bool:
    """Return whether torch's fused form of an optimizer class (or of the class it is made from) updates `parameter`."""
    if parameter.device.type != "cpu":
        return True
    if parameter.dtype in LOW_DTYPES and issubclass(kind, SGD):
        return False
    if parameter.layout is not torch.strided or is_lazy(parameter):  # what is made later has no gaps
        return True
    return is_dense(parameter)


def fused_here(kind: type[Optimizer], device_type: str) -> bool:
    """Return whether one of `WITH_KERNELS` has a fused kernel on a device type."""
    if device_type in {"cpu", "cuda"}:  # fake CUDA tensors too, in a torch without CUDA
        return True
    if device_type not in operators.fused_optimizer_devices():
        return False
    operator, key = f"aten::_fused_{kind.__name__.lower()}_", operators.dispatch_key_for_device(device_type)
    return bool(operators.has_computed_kernel_for_dispatch_key(operator, key))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a strided tensor fill a stretch of memory, each once, in any dimension order."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True
