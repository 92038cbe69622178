"""What one call costs: bytes, launches, casts, and what operators declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.testing import DeclarationError, declare_traffic, traffic
from halfstep.testing.traffic import Cost, cost_of

A = torch.ops.aten


@pytest.fixture
def nothing_declared() -> Iterator[None]:
    before = dict(traffic._DECLARED)
    yield
    traffic._DECLARED.clear()
    traffic._DECLARED.update(before)


def cost(operator: Any, *args: Any, **kwargs: Any) -> Cost:
    return cost_of(operator, args, kwargs, operator(*args, **kwargs))


def test_an_operator_reads_its_arguments_and_writes_its_result() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    assert cost(A.mm.default, a, b) == Cost(read=4 * (32 + 16), written=4 * 8, launches=1, kernels=1)


def test_what_is_changed_in_place_is_read_and_written() -> None:
    assert cost(A.add_.Tensor, torch.ones(8), torch.ones(8)) == Cost(read=64, written=32, launches=1, kernels=1)


@pytest.mark.parametrize("operator", [A.view.default, A.empty_like.default, A.t.default, A.detach.default])
def test_views_and_allocations_are_free(operator: Any) -> None:
    arguments = (torch.ones(4, 2), [8]) if operator is A.view.default else (torch.ones(4, 2),)
    assert cost(operator, *arguments) == Cost()


def test_what_is_only_overwritten_is_not_read() -> None:
    assert cost(A.zero_.default, torch.ones(8)) == Cost(written=32, launches=1, kernels=1)
    assert cost(A.copy_.default, torch.ones(8), torch.ones(8)) == Cost(read=32, written=32, launches=1, kernels=1)
    out = torch.ones(8)
    assert cost(A.mul.out, torch.ones(8), torch.ones(8), out=out) == Cost(read=64, written=32, launches=1, kernels=1)


def test_an_expanded_tensor_has_its_elements_once() -> None:
    assert cost(A.clone.default, torch.ones(1, 8).expand(100, 8)).read == 32


def test_a_change_of_format_is_a_cast_if_it_is_all_an_operator_does() -> None:
    wide, low = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    assert len(cost(A._to_copy.default, wide, dtype=torch.bfloat16).casts) == 1
    assert len(cost(A.copy_.default, low, wide).casts) == 1
    assert len(cost(A._foreach_copy_.default, [low, low.clone()], [wide, wide]).casts) == 2
    assert not cost(A.copy_.default, wide.clone(), wide).casts
    assert not cost(A._to_copy.default, wide, dtype=torch.float32).casts
    assert not cost(A._to_copy.default, wide, dtype=torch.int32).casts  # no floating format
    assert not cost(A._to_copy.default, torch.ones(1), dtype=torch.bfloat16).casts  # one number
    assert not cost(A.linalg_vector_norm.default, low, dtype=torch.float32).casts  # inside an operator that computes


def test_multi_tensor_functions_are_one_launch_and_as_many_kernels_as_they_need() -> None:
    many = [torch.ones(2) for _ in range(120)]
    assert cost(A._foreach_mul_.Scalar, many, 2.0) == Cost(read=960, written=960, launches=1, kernels=2)
    assert cost(A._foreach_norm.Scalar, many[:10]).kernels == 3  # with what clears and sums up partial results
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    assert cost(A._foreach_mul_.Scalar, mixed, 2.0).kernels == 2  # one by one


@pytest.mark.parametrize("scaled", [True, False])
def test_fused_optimizers_write_gradients_only_to_unscale_them(scaled: bool) -> None:
    lists = [[torch.ones(100)] for _ in range(4)]
    steps = [torch.ones(())]
    options: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False, "grad_scale": torch.ones(()) if scaled else None}
    found = cost(A._fused_adamw_.default, *lists, [], steps, **options)
    extra = 4 if scaled else 0
    assert (found.read, found.written) == (4 * 400 + 4 + extra, (4 if scaled else 3) * 400)


# ------------------------------------------------------------------------------------------ custom operators


@torch.library.custom_op("halfstep_tests::decay_", mutates_args={"weights"})
def decay_(weights: Tensor, factors: Tensor, mask: Tensor) -> Tensor:
    weights.mul_(factors)
    return weights.sum()


def call() -> Cost:
    arguments = torch.ones(100), torch.ones(100), torch.ones(100)
    return cost_of(torch.ops.halfstep_tests.decay_.default, arguments, {}, torch.ones(()))


def test_a_custom_operator_is_read_from_its_schema() -> None:
    assert call() == Cost(read=1200, written=400, launches=1, kernels=1)


@pytest.mark.usefixtures("nothing_declared")
def test_a_custom_operator_may_say_what_it_reads_and_writes() -> None:
    def extra(call: Any) -> tuple[int, int]:
        return 8 * call["mask"].numel(), 0

    declare_traffic(
        "halfstep_tests::decay_", reads=("weights", "factors", "factors"), writes=("weights",), extra=extra, launches=2
    )
    assert call() == Cost(read=1200 + 800, written=400, launches=2, kernels=2)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"reads": ["weight"], "writes": ["weights"]}, "'weight' is none of its arguments"),
        ({"reads": ["weights"], "writes": []}, r"it writes \['weights'\], and the declaration leaves that out"),
        ({"reads": ["result"], "writes": ["weights"]}, "'result' is none of its arguments"),
        ({"reads": [], "writes": ["weights"], "launches": 0}, "launches=0"),
    ],
)
@pytest.mark.usefixtures("nothing_declared")
def test_a_declaration_is_held_to_the_schema(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare_traffic("halfstep_tests::decay_", **declared)
    assert call().read == 1200  # as before


@pytest.mark.parametrize("extra", [lambda call: (-1200, 0), lambda call: (0, -400)])
@pytest.mark.usefixtures("nothing_declared")
def test_extra_traffic_takes_nothing_back(extra: Callable[[Any], tuple[int, int]]) -> None:
    declare_traffic("halfstep_tests::decay_", reads=("weights",), writes=("weights",), extra=extra)
    with pytest.raises(DeclarationError, match="bytes are not negative"):
        call()


@pytest.mark.usefixtures("nothing_declared")
def test_a_declaration_may_come_before_the_operator() -> None:
    declare_traffic("halfstep_tests::later", reads=("absent",), writes=())

    @torch.library.custom_op("halfstep_tests::later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(DeclarationError, match="'absent' is none of its arguments"):
        cost(torch.ops.halfstep_tests.later.default, torch.ones(2))
