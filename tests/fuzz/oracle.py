"""Products and convolutions in emulated fp16 against float64, within the bound that `programs` states."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs

__all__ = ["against_float64"]

HALF = torch.float16

PRODUCTS: dict[str, tuple[Callable[..., Tensor], Callable[[Callable[..., int]], tuple[tuple[int, ...], ...]]]] = {
    "linear": (F.linear, lambda r: ((r(), k := r(16)), (r(), k))),
    "matmul": (torch.matmul, lambda r: ((r(3), r(), k := r(16)), (k, r()))),
    "mm": (torch.mm, lambda r: ((r(), k := r(16)), (k, r()))),
    "bmm": (torch.bmm, lambda r: ((b := r(3), r(), k := r(16)), (b, k, r()))),
    "mv": (torch.mv, lambda r: ((r(), k := r(16)), (k,))),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), lambda r: ((r(), k := r(16)), (r(), k))),
    "conv1d": (F.conv1d, lambda r: ((r(2), c := r(3), 4 + r()), (r(3), c, r(4)))),
    "conv2d": (F.conv2d, lambda r: ((r(2), c := r(3), 3 + r(3), 3 + r(3)), (r(3), c, r(3), r(3)))),
    "conv3d": (F.conv3d, lambda r: ((1, c := r(2), 3, 3, 3), (r(2), c, r(3), r(3), r(3)))),
    "conv_transpose1d": (F.conv_transpose1d, lambda r: ((r(2), c := r(3), r()), (c, r(3), r(3)))),
    "conv_transpose2d": (F.conv_transpose2d, lambda r: ((1, c := r(3), r(3), r(3)), (c, r(3), r(2), r(2)))),
}
"""Name -> bilinear function, and the shapes of its arguments, drawn by a function of the largest size."""


def against_float64(rng: random.Random, x: Tensor) -> str:
    """Run a random product or convolution, and its backward pass; return what is wrong, or ""."""
    name = rng.choice(sorted(PRODUCTS))
    function, draw = PRODUCTS[name]
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    size = 2.0 ** rng.randint(-9, 7)
    shapes = draw(lambda most=5: rng.randint(1, most))
    a, b = ((torch.randn(shape, generator=generator) * size).half().float() for shape in shapes)
    names = ("mixed", "O1") if name in {"mv", "einsum"} else ("torch", "mixed", "O1")  # torch's list is without these
    policy = hs.Policy.of(rng.choice(names), dtype="fp16", emulate="always")
    kind = rng.choice((None, True, False))
    leaves = [t.clone().requires_grad_() for t in (a, b)]
    with hs.autocast("cpu", policy=policy):
        y = function(*leaves) if kind is None else checkpoint(function, *leaves, use_reentrant=kind)
    seed = (torch.randn(y.shape, generator=generator) / size).half()
    y.backward(seed)
    exact = [t.double().requires_grad_() for t in (a, b)]
    function(*exact).backward(seed.double())
    sums = [t.double().abs().requires_grad_() for t in (a, b)]
    total = function(*sums)
    total.backward(seed.double().abs())
    found = [y.detach(), *(t.grad for t in leaves)]
    wanted = [function(*(t.detach() for t in exact)), *(t.grad for t in exact)]
    absolute = [total.detach(), *(t.grad for t in sums)]
    for what, got, right, terms in zip(("result", "gradient 0", "gradient 1"), found, wanted, absolute, strict=True):
        if got is None or right is None or terms is None:
            return f"{name} {kind}: no {what}"
        wrong = _beyond(got.double(), right, terms * (a.numel() + b.numel() + y.numel()) * 2.0**-24)
        if wrong:
            return f"{name} {policy.name} {shapes} x {size}, use_reentrant={kind}: {what} {wrong}"
    return "" if y.dtype is HALF else f"{name}: {y.dtype}"


def _beyond(got: Tensor, right: Tensor, slack: Tensor) -> str:
    """Say which element is further from the exact one than difference 4 allows, or ""."""
    largest = torch.finfo(HALF).max
    exponent = torch.frexp(right.abs().clamp(min=2.0**-14))[1] - 1
    ulp = torch.ldexp(torch.ones_like(right), exponent - 10)
    near = (got - right).abs() <= ulp + slack
    overflow = got.isinf() & (right.abs() + ulp + slack >= largest) & (got.sign() == right.sign())
    bad = ~(near | overflow)
    if not bad.any():
        return ""
    i = int(bad.flatten().nonzero()[0])
    return f"element {i} is {got.flatten()[i]:.8g}, exactly {right.flatten()[i]:.8g}, ulp {ulp.flatten()[i]:.3g}"
