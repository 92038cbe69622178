"""megengine.amp.convert_format: NHWC, which in PyTorch is ``torch.channels_last``."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import StepError

__all__ = ["convert_module_format", "convert_tensor_format"]

M = TypeVar("M", bound=nn.Module)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def convert_tensor_format(x: Tensor, inplace: bool = True) -> Tensor:
    """Return `x` with its channels last in memory; shape and values stay. Only ranks 4 and 5 change.

    Args:
        x: any tensor.
        inplace: change `x` and return it, instead of a new tensor.
    """
    if not isinstance(x, Tensor):
        raise StepError(f"convert_tensor_format: got a {type(x).__name__}; expected a tensor")
    layout = LAYOUTS.get(x.dim())
    if layout is None:
        return x
    if not inplace:
        return x.clone(memory_format=layout)
    if not x.is_contiguous(memory_format=layout):
        x.data = x.data.contiguous(memory_format=layout)
    return x


def convert_module_format(module: M, inplace: bool = True) -> M:
    """Return `module` with every parameter and buffer of rank 4 or 5 channels last in memory.

    Args:
        module: any module.
        inplace: change `module` and return it, instead of a deep copy.
    """
    if not isinstance(module, nn.Module):
        raise StepError(f"convert_module_format: got a {type(module).__name__}; expected a torch module")
    module = module if inplace else copy.deepcopy(module)
    for tensor in (*module.parameters(), *module.buffers()):
        convert_tensor_format(tensor)
    return module
