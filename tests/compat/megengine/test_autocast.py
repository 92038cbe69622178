"""megengine.amp: operators by list, the switch, nesting, and what MegEngine gets wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import halfstep as hs
import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp
from halfstep.compat.megengine.amp.autocast import LISTS
from halfstep.errors import PolicyError, RegionError

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.rand(2, 4, 6, 6) + 0.1
V = torch.rand(1, 2, 4, 4, 4)


@pytest.fixture(autouse=True)
def the_switch_is_off_before_and_after() -> Iterator[None]:
    def ambient() -> tuple[Any, ...]:
        return (
            amp.enabled, amp.low_prec_dtype, amp.high_prec_dtype, amp.policy, torch.is_autocast_enabled("cpu"),
            len(torch.overrides._get_current_function_mode_stack()),
        )  # fmt: skip

    before = ambient()
    assert before[:4] == (False, "float16", "float32", amp.MEGENGINE)
    yield
    assert ambient() == before


def product() -> torch.dtype:
    return (X[0, 0] @ X[0, 1]).dtype


Call = Callable[[Tensor], Tensor]
W = torch.rand(3, 4, 3, 3)

LOW: dict[str, Call] = {
    "conv1d": lambda x: F.nn.conv1d(x[:, :, 0], W[:, :, 0]),
    "conv2d": lambda x: F.nn.conv2d(x, W, torch.rand(3)),
    "conv_transpose2d": lambda x: F.nn.conv_transpose2d(x, W.transpose(0, 1)),
    "matmul": lambda x: F.matmul(x, x),
    "matmul transposed": lambda x: F.matmul(x, x, transpose_b=True),
    "batched @": lambda x: x[0] @ x[0],
    "linear": lambda x: F.nn.linear(x, torch.rand(5, 6), torch.rand(5)),
    "batch_norm": lambda x: F.nn.batch_norm(x, training=True),
}
HIGH: dict[str, Call] = {
    "div": lambda x: x / 3,
    "F.div": lambda x: F.div(x, x),
    "number / x": lambda x: 1 / x,
    "**": lambda x: x**2,
    "pow": lambda x: F.pow(x, 3),
    **{name: getattr(F, name) for name in ("exp", "log", "expm1", "log1p", "acos", "asin", "cos", "sin", "tan", "asinh",
       "atanh", "sinh", "cosh", "softplus", "hsigmoid", "logsigmoid", "sqrt")},
    "acosh": lambda x: F.acosh(x + 1),
    "atan2": lambda x: F.atan2(x, x),
    "logaddexp": lambda x: F.logaddexp(x, x),
    "layer_norm": lambda x: F.nn.layer_norm(x, 6, False),
    "group_norm": lambda x: F.nn.group_norm(x, 2, False),
    "norm": lambda x: F.norm(x),
    "normalize": lambda x: F.normalize(x, axis=1),
    "logsoftmax": lambda x: F.nn.logsoftmax(x, 1),
    "logsumexp": lambda x: F.nn.logsumexp(x, 1),
    "mean": lambda x: F.mean(x, 1),
    "x.mean()": lambda x: x.mean(),
    "var": lambda x: F.var(x),
    "std": lambda x: F.std(x),
    "interpolate": lambda x: F.nn.interpolate(x, scale_factor=2),
    "cross_entropy": lambda x: F.nn.cross_entropy(x[:, :, 0, 0], torch.zeros(2, dtype=torch.int32)),
    "binary_cross_entropy": lambda x: F.nn.binary_cross_entropy(x, x > 0.5),
    "square_loss": lambda x: F.nn.square_loss(x, torch.zeros(2, 4, 6, 6)),
    "l1_loss": lambda x: F.nn.l1_loss(x, x),
    "hinge_loss": lambda x: F.nn.hinge_loss(x[:, :, 0, 0], torch.ones(2, 4)),
}  # fmt: skip
INPUT: dict[str, Call] = {
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "max": lambda x: F.max(x, 1),
    "max_pool2d": lambda x: F.nn.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.nn.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.nn.adaptive_avg_pool2d(x, 1),
    "dropout": lambda x: F.nn.dropout(x, 0.5),
    "instance_norm": lambda x: F.nn.instance_norm(x, False),
    "local_response_norm": lambda x: F.nn.local_response_norm(x),
    "add a number": lambda x: x + 1,
    "maximum with a number": lambda x: F.maximum(x, 0.5),
    "add": lambda x: F.add(x, x),
    "concat": lambda x: F.concat([x, x]),
    "flatten": lambda x: F.flatten(x, 1),
}
WIDEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": F.mul,
    "maximum": F.maximum,
    "concat": lambda a, b: F.concat([a, b], 1),
    "stack": lambda a, b: F.stack([a, b]),
    "where": lambda a, b: F.where(a > 0.5, a, b),
}
CURED: dict[str, tuple[Call, torch.dtype, torch.dtype]] = {
    "conv3d": (lambda x: F.nn.conv3d(V, torch.rand(3, 2, 3, 3, 3)), HALF, FP32),
    "conv_transpose3d": (lambda x: F.nn.conv_transpose3d(V, torch.rand(2, 3, 3, 3, 3)), HALF, FP32),
    "softmax": (lambda x: F.nn.softmax(x.half(), 1), FP32, HALF),
    "sum": (lambda x: F.sum(x.half(), 1), FP32, HALF),
    "prod": (lambda x: F.prod(x.half()), FP32, HALF),
    "cumsum": (lambda x: F.cumsum(x.half(), 1), FP32, HALF),
}


@pytest.mark.parametrize("name", LOW)
def test_products_are_low_whatever_comes_in(name: str) -> None:
    with amp.autocast():
        assert LOW[name](X).dtype is LOW[name](X.half()).dtype is HALF


@pytest.mark.parametrize("name", HIGH)
def test_sensitive_operators_are_high_whatever_comes_in(name: str) -> None:
    with amp.autocast():
        assert HIGH[name](X).dtype is HIGH[name](X.half()).dtype is FP32


@pytest.mark.parametrize("name", INPUT)
def test_other_operators_keep_the_format_of_their_input(name: str) -> None:
    with amp.autocast():
        assert INPUT[name](X).dtype is FP32
        assert INPUT[name](X.half()).dtype is HALF


@pytest.mark.parametrize("name", WIDEST)
def test_several_arguments_meet_in_the_widest_format(name: str) -> None:
    with amp.autocast():
        assert WIDEST[name](X.half(), X).dtype is WIDEST[name](X, X.half()).dtype is FP32
        assert WIDEST[name](X.half(), X.half()).dtype is HALF


@pytest.mark.parametrize("name", CURED)
def test_what_the_lists_of_megengine_leave_out_is_cured_unless_asked_for(name: str) -> None:
    call, cured, shipped = CURED[name]
    with amp.autocast():
        assert call(X).dtype is cured
        amp.policy = amp.AS_SHIPPED
        assert call(X).dtype is shipped
    assert amp.policy == amp.MEGENGINE


def test_an_assignment_takes_the_format_of_its_destination() -> None:
    destination = torch.zeros(6, 6)
    with amp.autocast():
        destination[0] = (X[0, 0] @ X[0, 1])[0]
    assert destination.dtype is FP32 and bool(destination[0].any())


def test_integers_and_fp64_are_left_alone() -> None:
    with amp.autocast():
        assert (torch.ones(2, 2, dtype=torch.int32) @ torch.ones(2, 2, dtype=torch.int32)).dtype is torch.int32
        assert (X[0, 0].double() @ X[0, 0].double()).dtype is FP64


def test_the_lists_are_policies_that_can_be_read() -> None:
    assert hs.Policy.from_toml(amp.MEGENGINE.to_toml()) == amp.MEGENGINE
    assert "conv3d" in amp.MEGENGINE.diff(amp.AS_SHIPPED)
    assert amp.MEGENGINE.scale == "megengine"
    for group in ("products", "sensitive", "moments", "promoted", "volumes", "sums"):
        for name in getattr(LISTS, group):
            assert name in hs.policy.operator_names(name)


def test_a_convolution_is_fp16_in_and_fp32_inside_with_one_rounding() -> None:
    conv = nn.Conv2d(4, 3, 3)
    with amp.autocast():
        out = conv(X)
    assert conv.bias is not None
    x, weight, bias = (t.half().float() for t in (X, conv.weight, conv.bias))
    assert torch.equal(out, T.conv2d(x, weight, bias).half())


def test_parameters_statistics_and_gradients_stay_fp32() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    with amp.autocast():
        loss = F.nn.cross_entropy(net(X), torch.zeros(2, dtype=torch.int32))
    loss.backward()
    assert loss.dtype is FP32
    assert (
        {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters() if p.grad is not None} == {FP32}
    )
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    assert norm.running_mean.dtype is FP32 and bool((norm.running_mean != 0).all())


# ---------------------------------------------------------------------- the switch


def test_the_switch_is_a_property_of_the_module() -> None:
    amp.enabled = True
    assert amp.enabled and product() is HALF
    amp.low_prec_dtype = "bfloat16"
    assert amp.low_prec_dtype == "bfloat16" and product() is BF16
    amp.low_prec_dtype = "float16"
    amp.enabled = False
    assert not amp.enabled and product() is FP32


def test_formats_set_while_the_switch_is_off_hold_when_it_is_on() -> None:
    amp.low_prec_dtype = "bfloat16"
    assert product() is FP32
    amp.enabled = True
    assert product() is BF16
    amp.enabled, amp.low_prec_dtype = False, "float16"


def test_leaving_autocast_restores_the_switch() -> None:
    with amp.autocast():
        assert amp.enabled
        amp.enabled = False
        assert product() is FP32
    assert not amp.enabled
    amp.enabled = True
    with amp.autocast(low_prec_dtype="bfloat16"):
        assert amp.low_prec_dtype == "bfloat16" and product() is BF16
        amp.enabled = False
        amp.enabled = True
    assert amp.enabled and product() is HALF
    amp.enabled = False


def test_autocast_that_is_not_enabled_switches_off() -> None:
    with amp.autocast(), amp.autocast(enabled=False):
        assert not amp.enabled and product() is FP32
    amp.enabled = True
    with amp.autocast(enabled=False):
        assert product() is FP32
    amp.enabled = False


def test_different_formats_nest() -> None:
    with amp.autocast(low_prec_dtype="bfloat16"):
        with amp.autocast():
            assert product() is HALF
        assert product() is BF16


def test_one_object_nests_in_itself_and_recursion_leaks_nothing() -> None:
    region = amp.autocast()
    with region, region:
        assert product() is HALF

    @amp.autocast()
    def recursive(depth: int) -> torch.dtype:
        return recursive(depth - 1) if depth else product()

    assert recursive(3) is HALF and product() is FP32


def test_an_exception_restores_everything() -> None:
    for enabled in (True, False):
        with pytest.raises(ZeroDivisionError), amp.autocast(), amp.autocast(enabled=enabled):
            amp.low_prec_dtype = "bfloat16"
            raise ZeroDivisionError
        assert product() is FP32


def test_the_decorator_keeps_the_function_and_refuses_what_is_suspended() -> None:
    @amp.autocast(low_prec_dtype="bfloat16")
    def documented(x: Tensor, *, scale: int = 1) -> Tensor:
        """Multiply."""
        return x @ x * scale

    assert documented.__doc__ == "Multiply." and documented.__name__ == "documented"
    assert documented(X[0, 0], scale=2).dtype is BF16

    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(RegionError, match="suspended by yield"):
        amp.autocast()(generator)


def test_the_state_is_the_threads_own() -> None:
    seen: list[Any] = []
    amp.enabled = True
    thread = threading.Thread(target=lambda: seen.extend((amp.enabled, product())))
    thread.start()
    thread.join()
    amp.enabled = False
    assert seen == [False, FP32]


def test_a_region_left_in_the_wrong_order_is_named_and_put_in_order() -> None:
    outer, inner = amp.autocast(), amp.autocast(low_prec_dtype="bfloat16")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RegionError, match="still open"):
        outer.__exit__(None, None, None)
    assert product() is BF16
    inner.__exit__(None, None, None)
    with pytest.raises(RegionError, match="not open"):
        inner.__exit__(None, None, None)


# ---------------------------------------------------------------------- formats


def test_bf16_has_biases() -> None:
    with amp.autocast(low_prec_dtype="bfloat16"):
        assert nn.Linear(6, 3)(X).dtype is nn.Conv2d(4, 3, 3)(X).dtype is BF16


@pytest.mark.parametrize("dtype", ["float16", np.float16, torch.float16, np.dtype("float16")])
def test_a_format_is_a_name_or_a_dtype(dtype: Any) -> None:
    with amp.autocast(low_prec_dtype=dtype):
        assert amp.low_prec_dtype == "float16" and product() is HALF


def test_sensitive_operators_may_be_low_and_nothing_may_be() -> None:
    with amp.autocast(high_prec_dtype="float16"):
        assert X.half().exp().dtype is product() is HALF
    with amp.autocast(low_prec_dtype="float32"):
        assert product() is FP32


@pytest.mark.parametrize("dtype", ["int8", "float64", "half", None, 3])
def test_another_format_is_refused_with_those_there_are(dtype: Any) -> None:
    with pytest.raises(RegionError, match="expected one of 'float16', 'bfloat16'|expected one of float16, bfloat16"):
        amp.autocast(low_prec_dtype=dtype)
    if dtype is not None:
        with pytest.raises(RuntimeError):
            amp.high_prec_dtype = dtype


def test_two_low_formats_at_once_are_refused_and_change_nothing() -> None:
    with pytest.raises(RegionError, match="one low format"):
        amp.autocast(high_prec_dtype="bfloat16")
    amp.enabled = True
    with pytest.raises(RegionError, match="one low format"):
        amp.high_prec_dtype = "bfloat16"
    with pytest.raises(PolicyError, match="unknown preset"):
        amp.policy = "nothing"  # type: ignore[assignment]
    assert product() is HALF
    amp.enabled = False


def test_any_policy_can_take_the_place_of_the_lists() -> None:
    with amp.autocast():
        amp.policy = amp.policy.with_ops(fp32=["matmul"])
        assert product() is FP32 and LOW["linear"](X).dtype is HALF


def test_a_decorated_function_compiles_to_one_graph() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2))

    @amp.autocast()
    def forward(x: Tensor) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), forward(X)) and compiled(X).dtype is HALF
    torch._dynamo.reset()
