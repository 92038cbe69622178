"""The CUDA kernels in Triton's interpreter, on CPU tensors: run by test_triton.py in a process of its own.

Whether Triton interprets or compiles is settled when it is imported, for the whole process.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime import interpreter

from halfstep.kernels.optimizers import BY_OPERATOR
from halfstep.kernels.reference import exponents
from halfstep.kernels.reference import operators as reference
from halfstep.kernels.reference.cross_entropy import RowSums, losses_of_sums, shares, smoothed
from halfstep.kernels.triton import exponents as exponent_launchers
from halfstep.kernels.triton import loss as loss_launchers
from halfstep.kernels.triton import norms as norm_launchers
from halfstep.kernels.triton import tables, words
from halfstep.kernels.triton import updates as launchers
from halfstep.policy.scale_rule import FP32_MAX, ScaleRule
from halfstep.scale.rule import advance, initial_state, state_to_host
from tests.kernels.cases import (
    BF16,
    COMBINATIONS,
    DTYPES,
    FORMS,
    FP16,
    FP32,
    OPTIONS,
    Options,
    assert_is_reference,
    assert_same,
    case,
    counted_tensors,
    expect,
    run,
)
from tests.products import sampled

OPERATORS: dict[str, Callable[..., None]] = {
    spec.name: functools.partial(launchers.update, spec) for spec in BY_OPERATOR.values()
}
ADAMW, ADAM, SGD, NESTEROV, PLAIN_SGD, LION, NADAM, COUPLED_NADAM = OPTIONS


# The interpreter is numpy, which warns where a GPU computes inf or nan.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

PATCHES = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Let loops count to a tensor of one number: Triton 3.6 converts its array, which numpy refuses from 2.4 on."""
    PATCHES(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patched


def name(value: object) -> str:
    return value.method if isinstance(value, Options) else str(value).removeprefix("torch.")


# ------------------------------------------------------------------ updates


@pytest.mark.parametrize(("form", "low", "gradient", "state"), COMBINATIONS, ids=name)
def test_adam_is_the_reference_bit_for_bit(
    form: str, low: torch.dtype, gradient: torch.dtype, state: torch.dtype
) -> None:
    assert_is_reference(OPERATORS["adam"], "adam", case("adam", form, low, gradient, state), ADAMW.numbers, "cpu")


@pytest.mark.parametrize("options", [NESTEROV, LION, NADAM], ids=name)
@pytest.mark.parametrize(("form", "low", "gradient", "state"), COMBINATIONS[::5], ids=name)
def test_an_update_is_the_reference_bit_for_bit(
    options: Options, form: str, low: torch.dtype, gradient: torch.dtype, state: torch.dtype
) -> None:
    given = case(options.method, form, low, gradient, state)
    assert_is_reference(OPERATORS[options.method], options.method, given, options.numbers, "cpu")


@pytest.mark.parametrize("options", [ADAM, SGD, PLAIN_SGD, COUPLED_NADAM], ids=name)
@pytest.mark.parametrize(("form", "low"), FORMS[4:6], ids=name)
def test_options_are_the_reference_s(options: Options, form: str, low: torch.dtype) -> None:
    momentum = options is not PLAIN_SGD
    given = case(options.method, form, low, BF16, FP32, momentum=momentum)
    assert_is_reference(OPERATORS[options.method], options.method, given, options.numbers, "cpu")


def test_many_steps_are_the_reference_s() -> None:
    found = case("adam", "stochastic", BF16, BF16, BF16, (33,))
    expected = found.to("cpu")
    for _ in range(8):
        run(OPERATORS["adam"], found, ADAMW.numbers)
        expect("adam", expected, ADAMW.numbers)
        for some in (found, expected):
            some.draws[1] += 1
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [ADAMW, SGD, LION, NADAM], ids=name)
def test_the_learning_rate_may_be_a_tensor(options: Options, dtype: torch.dtype) -> None:
    given = case(options.method, "split", BF16, BF16, FP32)
    given.rate = torch.tensor(3e-3, dtype=dtype)
    assert_is_reference(OPERATORS[options.method], options.method, given, options.numbers, "cpu")


