"""O1: every operator of Apex's lists gives the format Apex documents, for fp32, low, mixed and foreign low inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.compat.apex.amp.handle import AmpHandle
from halfstep.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from halfstep.errors import BannedOperatorError

FP32, HALF, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

Call = Callable[[Callable[..., Any], Callable[..., Tensor]], Any]
"""(function, make) -> its result; ``make(*shape)`` returns the next input, in the format that is its turn."""


def labels(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def signs(*shape: int) -> Tensor:
    return torch.ones(shape)


ONE: dict[str, Call] = {
    name: lambda f, x: f(x(4, 4))
    for name in (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh"),
        *("tan", "prod", "std", "sum", "var", "norm", "softplus", "gelu", "normalize", "cpu"),
    )
}
TWO: dict[str, Call] = {
    name: lambda f, x: f(x(4, 4), x(4, 4))
    for name in (
        *("matmul", "mm", "__matmul__", "dist", "atan2", "add", "div", "mul", "eq", "equal", "ge", "gt", "le", "lt"),
        *("ne", "cosine_similarity", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss", "poisson_nll_loss"),
        *("binary_cross_entropy_with_logits", "pow", "__pow__"),
    )
}
CALLS: dict[str, Call] = {
    **ONE,
    **TWO,
    "conv1d": lambda f, x: f(x(1, 2, 8), x(3, 2, 3), x(3)),
    "conv2d": lambda f, x: f(x(1, 2, 5, 5), x(3, 2, 3, 3), x(3)),
    "conv3d": lambda f, x: f(x(1, 2, 4, 4, 4), x(3, 2, 3, 3, 3), x(3)),
    "conv_transpose1d": lambda f, x: f(x(1, 2, 8), x(2, 3, 3), x(3)),
    "conv_transpose2d": lambda f, x: f(x(1, 2, 5, 5), x(2, 3, 3, 3), x(3)),
    "conv_transpose3d": lambda f, x: f(x(1, 2, 4, 4, 4), x(2, 3, 3, 3, 3), x(3)),
    "conv_tbc": lambda f, x: f(x(8, 1, 2), x(3, 2, 3), x(3)),
    "linear": lambda f, x: f(x(2, 4), x(3, 4), x(3)),
    "prelu": lambda f, x: f(x(2, 3), x(3)),
    "addmm": lambda f, x: f(x(4, 4), x(4, 4), x(4, 4)),
    "addmv": lambda f, x: f(x(4), x(4, 4), x(4)),
    "addr": lambda f, x: f(x(4, 4), x(4), x(4)),
    "mv": lambda f, x: f(x(4, 4), x(4)),
    "addbmm": lambda f, x: f(x(4, 4), x(2, 4, 4), x(2, 4, 4)),
    "baddbmm": lambda f, x: f(x(2, 4, 4), x(2, 4, 4), x(2, 4, 4)),
    "bmm": lambda f, x: f(x(2, 4, 4), x(2, 4, 4)),
    "interpolate": lambda f, x: f(x(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "grid_sample": lambda f, x: f(x(1, 2, 4, 4), x(1, 3, 3, 2), align_corners=False),
    "softmin": lambda f, x: f(x(4, 4), dim=1),
    "softmax": lambda f, x: f(x(4, 4), dim=1),
    "log_softmax": lambda f, x: f(x(4, 4), dim=1),
    "layer_norm": lambda f, x: f(x(4, 4), (4,), x(4), x(4)),
    "group_norm": lambda f, x: f(x(2, 4, 3), 2, x(4), x(4)),
    "local_response_norm": lambda f, x: f(x(2, 4, 3), 2),
    "cosine_embedding_loss": lambda f, x: f(x(4, 4), x(4, 4), signs(4)),
    "cross_entropy": lambda f, x: f(x(4, 4), labels(4)),
    "nll_loss": lambda f, x: f(x(4, 4), labels(4)),
    "hinge_embedding_loss": lambda f, x: f(x(4, 4), signs(4, 4)),
    "margin_ranking_loss": lambda f, x: f(x(4), x(4), signs(4)),
    "multilabel_margin_loss": lambda f, x: f(x(4, 4), labels(4, 4)),
    "multilabel_soft_margin_loss": lambda f, x: f(x(4, 4), x(4, 4)),
    "multi_margin_loss": lambda f, x: f(x(4, 4), labels(4)),
    "soft_margin_loss": lambda f, x: f(x(4, 4), signs(4, 4)),
    "triplet_margin_loss": lambda f, x: f(x(4, 4), x(4, 4), x(4, 4)),
    "ctc_loss": lambda f, x: f(x(6, 1, 4), torch.ones(1, 2, dtype=torch.int64), torch.tensor([6]), torch.tensor([2])),
    "cumprod": lambda f, x: f(x(4, 4), 0),
    "cumsum": lambda f, x: f(x(4, 4), 0),
    "renorm": lambda f, x: f(x(4, 4), 2, 0, 1.0),
    "__rpow__": lambda f, x: f(x(4, 4), 2.0),
    "addcdiv": lambda f, x: f(x(4, 4), x(4, 4), x(4, 4)),
    "addcmul": lambda f, x: f(x(4, 4), x(4, 4), x(4, 4)),
    "cross": lambda f, x: f(x(4, 3), x(4, 3), dim=1),
    "bilinear": lambda f, x: f(x(2, 4), x(2, 4), x(3, 4, 4), x(3)),
    "dot": lambda f, x: f(x(4), x(4)),
    "cat": lambda f, x: f([x(2, 2), x(2, 2)]),
    "stack": lambda f, x: f([x(2, 2), x(2, 2)]),
    **{
        f"__{name}__": lambda f, x: f(x(4, 4), x(4, 4))
        for name in ("add", "sub", "mul", "div", "truediv", "eq", "ne", "ge", "gt", "le", "lt", "radd", "rsub", "rmul")
    },
    "__rdiv__": lambda f, x: f(x(4, 4), 2.0),
    "__rtruediv__": lambda f, x: f(x(4, 4), 2.0),
}

COMPARES = {"eq", "equal", "ge", "gt", "le", "lt", "ne"}
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__"}
RECIPROCALS = {"__rdiv__", "__rtruediv__"}  # 2 / x is x.reciprocal() * 2 in PyTorch, and reciprocal is an fp32 function

SPACES = {"functional": F, "torch": torch, "Tensor": Tensor}
LISTS = {"functional": functional_overrides, "torch": torch_overrides, "Tensor": tensor_overrides}


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield (space, name, list) for everything in the lists but what is in place or banned."""
    for space, lists in LISTS.items():
        for kind in ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS"):
            for name in getattr(lists, kind, []):
                if name not in IN_PLACE and hasattr(SPACES[space], name):
                    yield space, name, kind


