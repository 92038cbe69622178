"""The CUDA kernels on a GPU: the same bits as the reference, without a wait, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from halfstep.kernels import ops
from halfstep.kernels.choose import gradient_into, load_kernels, losses
from halfstep.kernels.reference import exponents
from halfstep.kernels.reference import operators as reference
from halfstep.kernels.reference.cross_entropy import shares
from tests.kernels.cases import (
    BF16,
    COMBINATIONS,
    DTYPES,
    FP16,
    FP32,
    OPTIONS,
    Case,
    Options,
    assert_is_reference,
    assert_same,
    case,
    counted_tensors,
    expect,
    run,
)

pytestmark = pytest.mark.gpu

OPERATORS = ops.UPDATES
ADAMW, PLAIN_SGD = OPTIONS[0], OPTIONS[4]
SIZES = (1, 1030, 4096, 100_003, 0)


@pytest.fixture(autouse=True)
def usable() -> None:
    assert load_kernels("cuda") == ""


@contextmanager
def no_waits() -> Iterator[None]:
    """Make a wait for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.method)
@pytest.mark.parametrize(("form", "low", "gradient", "state"), COMBINATIONS)
def test_an_update_on_a_gpu_is_the_reference_bit_for_bit(
    options: Options, form: str, low: torch.dtype, gradient: torch.dtype, state: torch.dtype
) -> None:
    momentum = options is not PLAIN_SGD
    given = case(options.method, form, low, gradient, state, SIZES, momentum=momentum)
    assert_is_reference(OPERATORS[options.method], options.method, given, options.numbers, "cuda")


def test_millions_of_numbers_on_a_gpu_are_the_reference_s() -> None:
    given = case("adam", "split", BF16, BF16, FP32, (5_000_001, 3))
    assert_is_reference(OPERATORS["adam"], "adam", given, ADAMW.numbers, "cuda")


def test_thousands_of_parameters_on_a_gpu_are_the_reference_s() -> None:
    given = case("adam", "stochastic", BF16, BF16, BF16, [1 + n % 70 for n in range(3000)])
    assert_is_reference(OPERATORS["adam"], "adam", given, ADAMW.numbers, "cuda")


def test_a_bad_step_on_a_gpu_writes_nothing() -> None:
    given = case("adam", "kahan", BF16, BF16, BF16)
    given.bad = torch.tensor(True)
    assert_is_reference(OPERATORS["adam"], "adam", given, ADAMW.numbers, "cuda")


def test_norms_and_verdict_on_a_gpu_are_right() -> None:
    sizes = (1, 7, 2048, 0, 1_000_003)
    tensors = [torch.randn(size).to(dtype) for dtype in (FP32, BF16, FP16) for size in sizes]
    there = [t.cuda() for t in tensors]
    found = ops.norms(there)
    exact = torch.stack([t.double().norm().float() for t in tensors])
    torch.testing.assert_close(found.cpu(), exact, rtol=2**-21, atol=0)
    assert torch.equal(found, ops.norms(there))
    verdict = ops.check_norms(found, torch.tensor(8.0, device="cuda"), 1.0)
    expected = reference.check_norms(found.cpu(), torch.tensor(8.0), 1.0)
    for one, other in zip(verdict, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2**-22, atol=0)
    there[-1][5] = torch.inf
    assert ops.check_norms(ops.norms(there), None, None)[1]


def tail(given: Case) -> None:
    """Make a step as a training step does: norms, verdict, update."""
    _, given.bad, given.factor = ops.check_norms(ops.norms(given.gradients), None, 1.0)
    run(OPERATORS["adam"], given, ADAMW.numbers)


def test_a_step_waits_for_nothing() -> None:
    given = case("adam", "split", BF16, BF16, FP32).to("cuda")
    before = [weight.clone() for weight in given.lists[0]]
    with no_waits():  # a wait raises
        for _ in range(3):
            given.gradients = [g.clone() for g in given.gradients]  # elsewhere, so that the tables are made anew
            tail(given)
    assert not bool(given.bad) and not all(map(torch.equal, before, given.lists[0]))