@pytest.mark.parametrize("options", [ADAMW, SGD, LION, NADAM], ids=name)
def test_a_bad_step_writes_nothing(options: Options) -> None:
    given = case(options.method, "stochastic", BF16, BF16, BF16)
    given.gradients[0][0] = math.nan
    given.bad = torch.tensor(True)
    assert_is_reference(OPERATORS[options.method], options.method, given, options.numbers, "cpu")


def test_a_learning_rate_of_zero_is_one() -> None:
    given = case("sgd", "plain", FP32, FP32, FP32)
    given.lr = 0.0
    assert_is_reference(OPERATORS["sgd"], "sgd", given, SGD.numbers, "cpu")


def test_values_at_the_edges_of_formats_are_the_reference_s() -> None:
    small, large = [0.0, -0.0, 1e-45, -1e-40, 6e-8], [65504.0, -7e4, 3.4e38, -3.39e38, math.inf, -math.inf, math.nan]
    edges = torch.tensor(small + large)
    for form, low in FORMS:
        given = case("sgd", form, low, FP32, FP32, (len(edges),), momentum=False)
        given.lists[0][0].copy_(edges)
        given.gradients[0].copy_(edges.roll(1))
        expected = given.to("cpu")
        expect("sgd", expected, PLAIN_SGD.numbers)
        run(OPERATORS["sgd"], given, PLAIN_SGD.numbers)
        for one, other in zip(given.lists[0] + given.lists[1], expected.lists[0] + expected.lists[1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 999, 100_000, 2**24 - 2])
def test_bias_corrections_are_right_to_an_ulp_after_any_number_of_steps(count: int) -> None:
    found = case("adam", "plain", FP32, FP32, FP32, (5,))
    found.lists[-1] = [torch.tensor(float(count - 1))]
    expected = found.to("cpu")
    run(OPERATORS["adam"], found, ADAM.numbers)
    expect("adam", expected, ADAM.numbers)
    torch.testing.assert_close(found.lists[0][0], expected.lists[0][0], rtol=2**-22, atol=0)
    assert found.lists[-1][0].item() == count


# ------------------------------------------------------------------ lists


def test_lists_may_mix_formats_sizes_and_alignments() -> None:
    sizes = (0, 3, 1024, 1, 1500, 0)
    given = case("adam", "plain", FP32, FP32, FP32, sizes)
    formats = (FP32, BF16, FP16, BF16, FP32, FP32)
    given.lists[0] = [w.to(d) for w, d in zip(given.lists[0], formats, strict=True)]
    given.lists[2] = [m.to(BF16 if n % 2 else FP32) for n, m in enumerate(given.lists[2])]
    given.gradients = [g.to(formats[-n]) for n, g in enumerate(given.gradients)]
    shifted = torch.cat((torch.zeros(1), given.lists[0][4]))[1:]
    assert shifted.data_ptr() % tables.ALIGNMENT
    expected = given.to("cpu")
    expect("adam", expected, ADAMW.numbers)
    given.lists[0][4] = shifted
    run(OPERATORS["adam"], given, ADAMW.numbers)
    assert_same(given, expected)


def test_a_list_of_empty_tensors_counts_its_steps() -> None:
    given = case("adam", "plain", BF16, BF16, FP32, (0, 0))
    run(OPERATORS["adam"], given, ADAMW.numbers)
    assert [step.item() for step in given.lists[-1]] == [1.0, 4.0]
    assert norm_launchers.norms(given.gradients).tolist() == [0.0, 0.0]


def test_every_parameter_gets_noise_of_its_own() -> None:
    given = case("sgd", "stochastic", BF16, BF16, BF16, [1 + n % 5 for n in range(40)])
    assert_is_reference(OPERATORS["sgd"], "sgd", given, SGD.numbers, "cpu")


def test_programs_loop_over_blocks_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SMALL", 0)
    given = case("lion", "kahan", BF16, BF16, BF16, (8 * launchers.BLOCK + 5, 3, 2 * launchers.BLOCK))
    assert_is_reference(OPERATORS["lion"], "lion", given, LION.numbers, "cpu")
    torch.testing.assert_close(norm_launchers.norms(given.gradients), exact_norms(given.gradients))


