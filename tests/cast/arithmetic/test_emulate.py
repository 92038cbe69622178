"""Emulated fp16 is 'fp16 inputs, fp32 compute, one rounding', bit for bit, forward, backward and twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.arithmetic.emulate import EMULATED

HALF = torch.float16


def make(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape) * 7)
    return (torch.randn(shape, generator=generator) * scale).to(HALF)


MASK = torch.tril(torch.ones(6, 6, dtype=torch.bool))
Case = tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...], dict[str, Any]]
CASES: list[Case] = [
    ("linear", F.linear, ((5, 7), (3, 7), (3,)), {}),
    ("linear", F.linear, ((2, 5, 7), (3, 7)), {}),
    ("linear", F.linear, ((2, 5, 7), (3, 7), (3,)), {}),
    ("linear", F.linear, ((64, 96), (128, 96), (128,)), {}),
    ("linear", F.linear, ((7,), (3, 7), (3,)), {}),
    ("linear", F.linear, ((5, 7), (7,)), {}),
    ("linear", F.linear, ((7,), (7,)), {}),
    ("linear", F.linear, ((5, 7), (3, 7), (5, 3)), {}),
    ("matmul", torch.matmul, ((5, 7), (7, 3)), {}),
    ("matmul", torch.matmul, ((4, 5, 7), (4, 7, 3)), {}),
    ("matmul", torch.matmul, ((2, 4, 5, 7), (2, 4, 7, 3)), {}),
    ("matmul", torch.matmul, ((4, 5, 7), (7, 3)), {}),
    ("matmul", torch.matmul, ((5, 7), (4, 7, 3)), {}),
    ("matmul", torch.matmul, ((2, 1, 5, 7), (4, 7, 3)), {}),
    ("matmul", torch.matmul, ((7,), (7, 3)), {}),
    ("matmul", torch.matmul, ((5, 7), (7,)), {}),
    ("matmul", torch.matmul, ((7,), (7,)), {}),
    ("mm", torch.mm, ((65, 33), (33, 17)), {}),
    ("bmm", torch.bmm, ((4, 5, 7), (4, 7, 3)), {}),
    ("mv", torch.mv, ((5, 7), (7,)), {}),
    ("addmm", torch.addmm, ((3,), (5, 7), (7, 3)), {}),
    ("addmm", torch.addmm, ((5, 3), (5, 7), (7, 3)), {"beta": 0.5, "alpha": 2.0}),
    ("baddbmm", torch.baddbmm, ((4, 5, 3), (4, 5, 7), (4, 7, 3)), {"alpha": 0.25}),
    ("addmv", torch.addmv, ((5,), (5, 7), (7,)), {}),
    ("addbmm", torch.addbmm, ((5, 3), (4, 5, 7), (4, 7, 3)), {}),
    ("conv1d", F.conv1d, ((2, 4, 9), (6, 4, 3), (6,)), {"padding": 1}),
    ("conv1d", F.conv1d, ((4, 9), (6, 4, 3)), {}),
    ("conv2d", F.conv2d, ((2, 4, 9, 8), (6, 2, 3, 3), (6,)), {"stride": 2, "padding": (1, 0), "groups": 2}),
    ("conv2d", F.conv2d, ((2, 4, 9, 8), (6, 4, 5, 3)), {"padding": "same"}),
    ("conv2d", F.conv2d, ((2, 4, 9, 8), (6, 4, 3, 3)), {"padding": "valid", "dilation": 2}),
    ("conv3d", F.conv3d, ((1, 2, 5, 6, 4), (3, 2, 2, 2, 2), (3,)), {}),
    ("conv_transpose2d", F.conv_transpose2d, ((2, 4, 5, 5), (4, 3, 3, 3), (3,)), {"stride": 2, "output_padding": 1}),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, ((2, 3, 6, 8),) * 3, {}),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, ((2, 3, 6, 8),) * 3, {"is_causal": True}),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, ((2, 3, 6, 8),) * 3, {"attn_mask": MASK}),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, ((2, 3, 6, 8),) * 3 + ((6, 6),), {}),
    (
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
        {"enable_gqa": True, "scale": 0.3},
    ),
]
EMPTY: list[Case] = [
    ("linear", F.linear, ((5, 0), (3, 0), (3,)), {}),
    ("linear", F.linear, ((5, 7), (0, 7), (0,)), {}),
    ("matmul", torch.matmul, ((2, 5, 0), (0, 3)), {}),
    ("matmul", torch.matmul, ((2, 2, 5, 0), (2, 2, 0, 3)), {}),
]
IDS = [f"{i}-{case[0]}" for i, case in enumerate(CASES)]


def exact(operator: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Compute the model: widen, compute in fp32, round once; the same for gradients, from a low output gradient."""
    wide = [t.detach().float().requires_grad_() for t in inputs]
    out = operator(*wide, **options)
    low = out.to(HALF)
    grads = torch.autograd.grad(out, wide, make(*low.shape, seed=3).float())
    return [low.detach(), *(g.to(HALF) for g in grads)]


