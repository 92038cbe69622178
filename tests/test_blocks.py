"""Block formats against a model in exact arithmetic, written from the text of MX v1.0."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from halfstep.blocks import BLOCK_FORMATS, BlockFormat, block_format_of
from halfstep.errors import FormatError
from halfstep.formats import E2M1
from tests.test_formats import exactly

ALL = tuple(BLOCK_FORMATS.values())


def model(form: BlockFormat, block: list[float]) -> list[float]:
    """Round one block as section 6.3 says: shared exponent of the largest, elements rounded and saturated."""
    if not all(math.isfinite(x) for x in block):
        return [math.nan] * len(block)
    largest = max(abs(x) for x in block)
    exponent = math.frexp(largest)[1] - 1 if largest else -math.inf
    shared = max(-127, min(127, exponent - form.element.max_exponent))
    scale = Fraction(2) ** int(shared)
    top = form.element.max
    rounded = [exactly(form.element, float(Fraction(x) / scale)) for x in block]
    return [float(Fraction(max(-top, min(top, r))) * scale) for r in rounded]


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@pytest.mark.parametrize("size", [32, 64, 40, 1, 0])
def test_rounding_is_the_specifications(form: BlockFormat, size: int) -> None:
    x = torch.randn(5, size, dtype=torch.float64) * torch.exp2(torch.randint(-60, 60, (5, size)).double())
    x = x.float().double()
    found = form.round(x)
    for row, expected in zip(found.tolist(), x.tolist(), strict=True):
        want = [value for start in range(0, size, 32) for value in model(form, expected[start : start + 32])]
        assert row == want


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_elements_times_scales_is_the_rounded_tensor(form: BlockFormat) -> None:
    x = torch.randn(3, 70, 2)
    elements, scales = form.quantize(x, dim=1)
    assert elements.shape == x.shape and scales.shape == (3, 3, 2)
    assert torch.equal(elements, form.element.round(elements))
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    assert torch.equal(elements * scales.repeat_interleave(32, 1)[:, :70], form.round(x, dim=1))
    assert torch.equal(form.round(x, dim=1), form.round(x.movedim(1, -1)).movedim(-1, 1))


def test_one_outlier_costs_its_block_and_no_other() -> None:
    x = torch.full((64,), 1.0)
    x[0] = 2.0**20
    rounded = block_format_of("mxfp4_e2m1").round(x)
    assert rounded[0] == 2.0**20 and bool((rounded[1:32] == 0).all()) and bool((rounded[32:] == 1).all())


def test_nan_and_inf_spoil_their_block_and_zeros_stay() -> None:
    x = torch.zeros(96)
    x[3], x[40] = math.nan, math.inf
    rounded = block_format_of("mxfp8_e4m3").round(x)
    assert bool(rounded[:64].isnan().all()) and bool((rounded[64:] == 0).all())


def test_bits_count_the_scale() -> None:
    assert [form.bits for form in ALL] == [8.25, 8.25, 6.25, 6.25, 4.25]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: block_format_of("mxfp8_e4m4"), "unknown block format 'mxfp8_e4m4'.*did you mean 'mxfp8_e4m3'"),
        (lambda: ALL[0].round(torch.arange(3)), "mxfp8_e4m3 takes a floating tensor and got torch.int64"),
        (lambda: ALL[0].round(torch.ones(3), dim=1), r"dim=1 of a tensor of shape \(3,\)"),
    ],
)
def test_errors_name_the_value(call: object, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        call()  # type: ignore[operator]


def test_four_bits_hold_fifteen_numbers() -> None:
    numbers: Tensor = E2M1.round(torch.linspace(-8, 8, 10_001)).unique()
    assert numbers.tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