def test_memory_is_walked_whatever_the_strides() -> None:
    given = case("sgd", "copy", BF16, BF16, FP32, (2 * 3 * 4 * 5,))
    expected = given.to("cpu")
    expect("sgd", expected, SGD.numbers)
    shape, last = (2, 3, 4, 5), torch.channels_last

    def laid(tensor: Tensor) -> Tensor:
        return torch.empty(shape, dtype=tensor.dtype).to(memory_format=last).permute(0, 2, 3, 1).copy_(
            tensor.view(2, 4, 5, 3)
        ).permute(0, 3, 1, 2)  # fmt: skip

    given.lists = [[laid(t) for t in tensors] for tensors in given.lists]
    given.gradients = [laid(t) for t in given.gradients]
    assert given.gradients[0].is_contiguous(memory_format=last)
    run(OPERATORS["sgd"], given, SGD.numbers)
    given.lists = [[t.permute(0, 2, 3, 1).flatten() for t in tensors] for tensors in given.lists]
    assert_same(given, expected)


# ------------------------------------------------------------------ norms


def exact_norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double().norm().float() for t in tensors])


def ulps(found: Tensor, expected: Tensor) -> int:
    return int((found.view(torch.int32) - expected.view(torch.int32)).abs().max())


def test_norms_are_right_to_two_ulps_in_every_format() -> None:
    sizes = (1, 7, 2048, 5000, 0, 2047)
    tensors = [torch.randn(size).to(dtype) for dtype in (FP32, BF16, FP16) for size in sizes]
    assert ulps(norm_launchers.norms(tensors), exact_norms(tensors)) <= 2


def test_norms_are_the_same_bits_every_time() -> None:
    tensors = [torch.randn(5000) for _ in range(3)]
    first = norm_launchers.norms(tensors)
    assert torch.equal(first, norm_launchers.norms(tensors))
    assert torch.equal(first, norm_launchers.norms([t.clone() for t in tensors]))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_number_that_is_not_finite_shows_in_its_own_norm(value: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3000, dtype=dtype) for _ in range(3)]
    tensors[1][2999] = value
    finite = norm_launchers.norms(tensors).isfinite().tolist()
    assert finite == [True, False, True]


@pytest.mark.parametrize("divisor", [None, 1.0, 65536.0])
@pytest.mark.parametrize("clip_norm", [None, 1.0, 1e9])
@pytest.mark.parametrize("count", [1, 3, 1500])
def test_the_verdict_is_the_reference_s_to_an_ulp_of_its_norm(
    divisor: float | None, clip_norm: float | None, count: int
) -> None:
    norms = torch.rand(count) * 1000
    unscale = None if divisor is None else torch.tensor(divisor)
    norm, bad, factor = norm_launchers.check_norms(norms, unscale, clip_norm)
    expected = reference.check_norms(norms, unscale, clip_norm)
    assert ulps(norm, expected[0]) <= 1
    assert not bad
    torch.testing.assert_close(factor, expected[2], rtol=2**-22, atol=0)
    if clip_norm != 1.0:
        assert torch.equal(factor, expected[2])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_verdict_on_what_is_not_finite_is_bad(value: float) -> None:
    norm, bad, _ = norm_launchers.check_norms(torch.tensor([1.0, value]), torch.tensor(2.0), 1.0)
    assert bad and not norm.isfinite()


@pytest.mark.parametrize("found", [torch.tensor(True), torch.tensor(False), torch.tensor(1.0), torch.tensor(0.0)])
@pytest.mark.parametrize("scale", [2.0**-14, 3.0, 2.0**24, 3e38])
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.001, 1 / 1.001)])
def test_the_scale_moves_as_the_pure_rule_moves_it(found: Tensor, scale: float, growth: float, backoff: float) -> None:
    rule = ScaleRule(init=scale, growth=growth, backoff=backoff, interval=2, floor=2.0**-14, ceiling=FP32_MAX)
    state = initial_state(rule, "cpu")
    for _ in range(3):
        want = advance(rule, state, found)
        norm_launchers.advance_(
            state.scale, state.good, state.bad, state.alarm, found, growth, backoff, 2, rule.floor, rule.ceiling
        )
        assert state_to_host(state) == state_to_host(want)