def emulated(operator: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = operator(*leaves, **options)
    assert out.dtype is HALF
    return [out.detach(), *torch.autograd.grad(out, leaves, make(*out.shape, seed=3))]


@pytest.mark.parametrize(
    ("name", "operator", "shapes", "options"), CASES + EMPTY, ids=[*IDS, *("empty-" + case[0] for case in EMPTY)]
)
def test_bit_equal_to_the_exact_model(
    name: str, operator: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> None:
    inputs = [make(*shape, seed=i) for i, shape in enumerate(shapes)]
    for got, want in zip(emulated(EMULATED[name], inputs, options), exact(operator, inputs, options), strict=True):
        assert got.dtype is HALF
        assert torch.equal(got, want)


def test_transposed_operands_are_bit_equal_too() -> None:
    for a, b in ((make(7, 5).t(), make(7, 3)), (make(5, 7), make(3, 7).t()), (make(7, 5).t(), make(3, 7).t())):
        for got, want in zip(emulated(EMULATED["mm"], [a, b], {}), exact(torch.mm, [a, b], {}), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "equation,shapes",
    [
        ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))),
        ("bhqd,bhkd->bhqk", ((2, 2, 3, 4), (2, 2, 5, 4))),
        ("ii->i", ((4, 4),)),
        ("i,j,k->ijk", ((2,), (3,), (4,))),
    ],
)
def test_einsum(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = [make(*s, seed=i) for i, s in enumerate(shapes)]
    got = emulated(lambda *t: EMULATED["einsum"](equation, *t), inputs, {})
    want = exact(lambda *t: torch.einsum(equation, *t), inputs, {})
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_one_rounding_is_not_native_fp16_accumulation() -> None:
    """The fault twin: rounding after every product would not pass for the exact model."""
    a, b = make(8, 512), make(512, 8)
    faulty = torch.zeros(8, 8, dtype=HALF)
    for k in range(512):
        faulty = faulty + a[:, k : k + 1] * b[k : k + 1]
    assert not torch.equal(faulty, exact(torch.mm, [a, b], {})[0])
    assert torch.equal(EMULATED["mm"](a, b), exact(torch.mm, [a, b], {})[0])


@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [(n, s, o) for n, _, s, o in CASES],
    ids=IDS,
)
def test_second_derivatives(name: str, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    """d/dx of |grad|^2 agrees with fp64 to the precision of fp16, in a range where fp16 is not inf or subnormal."""
    operator = next(case[1] for case in CASES if case[0] == name)
    inputs = [make(*shape, seed=i, scale=0.5) for i, shape in enumerate(shapes)]

    def penalty(function: Callable[..., Tensor], tensors: list[Tensor], scale: float) -> list[Tensor]:
        out = function(*tensors, **options)
        wide = torch.float32 if out.dtype is HALF else out.dtype
        loss = out.to(wide).square().mean() * scale
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        total = sum((g.to(wide).square().sum() for g in grads), torch.zeros(()))
        return list(torch.autograd.grad(total, tensors))

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        doubles = [t.double().requires_grad_() for t in inputs]
        largest = max(float(g.abs().max()) for g in penalty(operator, doubles, 1.0))
        scale = 2.0 ** round(-0.5 * torch.tensor(largest).log2().item())  # second derivatives grow with its square
        want = penalty(operator, doubles, scale)
    got = penalty(EMULATED[name], [t.clone().requires_grad_() for t in inputs], scale)
    for g, w in zip(got, want, strict=True):
        assert torch.allclose(g.double(), w, rtol=3e-2, atol=3e-2 * float(w.abs().max()))


def test_saves_low_tensors_for_backward() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, w = make(4, 6, 8).requires_grad_(), make(8, 8, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        h = EMULATED["linear"](x, w)
        EMULATED["matmul"](h, h.transpose(1, 2).contiguous())
        EMULATED["scaled_dot_product_attention"](h[:, None], h[:, None], h[:, None])
    assert saved and all(t.dtype is HALF for t in saved)


def test_functional_transforms() -> None:
    x, w = make(5, 4, 6), make(3, 6, seed=1)
    batched = torch.func.vmap(lambda t: EMULATED["linear"](t, w))(x)
    assert torch.equal(batched, EMULATED["linear"](x, w))
    grad = torch.func.grad(lambda v: EMULATED["mm"](x[0], v).float().sum())(w.t().contiguous())
    leaf = w.t().contiguous().requires_grad_()
    EMULATED["mm"](x[0], leaf).float().sum().backward()
    assert torch.equal(grad, leaf.grad)  # type: ignore[arg-type]


def test_attention_with_dropout_is_seeded_and_differentiable() -> None:
    q = make(1, 2, 6, 8).requires_grad_()
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(EMULATED["scaled_dot_product_attention"](q, q, q, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert torch.isfinite(torch.autograd.grad(outs[0].float().sum(), q)[0]).all()


def test_inside_a_region_of_the_user_backward_stays_fp32() -> None:
    """A backward pass run inside a region must not have its fp32 products lowered again."""
    x, w = make(64, 64), make(64, 64, seed=1)
    want = exact(F.linear, [x, w], {})[2]
    leaf = w.clone().requires_grad_()
    out = EMULATED["linear"](x, leaf)
    with torch.autocast("cpu", dtype=torch.float16):
        out.backward(make(*out.shape, seed=3))
    assert leaf.grad is not None and torch.equal(leaf.grad, want)


@pytest.mark.parametrize("policy", ["torch", "mixed", "O1"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_sequence_is_computed_in_fp32_and_rounded_at_its_end(kind: Callable[..., nn.Module], policy: str) -> None:
    network = kind(4, 5, num_layers=2, bidirectional=True)
    x = torch.randn(7, 3, 4, requires_grad=True)
    with hs.autocast(policy=hs.Policy.of(policy, dtype="fp16")):
        low, _ = network(x)
    grad = torch.randn(low.shape).to(HALF)
    low.backward(grad)
    found = [low.detach(), x.grad, *(p.grad for p in network.parameters())]
    exact = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(HALF))
            parameter.grad = None
    rounded = x.detach().to(HALF).float().requires_grad_()
    wide, _ = exact(rounded)
    wide.backward(grad.float())
    expected = [wide.detach().to(HALF), rounded.grad, *(p.grad for p in exact.parameters())]
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None
        assert torch.equal(a.float(), b.to(HALF).float())


@pytest.mark.parametrize(
    ("func", "shapes"),
    [
        (torch.inner, ((3, 4), (5, 4))),
        (torch.tensordot, ((2, 3, 4), (3, 4, 5))),
        (F.bilinear, ((2, 3), (2, 4), (5, 3, 4), (5,))),
        (torch.linalg.vecdot, ((3, 4), (3, 4))),
    ],
)
def test_rare_products_are_rounded_once(func: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = [make(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    options = {"dims": 2} if func is torch.tensordot else {}
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16")):
        low = func(*inputs, **options)
    assert low.dtype is HALF
    assert torch.equal(low, func(*inputs, **options).to(HALF))


def test_operators_take_their_arguments_by_torchs_names() -> None:
    a, b, batch = torch.randn(3, 4), torch.randn(4, 5), torch.randn(2, 3, 4)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16", emulate="always")):
        made = [
            torch.matmul(input=a, other=b),
            a.matmul(other=b),
            torch.mm(input=a, mat2=b),
            torch.addmm(input=torch.zeros(3, 5), mat1=a, mat2=b, beta=2),
        ]
        assert all(torch.equal(m, made[0]) for m in made)
        assert torch.bmm(input=batch, mat2=b.expand(2, 4, 5)).dtype is HALF
        assert torch.baddbmm(input=torch.zeros(3, 5), batch1=batch, batch2=b.expand(2, 4, 5)).dtype is HALF
        assert torch.addbmm(input=torch.zeros(3, 5), batch1=batch, batch2=b.expand(2, 4, 5)).dtype is HALF
        assert torch.mv(input=a, vec=b[:, 0]).dtype is HALF
        assert torch.addmv(input=torch.zeros(3), mat=a, vec=b[:, 0]).dtype is HALF


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.complex64, torch.float64])
@pytest.mark.parametrize(
    "func",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("ij,jk", x, w),
        lambda x, w: F.conv1d(x[None], w[:, :, None]),
        lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    ],
    ids=["linear", "matmul", "einsum", "conv1d", "attention"],
)
def test_operands_that_no_rule_casts_are_refused_as_torch_refuses_them(
    func: Callable[[Tensor, Tensor], Tensor], kind: torch.dtype
) -> None:
    x, w = torch.ones(4, 4, dtype=kind), torch.randn(4, 4)
    with hs.autocast("cpu", dtype=torch.float16), pytest.raises((RuntimeError, ValueError)):
        func(x, w)


def test_ragged_batches_train() -> None:
    rows = [make(3, 8).float(), make(5, 8).float()]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    weight = make(4, 8).float().requires_grad_()
    with hs.autocast("cpu", dtype=HALF):
        ragged = F.linear(batch, weight).values().float().sum()
        whole = F.linear(torch.cat(rows), weight).float().sum()
    assert torch.equal(*(torch.autograd.grad(out, weight)[0] for out in (ragged, whole)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own derivatives
def test_forward_mode_derivatives() -> None:
    x, weight, tangent = make(5, 8).float(), make(4, 8).float(), make(4, 8, seed=1).float()

    def loss(w: Tensor) -> Tensor:
        with hs.autocast("cpu", dtype=HALF):
            return (F.linear(x, w) @ w).float().sum()

    value, derivative = torch.func.jvp(loss, (weight,), (tangent,))[:2]
    assert value.equal(loss(weight))
    reverse = torch.func.grad(loss)(weight)
    assert torch.allclose(derivative, (reverse * tangent).sum(), rtol=1e-2)


def test_fp32_weights_of_a_low_norm_get_fp32_gradients() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(8, 16), torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
    with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16")):
        out = F.layer_norm(torch.relu(F.linear(x, torch.eye(16))), (16,), weight, bias)
    assert out.dtype is torch.float16
    grad = torch.randn(8, 16).half()
    found = torch.autograd.grad(out, (weight, bias), grad)
    wide = F.layer_norm(torch.relu(x.half().float()), (16,), weight, bias)
    for mine, exact in zip(found, torch.autograd.grad(wide, (weight, bias), grad.float()), strict=True):
        assert mine.dtype is torch.float32 and torch.equal(mine, exact)
