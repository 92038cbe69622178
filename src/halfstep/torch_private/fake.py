"""Fake tensors: shapes and formats without values."""

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "is_fake",
    "unset_fake_temporarily",
]  # fmt: skip
