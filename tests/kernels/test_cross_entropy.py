"""Losses of logits: the two forms of their gradient agree, and the schemas of the operators."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from halfstep.kernels import ops
from halfstep.kernels.choose import kernels_take_logits
from halfstep.kernels.reference.cross_entropy import gradient, gradient_into, shares


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_gradient_in_place_is_the_differentiable_one_rounded_once(dtype: torch.dtype, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5, 3, generator=generator).to(dtype)
    target = torch.randint(0, 5, (8, 3), generator=generator)
    grad = torch.randn(8, 3, generator=generator).to(torch.float64 if dtype is torch.float64 else torch.float32)
    share = shares(grad, target, None, 2, smoothing, 5)
    want = gradient(logits, share)
    got = gradient_into(logits, logits, share)
    assert got is logits and torch.allclose(got.double(), want.double(), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_operators_say_what_they_give() -> None:
    logits = torch.empty(4, 5, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(4, device="meta")
    labels = torch.empty(4, dtype=torch.long, device="meta")
    assert ops.losses(logits, labels, None, -100, 0.0).shape == (4,)
    assert ops.logits_gradient(logits, labels, rows, rows, rows, None).dtype is torch.bfloat16
    opcheck(ops.losses, (logits, labels, None, -100, 0.0), test_utils=("test_schema", "test_faketensor"))


def test_cpu_logits_do_not_ask_for_kernels() -> None:
    assert not kernels_take_logits(torch.ones(2, 3, dtype=torch.bfloat16))
