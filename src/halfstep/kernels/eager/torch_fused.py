"""Which of torch's fused optimizers do their work on a parameter; every choice of a fused form asks here.

Two defects of the kernels for CPUs, found by comparing them with the other forms over formats, sizes, options and
memory layouts (torch 2.13; SGD also in 2.11 and 2.12):

- SGD leaves all but the last few elements of a fp16 or bf16 parameter as they are.
- All four go through parameter, gradient and state by position in memory. A parameter with gaps (a slice of another
  tensor) has gradients and state without, so wrong elements are updated. CUDA's kernels refuse such a parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

__all__ = ["WITH_KERNELS", "fused_works"]

WITH_KERNELS = (SGD, Adam, AdamW, Adagrad)
_LOWS = frozenset({torch.float16, torch.bfloat16})


def fused_works(kind: type[Optimizer], parameter: Tensor) -> bool:
    """Return whether torch's fused form of an optimizer class (or of the class it is made from) updates `parameter`."""
    if parameter.device.type != "cpu":
        return True
    if parameter.dtype in _LOWS and issubclass(kind, SGD):
        return False
    if parameter.layout is not torch.strided or is_lazy(parameter):  # what is made later has no gaps
        return True
    return parameter.is_contiguous() or _has_no_gaps(parameter)


def _has_no_gaps(parameter: Tensor) -> bool:
    """Return whether a strided tensor fills its memory, in any order of dimensions."""
    step = 1
    for stride, size in sorted((s, n) for n, s in zip(parameter.shape, parameter.stride(), strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True
