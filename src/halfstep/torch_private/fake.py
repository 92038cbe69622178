"""Fake tensors: shapes and formats without values."""

from typing import Any

from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    is_fake,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "is_fake",
    "unset_fake_temporarily",
]  # fmt: skip


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """torch's mode, and fake tensors that are copied stay in it (torch 2.13 copies the mode with them).

    ``copy.deepcopy(layer)`` is how torch's own transformer makes its layers; those would have memory of their own at
    every use.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensorMode":
        return self
