"""Losses of logits: the two forms of their gradient agree, the operators' schemas, and the kernels on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from halfstep.kernels import ops
from halfstep.kernels.choose import gradient_into, kernels_take_logits, losses, row_sums
from halfstep.kernels.native.calls import ALONE
from halfstep.kernels.reference.cross_entropy import gradient, losses_of_sums, shares, smoothed


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_gradient_in_place_is_the_differentiable_one_rounded_once(dtype: torch.dtype, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5, 3, generator=generator).to(dtype)
    target = torch.randint(0, 5, (8, 3), generator=generator)
    grad = torch.randn(8, 3, generator=generator).to(torch.float64 if dtype is torch.float64 else torch.float32)
    share = shares(grad, target, None, 2, smoothing, 5)
    want = gradient(logits, share)
    got = gradient_into(logits, logits, share, torch.empty(0))
    assert got is logits and torch.allclose(got.double(), want.double(), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_operators_say_what_they_give() -> None:
    logits = torch.empty(4, 5, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(4, device="meta")
    labels = torch.empty(4, dtype=torch.long, device="meta")
    sums = tuple(torch.empty(4, device="meta") for _ in range(3))
    opcheck(ops.row_sums_, (*sums, logits, labels, None, 0), test_utils=("test_schema", "test_faketensor"))
    given = (logits, rows, labels, rows, rows, rows, None, 0)
    opcheck(ops.logits_gradient, given, {"out": logits.clone()}, test_utils=("test_schema", "test_faketensor"))


def test_logits_that_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.ones(4, 6, dtype=torch.bfloat16)
    assert kernels_take_logits(logits) and kernels_take_logits(logits[::2, :3])
    for other in (logits.float(), logits.t(), logits[None]):
        assert not kernels_take_logits(other)
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    assert not kernels_take_logits(logits)


# ------------------------------------------------------------------ the kernels on a CPU

SIZES = [(3, 1), (5, 2), (4, 63), (4, 64), (3, 65), (2, 4097), (2, 50257)]


def rows_of(
    rows: int, classes: int, dtype: torch.dtype, *, weighted: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Logits with a gap after each row, targets of which one is ignored (1), class weights, gradients of losses."""
    generator = torch.Generator().manual_seed(classes)
    logits = (torch.randn(rows, classes + 3, generator=generator) * 5).to(dtype)[:, :classes]
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[-1] = min(1, classes - 1)
    weight = torch.rand(classes, generator=generator) if weighted else None
    return logits, target, weight, torch.randn(rows, generator=generator)


