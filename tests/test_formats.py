"""Formats: properties against torch.finfo, rounding against torch's casts and against an exact model in fractions."""

from __future__ import annotations

import bisect
import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, TF32, Format, format_of

ALL = tuple(FORMATS.values())
STORED = tuple(f for f in ALL if f.torch_dtype is not None)
NARROW = (BF16, FP16, E4M3, E5M2)  # those whose patterns can all be tried
SATURATING_E4M3 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)  # pytorch#178817


def ids(value: object) -> str:
    return value.name if isinstance(value, Format) else str(value)


def patterns(form: Format) -> Tensor:
    """Return every number of a stored format, as float64, including infinities and nan."""
    assert form.torch_dtype is not None
    integers = torch.arange(2**form.bits, dtype=torch.int32)
    storage = {8: torch.uint8, 16: torch.int16}[form.bits]
    return integers.to(storage).view(form.torch_dtype).to(torch.float64)


def finite(form: Format) -> Tensor:
    values = patterns(form)
    return values[values.isfinite()]


def ordered_numbers(form: Format) -> Tensor:
    """Return the finite numbers of a stored format, ascending, zero once."""
    values = finite(form).sort().values
    return values[torch.cat([torch.tensor([True]), values.diff() > 0])]


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of float32 values, with every nan the same."""
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a.float()), bits(b.float()))


def around(form: Format) -> Tensor:
    """Return fp32 numbers where rounding decides: all of the format, midpoints between neighbours, and next to them."""
    ordered = ordered_numbers(form)
    middles = (ordered[1:] + ordered[:-1]) / 2
    top = form.max + form.ulp(form.max) * torch.tensor([0.25, 0.5, 0.75, 1.0, 2.0], dtype=torch.float64)
    points = torch.cat([ordered, middles, top, -top]).float()
    up, down = points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(-math.inf))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e38, -1e38, 1e-45])
    return torch.cat([points, up, down, special])


def exactly(form: Format, x: float) -> float:
    """Round one number in exact arithmetic: the model that `Format.round` is compared with."""
    if math.isnan(x) or math.isinf(x):
        return x if form.has_inf or math.isnan(x) else math.copysign(form.max, x)
    if x == 0:
        return x
    value = abs(Fraction(x))
    exponent = max(math.frexp(x)[1] - 1, 1 - form.bias)
    step = Fraction(2) ** (exponent - form.mantissa_bits)
    count = round(value / step)  # Python rounds halves of fractions to even
    rounded = count * step
    if rounded > Fraction(form.max):
        return math.copysign(math.inf if form.has_inf else form.max, x)
    return math.copysign(float(rounded), x)


class TestProperties:
    @pytest.mark.parametrize("form", STORED, ids=ids)
    def test_agree_with_torch(self, form: Format) -> None:
        assert form.torch_dtype is not None
        info = torch.finfo(form.torch_dtype)
        assert (form.max, form.smallest_normal, form.eps) == (info.max, info.smallest_normal, info.eps)
        assert (form.bits, form.bytes) == (info.bits, form.torch_dtype.itemsize)

    @pytest.mark.parametrize("form", NARROW, ids=ids)
    def test_agree_with_the_patterns(self, form: Format) -> None:
        values = patterns(form)
        assert finite(form).max() == form.max
        assert values[values > 0].min() == form.smallest_subnormal
        assert bool(values.isinf().any()) == form.has_inf
        assert bool(values.isnan().any()) == form.has_nan

    def test_tf32_is_fp32_with_the_mantissa_of_fp16(self) -> None:
        assert (TF32.exponent_bits, TF32.mantissa_bits) == (FP32.exponent_bits, FP16.mantissa_bits)
        assert (TF32.bits, TF32.bytes, TF32.torch_dtype) == (19, 4, None)
        assert TF32.smallest_normal == FP32.smallest_normal

    def test_what_shares_fp32s_exponents_is_not_narrow(self) -> None:
        wide = {form.name for form in FORMATS.values() if not form.is_narrow}
        assert wide == {"fp32", "tf32", "bf16"}
        assert all(form.is_narrow == (form.smallest_normal > FP32.smallest_normal) for form in FORMATS.values())

    def test_e4m3_has_no_infinity_and_ends_at_448(self) -> None:
        assert (E4M3.max, E4M3.has_inf, E4M3.smallest_subnormal) == (448.0, False, 2.0**-9)

    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_repr_can_be_pasted(self, form: Format) -> None:
        assert eval(repr(form)) == form
        assert hash(dataclasses.replace(form)) == hash(form)


class TestFormatOf:
    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_finds_names_and_dtypes(self, form: Format) -> None:
        assert format_of(form.name) is form
        assert format_of(form) is form
        assert FORMATS[form.name] is form
        if form.torch_dtype is not None:
            assert format_of(form.torch_dtype) is form

    @pytest.mark.parametrize("wrong", ["float16", "", torch.int8, torch.float64, None])
    def test_unknown_names_all(self, wrong: object) -> None:
        with pytest.raises(FormatError, match="unknown number format .*; expected one of fp32, tf32, bf16, fp16"):
            format_of(wrong)  # type: ignore[arg-type]

    def test_unknown_names_the_nearest(self) -> None:
        with pytest.raises(FormatError, match=r"did you mean 'bf16'\?"):
            format_of("bf_16")


class TestNearest:
    @pytest.mark.parametrize("form", NARROW, ids=ids)
    def test_equals_torchs_cast_where_rounding_decides(self, form: Format) -> None:
        self.check(form, around(form))

    @pytest.mark.parametrize("form", (BF16, FP16, E4M3, E5M2), ids=ids)
    @pytest.mark.parametrize("source", (BF16, FP16), ids=ids)
    def test_equals_torchs_cast_from_every_16_bit_pattern(self, form: Format, source: Format) -> None:
        self.check(form, patterns(source).float())

    def check(self, form: Format, x: Tensor) -> None:
        """Compare `round` with torch's cast."""
        assert form.torch_dtype is not None
        if form is E4M3 and not SATURATING_E4M3:
            x = x[~(x.abs() > 464)]
        assert same(form.round(x), x.to(form.torch_dtype))

    @pytest.mark.parametrize("form", NARROW, ids=ids)
    def test_leaves_numbers_of_the_format(self, form: Format) -> None:
        x = patterns(form)
        assert same(form.round(x), x)

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(ALL), st.floats(width=64))
    def test_equals_exact_arithmetic(self, form: Format, x: float) -> None:
        got = form.round(torch.tensor(x, dtype=torch.float64)).item()
        want = exactly(form, x)
        assert (got == want or (math.isnan(got) and math.isnan(want))) and math.copysign(1, got) == math.copysign(
            1, want
        )

    def test_rounds_float64_once(self) -> None:
        # just above a tie of bf16, by less than float32 can say: torch's cast goes through float32 and rounds twice
        x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
        assert BF16.round(x).item() == 1 + 2.0**-7
        assert x.to(torch.bfloat16).item() == 1.0

    def test_tf32_is_fp32_with_13_bits_rounded_off(self) -> None:
        integers = torch.randint(0, 0x7F7FFFFF, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        x = torch.cat([integers, integers | 0x1000, integers & ~0xFFF | 0x1000]).view(torch.float32)
        x = x[x.abs() < 3.4e38]
        pattern = x.view(torch.int32)
        rounded = ((pattern + 0xFFF + ((pattern >> 13) & 1)) & ~0x1FFF).view(torch.float32)
        assert same(TF32.round(x), rounded)

    def test_catches_truncation(self) -> None:
        """The seeded fault: a rounding that cuts bits off differs from torch's cast on this suite's numbers."""
        x = around(BF16)
        cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
        assert not same(cut, x.to(torch.bfloat16))

    def test_catches_ties_away_from_zero(self) -> None:
        x = around(FP16)
        spacing = FP16.ulp(x)
        away = (x.abs() / spacing + 0.5).floor() * spacing
        fine = x.isfinite() & (x.abs() <= FP16.max)
        assert not torch.equal(away[fine], x.to(torch.float16).float().abs()[fine])

    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_saturates_when_asked(self, form: Format) -> None:
        x = torch.tensor([math.inf, -math.inf, 1e300, -1e300, math.nan, 1.0], dtype=torch.float64)
        want = torch.tensor([form.max, -form.max, form.max, -form.max, math.nan, 1.0], dtype=torch.float64)
        assert torch.equal(form.round(x, saturate=True).nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))

    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_overflows_as_stated(self, form: Format) -> None:
        beyond = torch.tensor([math.inf, 1e300, -1e300], dtype=torch.float64)
        limit = math.inf if form.has_inf else form.max
        assert form.round(beyond).tolist() == [limit, limit, -limit]

    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 4)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_keeps_shape_and_dtype_and_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = torch.full(shape, 1.3, dtype=dtype, requires_grad=True)
        before = x.detach().clone()
        y = E5M2.round(x)
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, dtype, False)
        assert torch.equal(x, before)
        assert torch.equal(y, torch.full(shape, 1.25, dtype=dtype))

    def test_takes_any_strides(self) -> None:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
        assert torch.equal(FP16.round(x.t()), FP16.round(x.t().contiguous()))
        assert torch.equal(FP16.round(x[::2, 1::3]), FP16.round(x)[::2, 1::3])

    @pytest.mark.parametrize("wrong", [torch.arange(3), torch.zeros(2, dtype=torch.complex64), 1.5])
    def test_refuses_what_is_not_floating(self, wrong: object) -> None:
        with pytest.raises(FormatError, match=r"Format\.round takes a floating tensor and got .*; convert it first"):
            FP16.round(wrong)  # type: ignore[arg-type]

    def test_refuses_an_unknown_mode(self) -> None:
        with pytest.raises(FormatError, match=r"rounding mode 'stochastc'.*did you mean 'stochastic'\?"):
            FP16.round(torch.zeros(2), mode="stochastc")  # type: ignore[arg-type]


