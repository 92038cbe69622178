"""`Tensor` and `Parameter`: MindSpore's constructors; what they make are plain torch tensors and parameters."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.compat.mindspore.errors import MindSporeTypeError

__all__ = ["Parameter", "Tensor"]


class _Tensors(type):
    """``isinstance(x, Tensor)`` is true of every torch tensor."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor)


class _Parameters(type):
    """``isinstance(x, Parameter)`` is true of every torch parameter."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.nn.Parameter)


class Tensor(metaclass=_Tensors):
    """``Tensor(data, dtype=None)``: a new torch.Tensor with a copy of `data`.

    Args:
        data: a number, nested lists, an array of numpy or a tensor. Arrays keep their dtype; Python's floats become
            float32.
        dtype: one of `common.dtype`.
    """

    def __new__(cls, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[misc]  # a factory
        """Return a torch.Tensor."""
        _check_dtype(dtype)
        if isinstance(data, torch.Tensor):
            return data.detach().clone() if dtype is None else data.detach().to(dtype, copy=True)
        return torch.tensor(data, dtype=dtype)


class Parameter(metaclass=_Parameters):
    """``Parameter(data, name=None, requires_grad=True)``: a new torch.nn.Parameter; torch gives names by place."""

    def __new__(  # type: ignore[misc]  # a factory, as Tensor
        cls, default_input: Any, name: str | None = None, requires_grad: bool = True
    ) -> torch.nn.Parameter:
        """Return a torch.nn.Parameter."""
        if name is not None and not isinstance(name, str):
            raise MindSporeTypeError(f"Parameter: name={name!r} is a {type(name).__name__}; expected a string or None")
        data = default_input if isinstance(default_input, torch.Tensor) else Tensor(default_input)
        return torch.nn.Parameter(data.detach().clone(), requires_grad=requires_grad)


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise MindSporeTypeError(f"dtype={dtype!r}; expected one of mindspore.dtype, such as mstype.float32")
