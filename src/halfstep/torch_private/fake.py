"""Fake tensors: shapes and formats without values."""

from typing import Any

from torch._subclasses import fake_tensor

DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
FakeTensor = fake_tensor.FakeTensor
is_fake = fake_tensor.is_fake
unset_fake_temporarily = fake_tensor.unset_fake_temporarily


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """torch's mode, and fake tensors that are copied stay in it (torch 2.13 copies the mode with them).

    ``copy.deepcopy(layer)`` is how torch's own transformer makes its layers; those would have memory of their own at
    every use.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensorMode":
        return self
