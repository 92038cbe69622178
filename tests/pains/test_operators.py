"""Operators that torch.autocast does not know or gets wrong."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pains.pain import pain

BF16 = torch.bfloat16
INDEX = torch.arange(4)
ROWS = INDEX[:, None].expand(4, 8)
MASK = torch.ones(4, 8, dtype=torch.bool)

MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "index_put": lambda low: torch.zeros(4, 8).index_put((INDEX,), low),
    "index_add": lambda low: torch.zeros(4, 8).index_add(0, INDEX, low),
    "scatter": lambda low: torch.zeros(4, 8).scatter(0, ROWS, low),
    "scatter_add": lambda low: torch.zeros(4, 8).scatter_add(0, ROWS, low),
    "masked_scatter": lambda low: torch.zeros(4, 8).masked_scatter(MASK, low),
    "bilinear": lambda low: F.bilinear(low, torch.randn(4, 8), torch.randn(3, 8, 8)),
    "tensordot": lambda low: torch.tensordot(low, torch.randn(8, 3), 1),
    "cat of fp16": lambda low: torch.cat([low.half(), low.half()]),
}

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "buffer[i] = low": lambda buffer, low: buffer.__setitem__(INDEX, low),
    "index_add_": lambda buffer, low: buffer.index_add_(0, INDEX, low),
    "index_copy_": lambda buffer, low: buffer.index_copy_(0, INDEX, low),
    "scatter_": lambda buffer, low: buffer.scatter_(0, ROWS, low),
    "scatter_add_": lambda buffer, low: buffer.scatter_add_(0, ROWS, low),
    "masked_scatter_": lambda buffer, low: buffer.masked_scatter_(MASK, low),
    "addmm_": lambda buffer, low: buffer.addmm_(low, torch.eye(8)),
}


def refused(calls: Mapping[str, Callable[..., Any]], *args: Callable[[], Tensor]) -> list[str]:
    """Return the names of the calls that raise, each called with what `args` make."""
    names = []
    for name, call in calls.items():
        try:
            call(*(make() for make in args))
        except RuntimeError:
            names.append(name)
    return names


class States(NamedTuple):
    """What a user's model returns."""

    logits: Tensor
    mask: Tensor


@pain(17, torch_fails_with=TypeError, saying="States")
def test_a_custom_function_takes_a_named_tuple(amp: Any) -> None:
    def energy(ctx: Any, states: States) -> Tensor:
        assert type(states) is States and states.logits.dtype is torch.float32 and states.mask.dtype is torch.bool
        return states.logits.square().sum()

    apply = amp.function(energy, lambda ctx, grad: None, "fp32")
    with amp.region("bf16"):
        apply(States(torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.bool)))


@pain(17, torch_fails_with=AssertionError, saying="arrived as dict")
def test_a_custom_function_gets_the_mapping_it_was_given(amp: Any) -> None:
    def total(ctx: Any, states: Mapping[str, Tensor]) -> Tensor:
        assert isinstance(states, OrderedDict), f"an OrderedDict arrived as {type(states).__name__}"
        return sum(states.values(), torch.zeros(()))

    apply = amp.function(total, lambda ctx, grad: None, "fp32")
    with amp.region("bf16"):
        assert apply(OrderedDict(a=torch.ones((), dtype=BF16))).item() == 1.0


def square(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x @ x


def square_backward(ctx: Any, grad: Tensor) -> Tensor:
    x: Tensor = ctx.saved_tensors[0]
    return grad @ x.mT + x.mT @ grad


@pain(17, torch_fails_with=None)
def test_a_custom_function_compiles_to_one_graph(amp: Any) -> None:
    """Cured in torch (pytorch#114693)."""
    torch._dynamo.reset()
    apply = amp.function(square, square_backward, "low")
    x = torch.randn(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x: apply(x).float().sum(), backend="aot_eager", fullgraph=True)
    with amp.region("bf16"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo makes an instance of every Function it traces
        loss = compiled(x)
    loss.backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


@pain(17, torch_fails_with=AssertionError, saying="backward pass multiplied in torch.bfloat16")
def test_a_custom_function_has_a_format_for_its_backward_pass(amp: Any) -> None:
    seen: list[torch.dtype] = []

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        back = square_backward(ctx, grad)
        seen.append(back.dtype)
        return back

    apply = amp.function(square, backward, "low")
    x = torch.randn(8, 8, requires_grad=True)
    with amp.region("bf16"):
        out = apply(x)
    assert out.dtype is BF16
    out.float().sum().backward()
    assert seen == [torch.float32], f"the backward pass multiplied in {seen[0]}"


@pain(18, torch_fails_with=AssertionError, saying="ran in torch.bfloat16 in an fp16 region")
def test_a_registered_operator_follows_the_format_of_the_region(amp: Any) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    op = torch.library.custom_op(f"pains_{amp.name.replace('.', '_')}::double", double, mutates_args=())
    amp.lower(op)
    for name, dtype in (("bf16", BF16), ("fp16", torch.float16)):
        with amp.region(name):
            found = op(torch.ones(2)).dtype
        assert found is dtype, f"it ran in {found} in an {name} region"


@pain(18, torch_fails_with=RuntimeError, saying="same dtype")
def test_a_grouped_product_is_on_a_list(amp: Any) -> None:
    x, experts = torch.randn(8, 8), torch.randn(2, 8, 8)
    with amp.region("bf16"):
        routed = F.linear(x, torch.eye(8))
        assert F.grouped_mm(routed, experts, offs=torch.tensor([4, 8], dtype=torch.int32)).dtype is BF16


@pain(19, torch_fails_with=AssertionError, saying="index_put, index_add, scatter.*, cat of fp16")
def test_operators_take_a_low_tensor_beside_an_fp32_one(amp: Any) -> None:
    with amp.region("bf16"):
        low = F.linear(torch.randn(4, 8), torch.eye(8))
        assert low.dtype is BF16
        names = refused(MIXED, lambda: low)
    assert not names, f"refused with mixed formats: {', '.join(names)}"


@pain(19, torch_fails_with=AssertionError, saying=r"buffer\[i\] = low, index_add_.*addmm_")
def test_an_fp32_buffer_takes_low_values(amp: Any) -> None:
    with amp.region("bf16"):
        low = F.linear(torch.randn(4, 8), torch.eye(8))
        names = refused(IN_PLACE, lambda: torch.zeros(4, 8), lambda: low)
    assert not names, f"refused to write low values into an fp32 buffer: {', '.join(names)}"


@pain(20, torch_fails_with=AssertionError, saying="not say .*Double and BFloat16")
def test_a_float64_input_is_taken_or_explained(amp: Any) -> None:
    model = amp.bind(nn.Sequential(nn.Linear(8, 8)), "bf16")
    try:
        model(torch.randn(4, 8, dtype=torch.float64))
    except (RuntimeError, *amp.errors) as error:
        text = str(error)
        assert "float64" in text and ".float()" in text, f"the error does not say what to do: {text}"