ENTRIES = list(entries())


def inputs(turn: tuple[torch.dtype, ...]) -> Callable[..., Tensor]:
    """Return a maker of inputs in (0, 1) whose formats follow `turn`, starting over at its end."""
    made = 0

    def make(*shape: int) -> Tensor:
        nonlocal made
        made += 1
        return (0.25 + 0.5 * torch.rand(shape)).to(turn[(made - 1) % len(turn)])

    make.formats = lambda: {turn[i % len(turn)] for i in range(made)}  # type: ignore[attr-defined]
    return make


def expected(kind: str, name: str, formats: set[torch.dtype], low: torch.dtype) -> torch.dtype:
    if name.strip("_") in COMPARES:
        return torch.bool
    if kind == "FP16_FUNCS":
        return low
    if kind == "FP32_FUNCS" or name in RECIPROCALS:
        return FP32
    return next(iter(formats)) if len(formats) == 1 else FP32


TURNS = {
    "fp32": (FP32,),
    "half": (HALF,),
    "bf16": (BF16,),
    "mixed": (HALF, FP32),
    "mixed, fp32 first": (FP32, HALF),
    "bf16 and fp32": (BF16, FP32),
    "both low": (HALF, BF16),
}


def test_there_is_a_call_for_every_entry_of_the_lists() -> None:
    assert {name for _, name, _ in ENTRIES} <= set(CALLS)
    listed = {name for lists in LISTS.values() for kind in vars(lists).values() for name in kind if name}
    names = {name if isinstance(name, str) else name[0] for name in listed}
    assert names - {name for _, name, _ in ENTRIES} <= IN_PLACE | {"binary_cross_entropy"}


@pytest.mark.parametrize("low", [HALF, BF16], ids=["casts to fp16", "casts to bf16"])
@pytest.mark.parametrize("turn", list(TURNS))
def test_every_listed_operator_gives_the_documented_format(turn: str, low: torch.dtype) -> None:
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated functions and sizes that losses broadcast
        AmpHandle(low=low)
        for space, name, kind in ENTRIES:
            make = inputs(TURNS[turn])
            result = CALLS[name](getattr(SPACES[space], name), make)
            formats: set[torch.dtype] = make.formats()  # type: ignore[attr-defined]
            found = torch.bool if isinstance(result, bool) else result.dtype
            if found != expected(kind, name, formats, low):
                wrong.append((space, name, kind, found, expected(kind, name, formats, low)))
    assert not wrong


def test_the_lists_and_the_operator_table_say_the_same() -> None:
    plan = dict(hs.resolve(hs.Policy.of("O1", dtype="fp16"), nn.Module(), "cpu").operators)
    rules = {"FP16_FUNCS": "low", "FP32_FUNCS": "fp32", "CASTS": "widest", "SEQUENCE_CASTS": "widest"}
    for space, name, kind in ENTRIES:
        operator = hs.policy.operator_name(getattr(SPACES[space], name))
        if name == "cpu":
            assert operator is None
        elif name not in RECIPROCALS:
            assert operator is not None and plan[operator].rule == rules[kind], (space, name)


