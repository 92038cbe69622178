"""The kernel that counts exponents in Triton's interpreter, on CPU tensors: run by test_triton.py."""

from __future__ import annotations

import pytest
import torch

from halfstep.kernels.reference import exponents
from halfstep.kernels.triton import exponents as launchers
from tests.kernels.exponent_cases import DTYPES, tensors

# The interpreter is numpy, which warns where a GPU computes inf or nan; and Triton's older ones use numpy as it was.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2048, 5001])
def test_rows_are_those_of_torch_s_operators(dtype: torch.dtype, size: int) -> None:
    given = tensors(dtype, size)
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    for _ in range(2):
        launchers.exponents_(rows, given)
        exponents.count_(expected, given)
    assert torch.equal(rows, expected)


def test_tensors_of_all_formats_are_counted_together() -> None:
    given = [x for dtype in DTYPES for x in tensors(dtype, 31)]
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    launchers.exponents_(rows, given)
    exponents.count_(expected, given)
    assert torch.equal(rows, expected)


def test_every_subnormal_power_of_two_and_its_neighbours_are_counted() -> None:
    bits = torch.arange(1, 2**12, dtype=torch.int32)
    powers = 2 ** torch.arange(12, 24)
    around = torch.cat([bits, *(powers + n for n in (-1, 0, 1))]).to(torch.int32).view(torch.float32)
    rows, expected = exponents.rows(1, "cpu"), exponents.rows(1, "cpu")
    launchers.exponents_(rows, [around])
    exponents.count_(expected, [around])
    assert torch.equal(rows, expected)
