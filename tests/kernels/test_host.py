from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.kernels.native.calls import number, peek


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.int32])
def test_a_flag_is_read_without_torch(dtype: torch.dtype) -> None:
    flags: Tensor = torch.tensor([0, 1, 0]).to(dtype)
    with NoReads():  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        assert [peek(flag) for flag in flags] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_number_is_read_without_torch(dtype: torch.dtype) -> None:
    numbers: Tensor = torch.tensor([0.5, -3.0, float("inf")]).to(dtype)
    with NoReads():  # type: ignore[no-untyped-call]  # torch annotates its modes in part
        assert [number(value) for value in numbers] == [0.5, -3.0, float("inf")]
    assert number(torch.tensor(2.0).to(torch.bfloat16)) == 2.0 and number(torch.tensor(3)) == 3.0
