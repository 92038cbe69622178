"""Operators: MindSpore's primitives (classes) and functions, on torch."""

from halfstep.compat.mindspore.ops import functional, operations
from halfstep.compat.mindspore.ops.functional import *  # noqa: F403  # the functions are listed there
from halfstep.compat.mindspore.ops.functional import __all__ as _functions
from halfstep.compat.mindspore.ops.grad import GradOperation, HyperMap, grad, value_and_grad
from halfstep.compat.mindspore.ops.operations import *  # noqa: F403  # the primitives are listed there
from halfstep.compat.mindspore.ops.operations import __all__ as _primitives

__all__ = [
    "GradOperation", "HyperMap", "functional", "grad", "operations", "value_and_grad", *_functions, *_primitives,
]  # fmt: skip