def test_operators_of_no_list_keep_the_format_of_their_input() -> None:
    amp.init()
    for dtype in (FP32, HALF, BF16):
        x = torch.rand(2, 3, 8).to(dtype)
        assert F.relu(x).dtype is torch.sigmoid(x).dtype is F.max_pool1d(x, 2).dtype is dtype
        assert F.batch_norm(x, torch.zeros(3), torch.ones(3)).dtype is dtype
        assert F.instance_norm(x).dtype is dtype
        assert torch.relu(x.transpose(0, 1)).dtype is dtype


def test_double_and_integer_tensors_are_left_alone() -> None:
    amp.init()
    x = torch.rand(3, 3, dtype=FP64)
    assert (x @ x).dtype is x.sum().dtype is (x * torch.rand(3, 3)).dtype is FP64
    assert (torch.ones(3, dtype=torch.int64) * 2).dtype is torch.int64
    assert torch.cat([x, x]).dtype is FP64


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.GRU(3, 4), nn.RNN(3, 4), nn.RNN(3, 4, nonlinearity="relu")])
def test_recurrent_layers_run_low_for_inputs_of_any_format(layer: nn.Module) -> None:
    amp.init()
    for dtype in (FP32, HALF):
        output, _ = layer(torch.rand(5, 2, 3).to(dtype))
        assert output.dtype is HALF


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)])
def test_recurrent_cells_run_low_step_after_step(cell: nn.Module) -> None:
    amp.init()
    state = None
    for _ in range(3):  # the weight is used again before backward
        state = cell(torch.rand(2, 3), state)
    hidden = state[0] if isinstance(state, tuple) else state
    assert isinstance(hidden, Tensor) and hidden.dtype is HALF
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in cell.parameters())


def test_a_half_parameter_under_an_fp32_function_is_cast_up_and_gets_its_gradient() -> None:
    amp.init()
    weight = nn.Parameter(torch.rand(4).half())
    loss = F.layer_norm(torch.rand(2, 4), (4,), weight).sum() + weight.exp().sum()
    assert loss.dtype is FP32
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype is HALF


def test_in_place_functions_that_want_fp32_refuse_low_tensors_and_say_what_to_write() -> None:
    amp.init()
    x = torch.rand(3).half()
    with pytest.raises(NotImplementedError, match=r"in-place method exp_ with float16.*without the underscore"):
        x.exp_()
    with pytest.raises(NotImplementedError, match="in-place function log_ with float16"):
        torch.log_(x)
    with pytest.raises(NotImplementedError, match="pow_"):
        x.pow_(2)
    wide = torch.rand(3)
    wide.exp_()
    wide **= 2
    with amp.disable_casts():
        x.exp_()


def test_in_place_sums_and_products_keep_the_format_they_are_written_into() -> None:
    amp.init()
    for name in ("add_", "mul_", "sub_", "div_"):
        x = torch.ones(3).half()
        getattr(x, name)(torch.full((3,), 2.0))
        assert x.dtype is HALF
    x = torch.ones(3, 3).half()
    assert x.addmm_(torch.ones(3, 3), torch.ones(3, 3)) is x and float(x.detach()[0, 0]) == 4.0
    x += torch.ones(3, 3)
    assert x.dtype is HALF and float(x[0, 0]) == 5.0


def test_banned_functions_refuse_low_inputs_unless_they_are_allowed() -> None:
    low, wide = torch.rand(3).half(), torch.rand(3)
    amp.init()
    assert F.binary_cross_entropy(wide, wide).dtype is FP32
    for error in (NotImplementedError, BannedOperatorError):
        with pytest.raises(error, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(low, low)
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(low, low)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(low, low).dtype is FP32


def test_raising_to_a_power_in_place_gives_fp32_as_in_the_list() -> None:
    amp.init()
    x = torch.full((2,), 3.0).half()
    x **= 2
    assert x.dtype is FP32 and x.tolist() == [9.0, 9.0]


def test_cpu_gives_fp32() -> None:
    amp.init()
    assert torch.rand(3).half().cpu().dtype is FP32
    assert torch.rand(3, dtype=FP64).cpu().dtype is FP64


def test_gradients_come_back_in_the_formats_of_the_inputs_and_close_to_fp32() -> None:
    x, weight = torch.rand(8, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    loss = F.cross_entropy(F.linear(x, weight), labels(8))
    wanted = torch.autograd.grad(loss, (x, weight))
    amp.init()
    output = F.linear(x, weight)
    assert output.dtype is HALF
    found = torch.autograd.grad(F.cross_entropy(output, labels(8)), (x, weight))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is FP32
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)