# ------------------------------------------------------------------ exponents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2048, 5001])
def test_exponents_are_those_of_torch_s_operators(dtype: torch.dtype, size: int) -> None:
    given = counted_tensors(dtype, size)
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    for _ in range(2):
        exponent_launchers.exponents_(rows, given)
        exponents.count_(expected, given)
    assert torch.equal(rows, expected)


def test_tensors_of_all_formats_are_counted_together() -> None:
    given = [x for dtype in DTYPES for x in counted_tensors(dtype, 31)]
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    exponent_launchers.exponents_(rows, given)
    exponents.count_(expected, given)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_begin_anywhere_are_counted_whole(dtype: torch.dtype) -> None:
    memory = counted_tensors(dtype, 9000)[0]
    given = [memory[begin : begin + size] for begin in (1, 7) for size in (0, 3, 2046, 4103)]
    assert any(x.data_ptr() % tables.ALIGNMENT for x in given)
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    exponent_launchers.exponents_(rows, given)
    exponents.count_(expected, given)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(("dtype", "exponent"), sampled(DTYPES, (-300, -140, -120, -3, 110, 126, 300)))
def test_numbers_within_and_beyond_a_window_of_exponents_are_counted_once(dtype: torch.dtype, exponent: int) -> None:
    within = (torch.randn(4096, dtype=torch.float64).abs().clamp(min=2.0**-20) * 2.0**exponent).to(dtype)
    within[:50], within[1024:1100] = 0.0, torch.tensor(2.0**exponent).to(dtype)
    beyond = within.clone()
    beyond[3000:3002] = torch.tensor([1e-6, math.inf]).to(dtype)
    given = [within, -within, beyond]
    rows, expected = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cpu")
    exponent_launchers.exponents_(rows, given)
    exponents.count_(expected, given)
    assert torch.equal(rows, expected)


def test_every_subnormal_power_of_two_and_its_neighbours_are_counted() -> None:
    bits = torch.arange(1, 2**12, dtype=torch.int32)
    powers = 2 ** torch.arange(12, 24)
    around = torch.cat([bits, *(powers + n for n in (-1, 0, 1))]).to(torch.int32).view(torch.float32)
    rows, expected = exponents.rows(1, "cpu"), exponents.rows(1, "cpu")
    exponent_launchers.exponents_(rows, [around])
    exponents.count_(expected, [around])
    assert torch.equal(rows, expected)


# ------------------------------------------------------------------ losses

PAIRS = {0, 4, 8, 17, 19, 21}
"""Rows of `LOSSES` that have every pair of values; the others run with `make test-hours`."""

LOSSES = [
    pytest.param(*row, marks=() if number in PAIRS else pytest.mark.hours)
    for number, row in enumerate(itertools.product((BF16, FP16), (0.0, 0.3), (False, True), (5, 64, 77)))
]


def losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, first: int | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of every target and the log of its row's sum; classes in one part, or the second from `first` on."""
    by_class = smoothed(smoothing, weight, logits.shape[1], logits)
    sums = RowSums(*(torch.full((len(logits),), math.nan) for _ in range(3)))
    loss_launchers.row_sums_(*sums, logits[:, :first], target, by_class, 0)
    if first is not None:
        loss_launchers.row_sums_(*sums, logits[:, first:], target, by_class, first)
    return losses_of_sums(sums, target, weight, -100, smoothing, by_class)