def test_a_captured_step_replays_with_new_gradients() -> None:
    given = case("adam", "stochastic", BF16, BF16, BF16, (5000, 7)).to("cuda")
    warm = given.to("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tail(warm)
    torch.cuda.current_stream().wait_stream(stream)
    expected = given.to("cpu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tail(given)
    for _ in range(3):
        for gradient in given.gradients:
            gradient.normal_()
        given.draws[1] += 1
        graph.replay()
        expected.gradients = [g.cpu() for g in given.gradients]
        expected.draws = given.draws.cpu()
        expected.factor = given.factor.cpu()  # its norm may differ by an ulp from the reference's
        assert not given.bad
        torch.testing.assert_close(
            reference.check_norms(reference.norms(expected.gradients), None, 1.0)[2],
            expected.factor,
            rtol=2**-20,
            atol=0,
        )
        expect("adam", expected, ADAMW.numbers)
        assert_same(given, expected)


def test_a_captured_step_keeps_its_tables() -> None:
    given = case("sgd", "plain", FP32, FP32, FP32, (300,)).to("cuda")
    run(OPERATORS["sgd"], given, OPTIONS[2].numbers)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(OPERATORS["sgd"], given, OPTIONS[2].numbers)
    for size in range(1, 400):  # other tables would take the place of what was forgotten
        run(OPERATORS["sgd"], case("sgd", "plain", FP32, FP32, FP32, (size,)).to("cuda"), OPTIONS[2].numbers)
    expected = given.to("cpu")
    graph.replay()
    expect("sgd", expected, OPTIONS[2].numbers)
    assert_same(given, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_the_current_one() -> None:
    given = case("adam", "plain", BF16, BF16, FP32)
    assert_is_reference(OPERATORS["adam"], "adam", given, ADAMW.numbers, "cuda:1")


def test_exponents_on_a_gpu_are_counted_as_on_a_cpu_and_without_a_wait() -> None:
    given = [x for dtype in DTYPES for size in (5, 70_001, 0) for x in counted_tensors(dtype, size)]
    there = [x.cuda() for x in given]
    rows, found = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cuda")
    exponents.count_(rows, given)
    with no_waits():
        ops.exponents_(found, there)
    assert torch.equal(found.cpu(), rows)


def test_equal_rows_of_an_odd_number_of_classes_have_equal_losses_wherever_they_begin() -> None:
    classes = 50257  # so that eight rows begin at all multiples of 2 bytes
    logits = torch.randn(classes, device="cuda").bfloat16().expand(8, classes).contiguous()
    target = torch.full((8,), 7, device="cuda")
    each, lse = losses(logits, target, None, -100, 0.0)
    exact = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    assert torch.equal(each, each[:1].expand(8)) and torch.allclose(each.double(), exact, rtol=1e-5)
    share = shares(torch.ones(8, device="cuda"), target, None, -100, 0.0, classes)
    gradient = gradient_into(torch.empty_like(logits), logits, share, lse)
    assert torch.equal(gradient, gradient[:1].expand(8, classes))
    wanted = exact.new_zeros(8, classes).scatter_(1, target[:, None], -1.0) + logits.double().softmax(1)
    assert torch.allclose(gradient.double(), wanted, rtol=2**-8, atol=1e-7)


def test_exponents_of_tensors_that_begin_anywhere_are_those_of_a_cpu() -> None:
    memory = torch.randn(9000)
    given = [memory[begin : begin + size] for begin in (1, 3) for size in (0, 3, 2046, 8103)]
    there = memory.cuda()
    rows, found = exponents.rows(len(given), "cpu"), exponents.rows(len(given), "cuda")
    exponents.count_(rows, given)
    ops.exponents_(found, [there[x.storage_offset() : x.storage_offset() + len(x)] for x in given])
    assert torch.equal(found.cpu(), rows)
