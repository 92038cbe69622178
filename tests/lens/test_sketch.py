"""ExponentSketch: counts are exact, bounds hold and are tight, for every format at many scales; sketches add up."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import FORMATS, FP16, Format, format_of
from halfstep.lens.sketch import ExponentSketch, Sketches

FORMAT_NAMES = [*FORMATS, "e3m4", "e2m1-noinf-nonan-nosub", "e5m0", "e8m23-noinf-nonan", "e4m1-noinf", "e3m0-noinf"]
SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
formats = st.sampled_from(FORMAT_NAMES).map(format_of)
dtypes = st.sampled_from(SOURCES)
scales = st.one_of(
    st.integers(-30, 30).map(lambda k: 2.0**k), st.floats(1e-9, 1e9), st.sampled_from([3.0, 0.1, 65504.0])
)


def edges(format: Format, scale: float) -> list[float]:
    """Return the numbers at which rounding to `format` changes its kind, and their neighbours, divided by `scale`."""
    small, normal, top = format.smallest_subnormal, format.smallest_normal, format.max
    at = [small / 2, small, normal - small / 2, normal, top, top + format.ulp(top) / 2, 2 * top, small / 4, 1.5 * small]
    near = [x for value in at for x in (math.nextafter(value, 0), value, math.nextafter(value, math.inf))]
    return [x / scale for x in near]


@st.composite
def tensors(draw: st.DrawFn, format: Format = FP16, scale: float = 1.0) -> Tensor:
    """Draw a tensor of numbers of all sizes, those at the edges of `format` among them."""
    dtype = draw(dtypes)
    exponents = draw(st.lists(st.integers(-160, 140), max_size=12))
    wide = [math.ldexp(draw(st.floats(1, 2)), e) for e in exponents]
    special = draw(st.lists(st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308]), max_size=4))
    chosen = draw(st.lists(st.sampled_from(edges(format, scale)), max_size=8))
    values = torch.tensor([*wide, *special, *chosen], dtype=torch.float64)
    signs = torch.tensor(draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    return torch.where(signs.bool(), -values, values).to(dtype)


def magnitudes(tensor: Tensor) -> Tensor:
    """Return the magnitudes of finite numbers that are not zero, as float64."""
    wide = tensor.double().abs()
    return wide[wide.isfinite() & (wide > 0)]


# ---------------------------------------------------------------------- counts


@given(tensors())
def test_counts_are_those_of_python_s_own_arithmetic(x: Tensor) -> None:
    sketch, values = ExponentSketch.of(x), x.double().tolist()
    sizes = [abs(v) for v in values if math.isfinite(v) and v]
    expected = Counter(min(max(math.frexp(v)[1] - 1, -192), 191) for v in sizes)
    powers = Counter(math.frexp(v)[1] - 1 for v in sizes if math.frexp(v)[0] == 0.5 and 2.0**-191 <= v < 2.0**191)
    assert sketch.exponents == expected
    assert sketch.powers == powers
    assert sketch.zeros == sum(v == 0 for v in values)
    assert sketch.infs == sum(math.isinf(v) for v in values)
    assert sketch.nans == sum(math.isnan(v) for v in values)
    assert sketch.negatives == sum(v < 0 for v in values)
    assert (sketch.largest, sketch.smallest) == (max(sizes, default=0.0), min(sizes, default=math.inf))
    assert (sketch.count, sketch.nonzero) == (len(values), len(sizes))


@pytest.mark.parametrize("dtype", SOURCES)
def test_subnormals_count_by_their_true_exponent(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([smallest, 3 * smallest], dtype=torch.float64).to(dtype)
    exponent = max(math.frexp(smallest)[1] - 1, -192)
    expected = {exponent: 1, exponent + 1: 1} if dtype is not torch.float64 else {-192: 2}
    assert ExponentSketch.of(x).exponents == expected


def test_parts_of_complex_numbers_are_two_numbers() -> None:
    x = torch.tensor([1 + 2j, -4j])
    assert ExponentSketch.of(x) == ExponentSketch.of(torch.tensor([1.0, 2.0, 0.0, -4.0]))
    assert ExponentSketch.of(x.conj()) == ExponentSketch.of(torch.tensor([1.0, -2.0, 0.0, 4.0]))
    assert ExponentSketch.of(x.conj().imag).negatives == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_tensors_are_counted(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, -448.0, 0.002]).to(dtype)
    assert ExponentSketch.of(x) == ExponentSketch.of(x.float())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (4, 5, 6)])
def test_any_shape_and_any_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for view in (x, x.unsqueeze(0).transpose(0, -1) if x.dim() else x, x.expand(2, *shape)):
        assert ExponentSketch.of(view) == ExponentSketch.of(view.contiguous())


def test_a_tensor_that_needs_a_gradient_is_counted_and_left_alone() -> None:
    x = torch.ones(3, requires_grad=True)
    assert ExponentSketch.of(x).exponents == {0: 3}
    assert x.grad is None and x.grad_fn is None


def test_sparse_tensors_count_what_is_there() -> None:
    assert ExponentSketch.of(torch.eye(3).to_sparse()).exponents == {0: 3}


@pytest.mark.parametrize(
    "wrong", [torch.arange(3), torch.ones(2, dtype=torch.bool), [1.0], torch.ones(2, device="meta")]
)
def test_what_has_no_exponents_is_refused(wrong: Tensor) -> None:
    with pytest.raises(FormatError, match="int64|bool|list|meta"):
        ExponentSketch.of(wrong)


# ---------------------------------------------------------------------- answers


def truth(x: Tensor, format: Format, scale: float) -> dict[str, float]:
    """Return the shares by rounding every number; products must be exact in float64."""
    sizes = magnitudes(x)
    product = sizes * scale
    rounded = format.round(product)
    spacing = format.ulp(format.max)  # above max too, if exponents went on: rounding to `max` or beyond is the same
    beyond = (product / spacing).round() * spacing > format.max
    total = max(len(sizes), 1)
    low = (rounded > 0) & (rounded < format.smallest_normal)
    return {
        "underflow": float((rounded == 0).sum()) / total,
        "subnormal": float(low.sum()) / total,
        "overflow": float(beyond.sum()) / total,
    }


def cut(x: Tensor, thresholds: list[float]) -> int:
    """Return how many numbers lie in the bins that thresholds cut."""
    exponents = torch.frexp(magnitudes(x)).exponent - 1
    return int(sum((exponents.clamp(-192, 191) == math.frexp(t)[1] - 1).sum() for t in thresholds))


@given(st.data(), formats, scales)
@settings(max_examples=400)
def test_bounds_hold_and_are_as_tight_as_the_bins_that_thresholds_cut(
    data: st.DataObject, format: Format, scale: float
) -> None:
    x = data.draw(tensors(format, scale))
    x = x[(x.double() * scale).isinf() == x.isinf()]
    if math.frexp(scale)[0] != 0.5:  # then products in float64 are exact
        x = x.float() if x.dtype is torch.float64 else x
        scale = float(torch.tensor(scale))
        x = x[(x.double().abs() < 1e250)]
    sketch = ExponentSketch.of(x)
    expected = truth(x, format, scale)
    small, normal, top = format.smallest_subnormal, format.smallest_normal, format.max + format.ulp(format.max) / 2
    thresholds = {
        "underflow": [small / 2 / scale],
        "subnormal": [small / 2 / scale, (normal - small / 2) / scale],
        "overflow": [top / scale],
    }
    for name, share in expected.items():
        lower, upper = getattr(sketch, name)(format, scale)
        assert lower <= share <= upper, name
        assert upper - lower <= cut(x, thresholds[name]) / max(1, sketch.nonzero) + 1e-12, name
        if name == "underflow" and math.frexp(scale)[0] == 0.5 and 2.0**-190 < small / 2 / scale < 2.0**190:
            assert lower == upper


@given(tensors(), formats)
def test_no_power_of_two_is_better_than_the_best_scale(x: Tensor, format: Format) -> None:
    x = x[(x.double().abs() < 2.0**150) & ((x.double().abs() > 2.0**-180) | (x == 0))]
    sketch = ExponentSketch.of(x)
    best = sketch.best_scale(format)
    assert sketch.overflow(format, best) == (0.0, 0.0)
    least = truth(x, format, best)["underflow"]
    assert sketch.underflow(format, best) == (least, least)
    for power in range(-200, 400, 7):
        other = truth(x, format, 2.0**power)
        if not other["overflow"]:
            assert (least, sketch.subnormal(format, best)[1]) <= (
                other["underflow"],
                sketch.subnormal(format, 2.0**power)[1],
            )


def test_of_equally_good_scales_the_best_is_the_nearest_to_one() -> None:
    x = torch.tensor([1.0, 0.5])
    assert ExponentSketch.of(x).best_scale("bf16") == 1.0
    assert ExponentSketch.of(x * 2.0**-20).best_scale("fp16") == 2.0**7  # 2**-21 is the smallest, 2**-14 is normal
    assert ExponentSketch.of(x * 2.0**20).best_scale("fp16") == 2.0**-5
    assert ExponentSketch.of(torch.zeros(3)).best_scale("fp16") == 1.0


@given(tensors(), formats, scales)
def test_the_mean_relative_error_is_within_its_bounds(x: Tensor, format: Format, scale: float) -> None:
    sizes = magnitudes(x.float()[x.float().abs() < 1e38])
    scale = float(torch.tensor(scale))
    lower, upper = ExponentSketch.of(sizes).relative_error(format, scale)
    if not len(sizes):
        assert (lower, upper) == (0.0, 0.0)
        return
    product = sizes * scale
    error = float(((format.round(product) - product).abs() / product).mean())
    assert lower <= error * (1 + 1e-12) and error <= upper * (1 + 1e-12)


def test_headroom_is_the_distance_to_the_largest_number_in_bits() -> None:
    sketch = ExponentSketch.of(torch.tensor([1.0, -65504.0 / 4]))
    assert sketch.headroom("fp16") == 2.0
    assert sketch.headroom(torch.float16, 8.0) == -1.0
    assert ExponentSketch.of(torch.zeros(2)).headroom("fp16") == math.inf


def test_half_of_the_smallest_number_rounds_to_zero_and_the_next_number_does_not() -> None:
    half = 2.0**-25
    assert ExponentSketch.of(torch.tensor([half])).underflow("fp16") == (1.0, 1.0)
    assert ExponentSketch.of(torch.tensor([math.nextafter(half, 1)], dtype=torch.float64)).underflow("fp16")[0] == 0.0
    both = torch.tensor([half, half * 1.5, 1.0, half / 2])
    assert ExponentSketch.of(both).underflow("fp16") == (0.5, 0.5)


def test_an_inner_threshold_leaves_bounds_and_the_ends_of_the_data_settle_them() -> None:
    x = torch.tensor([60000.0, 33000.0, 65519.0])
    assert ExponentSketch.of(x).overflow("fp16") == (0.0, 0.0)
    more = torch.cat((x, torch.tensor([65520.0])))
    assert ExponentSketch.of(more).overflow("fp16") == (0.25, 0.75)  # one, and not the smallest


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, "large", None])
def test_a_scale_that_makes_no_sense_is_refused(scale: Any) -> None:
    with pytest.raises(FormatError, match="scale must be"):
        ExponentSketch().underflow("fp16", scale)
    with pytest.raises(FormatError, match="unknown number format 'fp61'.*did you mean 'fp16'"):
        ExponentSketch().overflow("fp61")


# ---------------------------------------------------------------------- adding and keeping


@given(tensors(), tensors())
def test_the_sum_of_sketches_is_the_sketch_of_both_tensors(x: Tensor, y: Tensor) -> None:
    both = ExponentSketch.of(torch.cat((x.double(), y.double())))
    one, other = ExponentSketch.of(x), ExponentSketch.of(y)
    kept = ExponentSketch.from_dict(one.to_dict())
    assert one + other == both == other + one
    assert one == kept
    assert one.merge_(other) is one and one == both


def test_a_sketch_added_to_itself_counts_twice() -> None:
    sketch = ExponentSketch.of(torch.tensor([1.0, 0.0]))
    assert sketch.merge_(sketch) == ExponentSketch.of(torch.tensor([1.0, 0.0, 1.0, 0.0]))


def test_sketches_that_grow_on_a_device_are_those_of_all_tensors() -> None:
    found = Sketches(2, "cpu")
    steps = [(torch.randn(10), torch.randn(3, 4).half()) for _ in range(3)]
    for step in steps:
        found.add_(step)
    found.add_([torch.ones(1)], first=1)
    first, second = found.read()
    assert first == ExponentSketch.of(torch.cat([x for x, _ in steps]))
    assert second == ExponentSketch.of(torch.cat([*(y.float().flatten() for _, y in steps), torch.ones(1)]))


@given(tensors())
def test_text_and_json_give_the_same_sketch_back(x: Tensor) -> None:
    sketch = ExponentSketch.of(x)
    assert ExponentSketch.from_dict(json.loads(json.dumps(sketch.to_dict(), allow_nan=False))) == sketch
    assert eval(repr(sketch), {"ExponentSketch": ExponentSketch, "inf": math.inf}) == sketch


def test_a_sketch_of_everything_there_is_takes_under_3_kb() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1_000_000,), dtype=torch.int32)
    sketch = ExponentSketch.of(bits.view(torch.float32))
    sketch += ExponentSketch.of(torch.ldexp(torch.ones(277), torch.arange(-149, 128)))
    assert len(sketch.exponents) == len(sketch.powers) == 277
    for exponent in sketch.exponents:  # a month of steps
        sketch.exponents[exponent] <<= 14
        sketch.powers[exponent] <<= 14
    assert len(json.dumps(sketch.to_dict())) < 3000


@pytest.mark.parametrize(
    "change",
    [{"zeros": "many"}, {"exponents": "0 ~"}, {"powers": 3}, {"more": 1}, {"exponents": "x"}],
)
def test_what_is_no_sketch_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="not the values of an ExponentSketch"):
        ExponentSketch.from_dict({**ExponentSketch.of(torch.ones(2)).to_dict(), **change})


@pytest.mark.parametrize("wrong", [3, None, "text"])
def test_what_is_no_sketch_at_all_is_refused(wrong: Any) -> None:
    with pytest.raises(FormatError, match="expected a mapping and got"):
        ExponentSketch.from_dict(wrong)
    with pytest.raises(FormatError, match="merge_ takes an ExponentSketch and got"):
        ExponentSketch().merge_(wrong)


def test_a_sketch_prints_as_one_line() -> None:
    sketch = ExponentSketch.of(torch.tensor([0.0, 1.0, -2.0, math.inf]))
    assert str(sketch) == "4 numbers, 1 to 2, 1 zeros, 1 infs"
    assert str(ExponentSketch()) == "no numbers"