@pytest.mark.parametrize(("dtype", "smoothing", "weighted", "classes"), LOSSES)
def test_losses_and_gradients_are_fp32_and_rounded_once(
    dtype: torch.dtype, smoothing: float, weighted: bool, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_launchers, "BLOCK", 32)  # several blocks a row
    generator = torch.Generator().manual_seed(classes)
    wider = (torch.randn(6, classes + 3, generator=generator) * 4).to(dtype)
    logits = wider[:, :classes]  # rows that do not follow one another
    logits[1, : classes // 2] = -float("inf")
    target = torch.randint(classes // 2, classes, (6,), generator=generator)
    target[2] = -100
    weight = torch.rand(classes, generator=generator) if weighted else None
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(
        exact, target, None if weight is None else weight.double(), reduction="none", label_smoothing=smoothing
    )
    got, lse = losses(logits, target, weight, smoothing)
    assert got.dtype is torch.float32 and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    seed = torch.randn(6, generator=generator)
    kept = want.isfinite()  # smoothing makes the loss of a class that cannot be infinite
    (true,) = torch.autograd.grad(want[kept], exact, seed.double()[kept])
    share = shares(seed, target, weight, -100, smoothing, classes)
    out = torch.empty_like(logits)
    loss_launchers.gradient(logits, lse, *share, 0, out=out)
    error = (out.double() - true).abs()[kept]
    assert (error <= true.abs()[kept] * torch.finfo(dtype).eps * 0.51 + 1e-6).all()
    first = classes // 2 + 1  # classes in two parts, whose gradients overwrite them
    some, some_lse = losses(logits, target, weight, smoothing, first)
    assert torch.allclose(some, got, rtol=1e-6, atol=1e-6) and torch.allclose(some_lse, lse, rtol=1e-6, atol=1e-6)
    for begin, part in ((0, logits[:, :first]), (first, logits[:, first:])):
        loss_launchers.gradient(part, lse, *share, begin, out=part)
    assert torch.equal(logits, out)


@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.bfloat16, 0.0), (torch.float16, 0.3)])
def test_a_row_has_the_same_bits_wherever_it_begins(
    dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_launchers, "BLOCK", 32)
    rows, target, classes = torch.randn(2, 77).to(dtype), torch.tensor([0, 76]), 77
    share = shares(torch.ones(2), target, None, -100, smoothing, classes)
    expected, lse = losses(rows, target, None, smoothing)
    wanted, got = torch.empty_like(rows), torch.empty_like(rows)
    loss_launchers.gradient(rows, lse, *share, 0, out=wanted)
    for begin, stride in [(0, 80), (1, 80), (3, 77), (6, 79), (7, 77)]:
        logits = torch.full((200,), math.nan, dtype=dtype)[begin:].as_strided((2, classes), (stride, 1))
        logits.copy_(rows)
        found, lse = losses(logits, target, None, smoothing)
        assert torch.equal(found, expected), (begin, stride)
        loss_launchers.gradient(logits, lse, *share, 0, out=got)
        assert torch.equal(got, wanted), (begin, stride)


def test_a_target_that_is_no_class_gives_nan_and_nothing_is_read_there() -> None:
    logits, target = torch.randn(3, 5).bfloat16(), torch.tensor([0, 9, -3])
    each, lse = losses(logits, target, None, 0.0)
    assert each.isnan().tolist() == [False, True, True]
    loss_launchers.gradient(logits, lse, *shares(torch.ones(3), target, None, -100, 0.0, 5), 0, out=logits)
    assert logits.isnan().all(1).tolist() == [False, True, True]


def test_no_rows_have_no_losses() -> None:
    empty = torch.empty(0, 5, dtype=torch.bfloat16)
    assert losses(empty, torch.empty(0, dtype=torch.long), None, 0.0)[0].shape == (0,)


# ------------------------------------------------------------------ noise


@triton.jit
def noise_kernel(draws, out, number, STREAM: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, COUNT).to(tl.int64)
    positions = words.mix((lanes + 4_294_967_290).to(tl.uint32))
    found = words.noise(words.key(draws), number.to(tl.int64), STREAM, positions)
    tl.store(out + lanes, found.to(tl.int32))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345])
def test_noise_is_the_reference_s_beyond_32_bits_of_position_too(seed: int) -> None:
    draws = torch.tensor([seed, 7])
    out = torch.empty(16, dtype=torch.int32)
    for stream in range(3):
        noise_kernel[(1,)](draws, out, 9, STREAM=stream, COUNT=16)
        expected = reference.noise(draws, 9, stream, 10)  # positions are counted modulo 2**32
        assert out[6:].tolist() == expected.tolist()


def test_other_noise_would_be_noticed() -> None:
    given = case("sgd", "stochastic", BF16, FP32, FP32, (64,))
    other = given.to("cpu")
    other.draws[1] += 1
    run(OPERATORS["sgd"], given, SGD.numbers)
    run(OPERATORS["sgd"], other, SGD.numbers)
    with pytest.raises(AssertionError, match=r"weights\[0\]"):
        assert_same(given, other)