class TestStochastic:
    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_takes_a_neighbour_and_leaves_numbers_of_the_format(self, form: Format) -> None:
        generator = torch.Generator().manual_seed(3)
        scale = torch.logspace(-12, 4, 4000, dtype=torch.float64)
        x = (torch.randn(4000, generator=generator, dtype=torch.float64) * scale).clamp(-form.max, form.max)
        y = form.round(x, mode="stochastic", generator=generator)
        spacing = form.ulp(x)
        assert bool(((y - x).abs() < spacing).all())
        assert torch.equal(form.round(y), y), "the result is a number of the format"
        assert torch.equal(form.round(y, mode="stochastic", generator=generator), y), "and such numbers stay"

    @pytest.mark.parametrize("form", ALL, ids=ids)
    @pytest.mark.parametrize("share", [0.5, 0.125, 0.9])
    @pytest.mark.parametrize("start", [1.0, -1.5, 0.0])
    def test_is_unbiased(self, form: Format, share: float, start: float) -> None:
        count = 20_000
        x = start + share * form.ulp(start)
        y = form.round(
            torch.full((count,), x, dtype=torch.float64),
            mode="stochastic",
            generator=torch.Generator().manual_seed(4),
        )
        deviation = math.sqrt(count * share * (1 - share))
        ups = int((y > x).sum())
        assert abs(ups - count * share) < 4.5 * deviation, "4.5 standard deviations: one failure in 150,000 seeds"

    def test_catches_nearest(self) -> None:
        """The seeded fault: nearest rounding fails the law of `test_is_unbiased`."""
        x = torch.full((1000,), 1 + 0.125 * BF16.eps, dtype=torch.float64)
        assert int((BF16.round(x) > x).sum()) == 0

    def test_repeats_with_the_generator_and_leaves_the_global_one(self) -> None:
        x = torch.rand(100, generator=torch.Generator().manual_seed(5))
        before = torch.get_rng_state()
        first, second = (BF16.round(x, mode="stochastic", generator=torch.Generator().manual_seed(6)) for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(first, BF16.round(x, mode="stochastic", generator=torch.Generator().manual_seed(7)))
        assert torch.equal(torch.get_rng_state(), before)

    def test_keeps_specials(self) -> None:
        x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
        assert same(FP16.round(x, mode="stochastic", generator=torch.Generator().manual_seed(8)), x)


class TestUlp:
    @pytest.mark.parametrize("form", NARROW, ids=ids)
    def test_is_the_distance_to_the_next_number(self, form: Format) -> None:
        values = ordered_numbers(form)
        values = values[values >= 0]
        assert torch.equal(form.ulp(values[:-1]), values.diff())

    @given(st.floats(allow_nan=False, allow_infinity=False, width=32))
    def test_of_fp32_is_the_distance_to_the_next_float(self, x: float) -> None:
        x32 = torch.tensor(x)
        if abs(x) < FP32.max:
            above = x32.abs().nextafter(torch.tensor(math.inf))
            assert FP32.ulp(x) == (above.double() - x32.abs().double()).item()

    @given(st.sampled_from(ALL), st.floats(width=64))
    def test_is_the_same_for_numbers_and_tensors(self, form: Format, x: float) -> None:
        got = form.ulp(torch.tensor(x, dtype=torch.float64)).item()
        want = form.ulp(x)
        assert got == want or (math.isnan(got) and math.isnan(want))

    @given(st.sampled_from(ALL), st.floats(allow_nan=False, allow_infinity=False, width=64))
    def test_bounds_the_error_of_rounding(self, form: Format, x: float) -> None:
        if abs(x) <= form.max:
            error = abs(Fraction(form.round(torch.tensor(x, dtype=torch.float64)).item()) - Fraction(x))
            assert error * 2 <= Fraction(form.ulp(x))

    @given(st.sampled_from(ALL), st.floats(allow_nan=False, allow_infinity=False))
    def test_grows_with_magnitude_and_ignores_sign(self, form: Format, x: float) -> None:
        assert form.ulp(x) == form.ulp(-x)
        assert form.smallest_subnormal <= form.ulp(x) <= form.ulp(2 * x) or math.isinf(2 * x)

    @pytest.mark.parametrize("form", ALL, ids=ids)
    def test_at_the_ends(self, form: Format) -> None:
        assert form.ulp(1.0) == form.eps
        assert form.ulp(0.0) == form.smallest_subnormal == form.ulp(form.smallest_normal)
        assert form.ulp(1e300) == form.ulp(form.max)
        assert form.ulp(math.inf) == form.ulp(-math.inf) == math.inf
        assert math.isnan(form.ulp(math.nan))

    def test_of_a_tensor_is_float32_or_wider(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert FP32.ulp(torch.zeros(2, dtype=dtype)).dtype is torch.float32
            assert FP32.ulp(torch.zeros(2, dtype=dtype))[0].item() == 2.0**-149
        assert FP16.ulp(torch.zeros(2, dtype=torch.float64)).dtype is torch.float64

    def test_refuses_integers(self) -> None:
        with pytest.raises(FormatError, match=r"Format\.ulp takes a floating tensor and got torch\.int64"):
            FP16.ulp(torch.arange(3))


EXMY = ("e2m0", "e3m0-noinf", "e2m1-noinf-nonan", "e3m2-noinf-nonan", "e4m3", "e4m3-noinf", "e4m3-nosub", "e5m2",
        "e3m4-noinf-nonan-nosub", "e4m6", "e2m3", "e3m2-nosub")  # fmt: skip


def described(form: Format) -> list[Fraction]:
    """Return the non-negative finite numbers of a format from its description: exponent field by exponent field."""
    numbers = {Fraction(0)}
    fields, fractions = 2**form.exponent_bits, 2**form.mantissa_bits
    for field in range(fields - form.has_inf):
        for fraction in range(fractions):
            if field == fields - 1 and form.has_nan and fraction == fractions - 1:
                continue  # without infinities nan has the largest pattern
            if field:
                numbers.add(Fraction(fractions + fraction, fractions) * Fraction(2) ** (field - form.bias))
            elif form.has_subnormals:
                numbers.add(Fraction(fraction, fractions) * Fraction(2) ** (1 - form.bias))
    return sorted(numbers)


class TestDescribedFormats:
    @pytest.mark.parametrize("name", EXMY)
    def test_properties_follow_from_the_numbers(self, name: str) -> None:
        form = format_of(name)
        numbers = described(form)
        assert Fraction(form.max) == numbers[-1]
        assert Fraction(form.smallest_subnormal) == numbers[1]
        assert form.bits == 1 + form.exponent_bits + form.mantissa_bits and form.torch_dtype is None

    @pytest.mark.parametrize("name", EXMY)
    def test_rounding_finds_the_nearest_number(self, name: str) -> None:
        form = format_of(name)
        numbers = described(form)
        points = [
            a + (b - a) * Fraction(k, 8) for a, b in zip(numbers[:-1], numbers[1:], strict=True) for k in range(9)
        ]
        x = torch.tensor([float(p) for p in points], dtype=torch.float64)
        for value, rounded in zip(x.tolist(), form.round(x).tolist(), strict=True):
            place = bisect.bisect(numbers, Fraction(value))
            best = min(abs(Fraction(value) - n) for n in numbers[max(0, place - 1) : place + 1])
            assert Fraction(rounded) in numbers[max(0, place - 1) : place + 1]
            assert abs(Fraction(value) - Fraction(rounded)) == best
        assert torch.equal(form.round(-x), -form.round(x))

    def test_names_of_known_formats_describe_the_same_numbers(self) -> None:
        x = torch.randn(4096) * torch.exp2(torch.randint(-40, 40, (4096,)).float())
        for name, known in (("e5m10", FP16), ("e8m7", BF16), ("e4m3-noinf", E4M3), ("e5m2", E5M2), ("e8m10", TF32)):
            assert torch.equal(format_of(name).round(x), known.round(x))

    def test_without_subnormals_the_gap_around_zero_is_one_step(self) -> None:
        form = format_of("e4m3-nosub")
        smallest = form.smallest_normal
        x = torch.tensor([0.49, 0.5, 0.51, 0.99, 1.0]) * smallest
        assert form.round(x).tolist() == [0.0, 0.0, smallest, smallest, smallest]
        assert form.ulp(smallest / 3) == smallest

    @pytest.mark.parametrize("name", ["e1m3", "e9m3", "e4m24"])
    def test_bits_that_fp32_cannot_carry_are_refused(self, name: str) -> None:
        with pytest.raises(FormatError, match=f"format '{name}': .* bits; expected"):
            format_of(name)


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fp8_e5m2", "e4m3", "e5m10", "e2m1", "e5m2-"])
@pytest.mark.parametrize("saturate", [False, True])
def test_a_narrow_format_rounds_fp32_as_float64(name: str, saturate: bool) -> None:
    form = (
        Format(name="e5m2", exponent_bits=5, mantissa_bits=2, has_subnormals=False)
        if name == "e5m2-"
        else format_of(name)
    )
    bits = torch.arange(0, 1 << 32, 4093, dtype=torch.int64)  # every sign and exponent, and mantissas of all kinds
    x = bits.to(torch.int32).view(torch.float32)
    torch.testing.assert_close(
        form.round(x, saturate=saturate),
        form.round(x.double(), saturate=saturate).float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