@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.2, False), (0.0, True), (0.2, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_are_exact_to_fp64(size: tuple[int, int], dtype: torch.dtype, smoothing: float, weighted: bool) -> None:
    logits, target, weight, seed = rows_of(*size, dtype, weighted=weighted)
    assert kernels_take_logits(logits)
    exact, wide = logits.double().requires_grad_(), None if weight is None else weight.double()
    want = F.cross_entropy(
        exact, target, wide, ignore_index=1, reduction="none", label_smoothing=smoothing
    )  # of all classes that count
    got, lse = losses(logits, target, weight, 1, smoothing)
    # rounded once from fp64; exp within an ulp, 2**-23, and a sum of 64 numbers at a time, whose roundings cancel
    assert ((got - want).abs() <= 2.0**-22 + 2.0**-24 * want).all()
    (true,) = torch.autograd.grad(want, exact, seed.double())
    share = shares(seed, target, weight, 1, smoothing, size[1])
    grad = gradient_into(torch.empty_like(logits), logits, share, lse)
    assert grad.dtype is dtype
    half_ulp = torch.maximum(true.abs() * torch.finfo(dtype).eps, torch.tensor(torch.finfo(dtype).smallest_normal)) / 2
    half_ulp[true.abs() < torch.finfo(dtype).smallest_normal] *= torch.finfo(dtype).eps
    assert ((grad - true).abs() <= 1.01 * half_ulp + 2.0**-22 * seed.abs()[:, None]).all()
    assert torch.equal(gradient_into(logits, logits, share, lse), grad)  # in place, between the gaps


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.2, True)])
@pytest.mark.parametrize("first", [1, 4096])
def test_sums_and_gradients_of_classes_in_parts_are_those_of_all(
    first: int, smoothing: float, weighted: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFSTEP_NATIVE", "1" if kernels else "0")
    logits, target, weight, seed = rows_of(4, 5000, torch.bfloat16, weighted=weighted)
    target[:3] = torch.tensor([0, 4097, 4098 if weighted else 5000])  # in either part, and no class
    logits[1, :first] = -math.inf
    by_class = smoothed(smoothing, weight, 5000, logits)
    whole, whole_lse = losses_of_sums(row_sums(logits, target, by_class), target, weight, 1, smoothing, by_class)
    sums = row_sums(logits[:, :first], target, by_class)
    sums = row_sums(logits[:, first:], target, by_class, first, sums)
    each, lse = losses_of_sums(sums, target, weight, 1, smoothing, by_class)
    torch.testing.assert_close((each, lse), (whole, whole_lse), rtol=2.0**-20, atol=2.0**-20, equal_nan=True)
    assert each.isnan().tolist() == [False, False, not weighted, False]
    share = shares(seed, target, weight, 1, smoothing, 5000)
    want = gradient_into(torch.empty_like(logits), logits, share, lse)
    for part, begin in ((logits[:, :first], 0), (logits[:, first:], first)):
        got = gradient_into(torch.empty_like(part), part, share, lse, begin)
        assert torch.equal(got.isnan(), want[:, begin:][:, : got.shape[1]].isnan())
        torch.testing.assert_close(got, want[:, begin:][:, : got.shape[1]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exponential_is_within_an_ulp(dtype: torch.dtype) -> None:
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    below = patterns[patterns <= 18]  # all such numbers; further below, the fp64 sum with 1 rounds more than exp
    logits = torch.stack([torch.zeros_like(below), -below], 1)
    want = torch.log1p(torch.exp(-below.double()))
    got, _ = losses(logits, torch.zeros(len(below), dtype=torch.long), None, -100, 0.0)
    assert ((got - want).abs() <= (2.0**-23 + 2.0**-24) * want).all()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    logits, target, _, seed = rows_of(31, 4096, torch.bfloat16)
    share = shares(seed, target, None, -100, 0.0, 4096)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            each, lse = losses(logits, target, None, -100, 0.0)
            found.append((each, gradient_into(torch.empty_like(logits), logits, share, lse)))
    finally:
        torch.set_num_threads(before)
    assert logits.numel() > ALONE["loss"]
    for each, gradient_ in found[1:]:
        assert torch.equal(each, found[0][0]) and torch.equal(gradient_, found[0][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_as_in_torch(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1, -inf, 2], [1, inf, 2], [-inf, -inf, -inf], [nan, 1, 2], [1, 2, nan]]).to(dtype)
    wide = logits.float().requires_grad_()
    for label in range(3):
        target = torch.full((5,), label)
        want = F.cross_entropy(wide, target, reduction="none")
        (true,) = torch.autograd.grad(want.sum(), wide)
        got, lse = losses(logits, target, None, -100, 0.0)
        share = shares(torch.ones(5), target, None, -100, 0.0, 3)
        grad = gradient_into(torch.empty_like(logits), logits, share, lse)
        assert torch.allclose(got.float(), want, equal_nan=True)
        assert torch.allclose(grad.float(), true, equal_nan=True, rtol=1e-2)


def test_probabilities_that_are_subnormal_are_zero() -> None:
    logits = torch.tensor([[0.0, -87.0, -87.5, -200.0]]).bfloat16()
    share = shares(torch.ones(1), torch.tensor([0]), None, -100, 0.0, 4)
    grad = gradient_into(logits, logits, share, row_sums(logits, share.label, None).lse)[0]
    assert grad[1:].tolist() == [pytest.approx(math.exp(-87.0), rel=4e-3), 0.0, 0.0]


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_a_target_that_is_no_class_is_refused(wrong: int) -> None:
    logits, target = torch.ones(3, 3, dtype=torch.bfloat16), torch.tensor([0, wrong, 1])
    with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds\."):
        losses(logits, target, None, -100, 0.0)
    assert losses(logits, target, None, wrong, 0.0)[0][1] == 0.0
