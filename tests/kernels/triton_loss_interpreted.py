"""The loss kernels in Triton's interpreter, on CPU tensors: run by test_cross_entropy.py in a process of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from halfstep.kernels.reference.cross_entropy import shares
from halfstep.kernels.triton import loss as triton_loss

# The interpreter is numpy, which warns where a GPU computes inf or nan.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

CASES = [*itertools.product((torch.bfloat16, torch.float16), (0.0, 0.3), (False, True), (5, 64, 77))]


@pytest.mark.parametrize(("dtype", "smoothing", "weighted", "classes"), CASES)
def test_losses_and_gradients_are_fp32_and_rounded_once(
    dtype: torch.dtype, smoothing: float, weighted: bool, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_loss, "BLOCK", 32)  # several blocks a row
    generator = torch.Generator().manual_seed(classes)
    wider = (torch.randn(6, classes + 3, generator=generator) * 4).to(dtype)
    logits = wider[:, :classes]  # rows that do not follow one another
    logits[1, : classes // 2] = -float("inf")
    target = torch.randint(classes // 2, classes, (6,), generator=generator)
    target[2] = -100
    weight = torch.rand(classes, generator=generator) if weighted else None
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(
        exact, target, None if weight is None else weight.double(), reduction="none", label_smoothing=smoothing
    )
    got = triton_loss.losses(logits, target, weight, -100, smoothing)
    assert got.dtype is torch.float32 and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    seed = torch.randn(6, generator=generator)
    kept = want.isfinite()  # smoothing makes the loss of a class that cannot be infinite
    (true,) = torch.autograd.grad(want[kept], exact, seed.double()[kept])
    share = shares(seed, target, weight, -100, smoothing, classes)
    out = triton_loss.gradient(logits, *share)
    assert out.dtype is dtype and out.is_contiguous()
    error = (out.double() - true).abs()[kept]
    assert (error <= true.abs()[kept] * torch.finfo(dtype).eps * 0.51 + 1e-6).all()


def test_a_target_that_is_no_class_gives_nan_and_nothing_is_read_there() -> None:
    logits, target = torch.randn(3, 5).bfloat16(), torch.tensor([0, 9, -3])
    losses = triton_loss.losses(logits, target, None, -100, 0.0)
    assert losses.isnan().tolist() == [False, True, True]
    ones = torch.ones(3)
    slope = triton_loss.gradient(logits, *shares(ones, target, None, -100, 0.0, 5))
    assert slope.isnan().all(1).tolist() == [False, True, True]


def test_no_rows() -> None:
    empty = torch.empty(0, 5, dtype=torch.bfloat16)
    assert triton_loss.losses(empty, torch.empty(0, dtype=torch.long), None, -100, 0.0).shape == (0,)
