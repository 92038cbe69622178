"""Audit and masks: a constant at the end of a format hides a place; it is no data, and nothing that is data hides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.lens.audit.rows import Hidden, added_masks, hidden_in

FP16 = hs.Policy.of("mixed", dtype="fp16")
LENGTH, WIDTH = 16, 8


class Masked(nn.Module):
    """Attention whose mask is added, as libraries do it."""

    def __init__(self, mask: float, sharp: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.sharp = mask, sharp

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) * self.sharp
        mask = torch.full((LENGTH, LENGTH), self.mask, dtype=x.dtype).triu(1)
        weights = (scores + mask).softmax(-1)
        out: Tensor = weights.to(x.dtype) @ x
        return out


def audited(model: nn.Module, policy: hs.Policy) -> hs.lens.Audit:
    torch.manual_seed(1)
    batches = [(torch.randn(2, LENGTH, WIDTH),) for _ in range(2)]
    return hs.audit(model, batches, lambda m, x: m(x).float().square().mean(), policy)


@pytest.mark.parametrize("mask", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e38, 3e38])
def test_a_mask_is_left_out_of_all_numbers(mask: float) -> None:
    audit = audited(Masked(mask), hs.Policy.of("O1", dtype="bf16"))
    (row,) = audit.filter(op="add", role="activation")
    assert row.masked == pytest.approx((LENGTH - 1) / LENGTH / 2) and 0 < row.amax < 10 and row.headroom > 100
    assert 0 < row.accumulated < 0.05
    assert audit.findings() == ()
    for answer in audit.what_if("fp16"):
        assert answer.overflow == (0.0, 0.0)


def test_rows_of_a_mask_do_not_lead_the_table() -> None:
    audit = audited(Masked(torch.finfo(torch.float32).min), FP16)
    assert audit.findings() == ()
    assert not {row.op for row in audit.worst(8)} & {"add", "triu"} and "3.4e+38" not in str(audit)


@pytest.mark.parametrize("sharp", [1.0, 60.0])
def test_a_mask_of_fp16_may_run_over_its_end_in_the_sum(sharp: float) -> None:
    audit = audited(Masked(torch.finfo(torch.float16).min, sharp), hs.Policy.of("O3", dtype="fp16"))
    (row,) = audit.filter(op="add", role="activation")
    assert row.format == "fp16" and row.overflow == 0.0 and row.amax < 1000
    assert {finding.kind for finding in audit.findings()} <= {"saturation"}  # of its sharp softmax


@pytest.mark.filterwarnings("ignore:gradients are not finite")
def test_what_is_too_large_beside_a_mask_is_still_found() -> None:
    audit = audited(Masked(torch.finfo(torch.float16).min, 1e5), hs.Policy.of("O3", dtype="fp16"))
    assert "overflow" in {finding.kind for finding in audit.findings()}


def test_large_numbers_that_are_no_constant_are_data() -> None:
    x = torch.tensor([1.0, 2e37, 3e37, 3e38])
    assert hidden_in(x, 3e38) is None and hidden_in(x / 1e30, 3e8) is None
    assert hidden_in(torch.tensor([1.0, 3e38, 3e38]), 3e38) == Hidden(high=1.5e38)
    assert hidden_in(torch.tensor([1.0, -65504.0]), 65504.0) == Hidden(low=-32752.0)
    assert added_masks((torch.full((2,), -65504.0, requires_grad=True), 3.0)) is None
