"""`Tensor` and `Parameter`: MindSpore's constructors; what they make are plain torch tensors and parameters."""

from types import NoneType
from typing import Any

import torch

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError, check_type
from halfstep.compat.mindspore.common.initializer import initializer
from halfstep.compat.shared import Factory


class Tensor(metaclass=Factory):
    """``Tensor(input_data, dtype=None)``: a new torch.Tensor with a copy of the data.

    Args:
        input_data: a number, nested lists, an array of numpy or a tensor. Arrays keep their dtype; Python's floats
            become float32.
        dtype: one of `common.dtype`.
        shape: with `init` and without data: the shape to fill.
        init: an Initializer or its name.
    """

    _made = torch.Tensor

    def __new__(  # type: ignore[misc]  # a factory
        cls, input_data: Any = None, dtype: torch.dtype | None = None, shape: Any = None, init: Any = None
    ) -> torch.Tensor:
        """Return a torch.Tensor."""
        check_type("Tensor: dtype", dtype, (torch.dtype, NoneType), "one of mindspore.dtype, such as mstype.float32")
        if (input_data is None) == (init is None):
            given = "neither input_data nor init" if init is None else "both input_data and init"
            raise MindSporeValueError(f"Tensor: {given}; pass input_data, or shape, dtype and init")
        if init is not None:
            return initializer(init, shape, torch.float32 if dtype is None else dtype)
        if isinstance(input_data, torch.Tensor):
            made = input_data.detach().clone() if dtype is None else input_data.detach().to(dtype, copy=True)
        else:
            try:
                made = torch.tensor(input_data, dtype=dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise MindSporeTypeError(
                    f"Tensor: {error}; expected a number, nested lists, an array or a tensor"
                ) from None
        if shape is not None and tuple(made.shape) != tuple([shape] if isinstance(shape, int) else shape):
            raise MindSporeValueError(f"Tensor: shape={shape!r} and data of shape {tuple(made.shape)}")
        return made


class Parameter(metaclass=Factory):
    """``Parameter(data, name=None, requires_grad=True)``: a new torch.nn.Parameter; torch gives names by place.

    Integers have no gradient, whatever `requires_grad` is. The arguments after it are about parallel training and
    the place of the data, and keep their defaults.
    """

    _made = torch.nn.Parameter

    def __new__(  # type: ignore[misc]  # a factory, as Tensor
        cls, default_input: Any, name: str | None = None, requires_grad: bool = True,
        layerwise_parallel: bool = False, parallel_optimizer: bool = True,
    ) -> torch.nn.Parameter:  # fmt: skip
        """Return a torch.nn.Parameter."""
        check_type("Parameter: name", name, (str, NoneType), "a string or None")
        if layerwise_parallel or not parallel_optimizer:
            raise MindSporeValueError(
                "Parameter: layerwise_parallel and parallel_optimizer are about MindSpore's parallel training; use "
                "torch.distributed"
            )
        data = default_input if isinstance(default_input, torch.Tensor) else Tensor(default_input)
        can = data.is_floating_point() or data.is_complex()
        return torch.nn.Parameter(data.detach().clone(), requires_grad=bool(requires_grad) and can)
