"""The operators that count exponents: kernels and torch's operators give the same rows, for every pattern of bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.kernels import choose, ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.reference import exponents
from tests.kernels.cases import DTYPES, counted_tensors

REASON = load_kernels("cpu")
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)


def by_torch(given: list[Tensor]) -> Tensor:
    rows = exponents.rows(len(given), "cpu")
    exponents.count_(rows, [exponents.parts(x) for x in given])
    return rows


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 4096, 4099, 70_001])
def test_the_compiled_kernel_gives_the_rows_of_torch_s_operators(dtype: torch.dtype, size: int) -> None:
    given = counted_tensors(dtype, size)
    rows = exponents.rows(len(given), "cpu")
    for _ in range(2):
        ops.exponents_(rows, given)
    once = by_torch(given)
    expected = once.clone()
    exponents.merge_(expected, once)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5000])
def test_every_format_gives_the_rows_of_float64_s(dtype: torch.dtype, size: int) -> None:
    given = counted_tensors(dtype, size)
    wide = [x.to(torch.float64) for x in given]  # exact
    assert torch.equal(by_torch(given), by_torch(wide))


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    given = counted_tensors(dtype, 100_001)
    expected = by_torch(given)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rows = exponents.rows(len(given), "cpu")
        ops.exponents_(rows, given)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows, expected)


@compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits_counts_once(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    row = ops.exponents(x)
    assert torch.equal(row, by_torch([x])[0])
    assert torch.equal(row, sum_of_rows(x.split(1000)))
    assert int(row[: exponents.BINS].sum() + row[[exponents.ZEROS, exponents.INFS, exponents.NANS]].sum()) == 2**16


def sum_of_rows(given: tuple[Tensor, ...]) -> Tensor:
    total = exponents.rows(1, "cpu")[0]
    for x in given:
        exponents.merge_(total, ops.exponents(x))
    return total


def test_thousands_of_tensors_are_counted_at_once() -> None:
    given = [torch.randn(1 + n % 7).to(DTYPES[n % 4]) for n in range(2000)]
    rows = exponents.rows(len(given), "cpu")
    choose.count_exponents_(rows, given)
    assert torch.equal(rows, by_torch(given))


def test_no_tensors_and_no_elements_are_no_counts() -> None:
    rows = exponents.rows(1, "cpu")
    choose.count_exponents_(rows[:0], [])
    choose.count_exponents_(rows, [torch.empty(0)])
    assert not rows.any()


def test_one_tensor_gives_one_row() -> None:
    x = torch.tensor([1.0 + 3j])
    assert torch.equal(torch.ops.halfstep.exponents(x), by_torch([x])[0])


def test_fake_tensors_know_the_shape() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        row = ops.exponents(torch.ones(3))
        choose.count_exponents_(exponents.rows(1, "cpu"), [torch.ones(3)])
    assert (row.shape, row.dtype) == ((exponents.ROW,), torch.int64)


def test_rows_and_tensors_are_on_one_device() -> None:
    with pytest.raises(FormatError, match="on meta cannot be counted in rows on cpu"):
        choose.count_exponents_(exponents.rows(1, "cpu"), [torch.ones(1, device="meta")])
