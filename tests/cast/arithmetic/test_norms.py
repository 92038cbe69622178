"""Norms of fp16 inputs on a CPU: low in, fp32 inside, one rounding, compared with fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cast.arithmetic.norms import NORMS, wide_statistics

HALF = torch.float16
EPS = 1e-12
CALLS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
    "layer_norm, named": lambda x, w, b: F.layer_norm(x, x.shape[-1:], weight=w, bias=b, eps=EPS),
    "layer_norm, no bias": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, eps=EPS),
    "layer_norm, plain": lambda x, w, b: F.layer_norm(x, x.shape[-1:], eps=EPS),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, x.shape[-1:], w, b, EPS),
    "group_norm": lambda x, w, b: F.group_norm(x, 4, w, b, EPS),
    "group_norm, plain": lambda x, w, b: F.group_norm(x, 4, eps=EPS),
    "rms_norm": lambda x, w, b: F.rms_norm(x, x.shape[-1:], w, EPS),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS),
    "batch_norm, plain": lambda x, w, b: F.batch_norm(x, None, None, training=True, eps=EPS),
    "instance_norm": lambda x, w, b: F.instance_norm(x.unflatten(-1, (4, -1)), eps=EPS).flatten(1),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(512, 32),
    "a row of zeros": lambda: torch.cat([torch.zeros(1, 32), torch.randn(63, 32)]),
    "a column of zeros": lambda: torch.cat([torch.zeros(64, 1), torch.randn(64, 31)], 1),
    "far from zero": lambda: torch.randn(64, 32) * 0.1 + 10,
    "large": lambda: torch.randn(64, 32) * 300,
}


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(2, 2)

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(*args)


@pytest.mark.parametrize("policy", ["pure", "torch"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_have_few_roundings(name: str, kind: str, policy: str) -> None:
    """One rounding is half an ulp; gradients of weights are sums over 64 to 512 rows."""
    torch.manual_seed(0)
    tensors = [INPUTS[kind]().to(HALF), (torch.rand(32) + 0.5).to(HALF), torch.randn(32).to(HALF)]
    outer = torch.randn(len(tensors[0]), 32).to(HALF)

    def run(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = call(*leaves)
        grads = torch.autograd.grad(out, leaves, outer.to(out.dtype), allow_unused=True)
        return [out, *(grad for grad in grads if grad is not None)]

    model = hs.prepare(Calls(CALLS[name]), policy=hs.Policy.of(policy, dtype="fp16"))
    for got, exact in zip(run(model, HALF), run(CALLS[name], torch.float64), strict=True):
        rounded = exact.to(HALF)
        assert torch.equal(got.to(HALF).isfinite(), rounded.isfinite())
        finite = rounded.isfinite()
        error, size = (got.double() - exact).detach().abs()[finite], exact.detach().abs()[finite]
        assert (error / size.clamp(min=float(size.mean())) / torch.finfo(HALF).eps).max() < 0.8


def test_the_kernels_would_fail_that() -> None:
    """And whether they still do: if not, this file has nothing left to do."""
    x = torch.randn(8, 32).to(HALF)
    x[0] = 0
    x.requires_grad_()
    low = torch.ones(32, dtype=HALF)
    F.layer_norm(x, (32,), low, low, EPS).sum().backward()
    assert x.grad is not None and not x.grad.isfinite().all()
    weight = torch.ones(32, requires_grad=True)
    many = torch.randn(4096, 32).to(HALF)
    (grad,) = torch.autograd.grad(F.layer_norm(many, (32,), weight, weight.detach()).sum() * 1.0, [weight])
    (exact,) = torch.autograd.grad(F.layer_norm(many.double(), (32,), weight.double(), None).sum(), [weight])
    assert (grad - exact).abs().max() / exact.abs().max() > 4 * torch.finfo(HALF).eps


def test_a_norm_is_differentiated_twice_and_under_transforms() -> None:
    x = torch.randn(4, 8).to(HALF)
    norm = wide_statistics(F.layer_norm)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(norm(leaf, (8,)).float().square().sum(), [leaf], create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), [leaf])
    assert second.dtype is HALF and second.isfinite().all()
    batched = torch.func.vmap(lambda row: norm(row, (8,)))(x)
    assert torch.equal(batched, norm(x, (8,)))


def test_other_formats_are_left_to_torch() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, w = torch.randn(4, 8, 6).to(dtype), torch.ones(8, dtype=dtype)
        for func in (F.group_norm, torch.group_norm):
            assert torch.equal(wide_statistics(func)(x, 2, w, w), func(x, 2, w, w))
        assert torch.equal(wide_statistics(F.layer_norm)(x, (6,)), F.layer_norm(x, (6,)))
    low = torch.zeros(8, dtype=HALF), torch.ones(8, dtype=HALF)
    x = torch.randn(4, 8).to(HALF)
    assert torch.equal(wide_statistics(F.batch_norm)(x, *low), F.batch_norm(x, *low))  # writes into low statistics


@pytest.mark.filterwarnings("ignore:.*emulate='never'")
def test_emulate_never_means_torchs_kernels() -> None:
    x, w = torch.randn(4, 8).to(HALF), torch.ones(8, dtype=HALF)
    x[0] = 0
    for emulate, finite in (("auto", True), ("never", False)):
        leaf = x.clone().requires_grad_()
        policy = hs.Policy.of("mixed", dtype="fp16", emulate=emulate)
        with hs.autocast("cpu", policy=policy):
            out = F.layer_norm(leaf, (8,), w, None, EPS)
        out.float().sum().backward()
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all()) is finite


def test_every_spelling_is_covered() -> None:
    spaces: tuple[Any, ...] = (F, torch)
    names = ("layer_norm", "group_norm", "batch_norm", "instance_norm")
    assert {getattr(space, name) for space in spaces for name in names} == NORMS
