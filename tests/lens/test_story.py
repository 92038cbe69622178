"""Where magnitudes left the normal range, which mask became nan, which cast made a weight infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.lens.box.diagnose import path
from halfstep.lens.box.origins import CallRecord
from halfstep.lens.calls import Site
from tests.lens.broken import explained, squared

HIDDEN = torch.arange(8) > 5
INF = math.inf

pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite")


def call(op: str, made: float, *parents: CallRecord, finite: bool = True) -> CallRecord:
    """Return what is kept of a call in fp32."""
    return CallRecord(Site(op, "", ""), (), (), 1.0, finite, finite, made, torch.float32, parents)


def test_a_path_follows_what_is_not_finite_then_what_is_largest() -> None:
    small, large, spoilt = call("sin", 0.5), call("exp", 7.0), call("log", 2.0, finite=False)
    place = call("div", 0.0, small, large, finite=False)
    assert [row.site.op for row in path(place)] == ["exp", "div"]
    assert [row.site.op for row in path(place, small=True)] == ["sin", "div"]
    assert [row.site.op for row in path(call("mul", 0.0, small, spoilt, large))] == ["log", "mul"]


def growing(m: Any, h: Tensor) -> Tensor:
    for part in m.parts:
        h = torch.tanh(part(h))
    large = h * 3000.0
    middle = large.relu().clone()
    return middle * large


def test_a_story_leads_from_where_magnitudes_grew_to_the_place() -> None:
    parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
    verdict = explained(growing, parts=parts, policy=hs.Policy.of("O3", dtype="fp16"))
    rows = verdict.story
    assert (verdict.op, verdict.kind, len(rows)) == ("mul", "overflow", 8)
    last = rows[-1]
    assert (last.op, last.module, last.line, last.finite) == (verdict.op, verdict.module, verdict.line, False)
    assert last.limit == 65504 and all(row.finite for row in rows[:-1])
    (grown,) = (row for row in rows if row.line.endswith("large = h * 3000.0"))
    assert 1000 < grown.largest < 3000
    assert any("passed 1000 first in mul" in note and "large = h * 3000.0" in note for note in verdict.notes)


def test_a_story_of_a_gradient_follows_the_backward_pass() -> None:
    def after(m: Any, h: Tensor) -> Tensor:
        return m.last(m.first(h * 0))  # type: ignore[no-any-return]

    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.no_grad():
        first.weight.mul_(1e3)
        last.weight.mul_(1e3)
    verdict = explained(
        after,
        first=first,
        last=last,
        policy=hs.Policy.of("O3", dtype="fp16", scale=1.0),
        loss_fn=lambda m, x: (m(x) * 100.0).float().mean(),
    )
    assert (verdict.kind, verdict.phase, verdict.module) == ("overflow", "backward", "first")
    assert [row.module for row in verdict.story if row.op == "linear"] == ["last", "first"]


def divided(m: Any, h: Tensor) -> Tensor:
    return h.masked_fill(HIDDEN, -INF) / m.temperature.weight.sum()  # type: ignore[no-any-return]


def multiplied(m: Any, h: Tensor) -> Tensor:
    return h.masked_fill(HIDDEN, -INF) * torch.where(HIDDEN, 0.0, 1.0)


def less_the_maximum(m: Any, h: Tensor) -> Tensor:
    masked = h.masked_fill(torch.ones(8, dtype=torch.bool), -INF)
    return masked - masked.amax(-1, keepdim=True) + h


def probabilities_times_logarithms(m: Any, h: Tensor) -> Tensor:
    logs = h.masked_fill(HIDDEN, -INF).log_softmax(-1)
    return logs.exp() * logs


def entropy(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(
    ("after", "op", "phase"),
    [
        (divided, "div", "backward"),
        (multiplied, "mul", "forward"),
        (less_the_maximum, "sub", "forward"),
        (probabilities_times_logarithms, "mul", "forward"),
    ],
)
def test_a_mask_that_arithmetic_makes_nan_is_named_with_its_line(after: Any, op: str, phase: str) -> None:
    verdict = explained(after, policy="O0", loss_fn=entropy, temperature=nn.Linear(2, 1))
    assert (verdict.kind, verdict.op, verdict.phase) == ("invalid", op, phase)
    assert "the mask's -inf" in verdict.detail and "masked_fill at test_story.py:" in verdict.detail
    assert "finite inputs" not in str(verdict) and "divisor" not in str(verdict)
    assert "masked_fill" in {row.op for row in verdict.story}


def test_a_mask_in_a_buffer_or_a_batch_is_named() -> None:
    mask = torch.where(HIDDEN, -INF, 0.0)

    def with_buffer(m: Any, h: Tensor) -> Tensor:
        return (h + m.keep.mask) / m.temperature.weight.sum()  # type: ignore[no-any-return]

    keep = nn.Module()
    keep.register_buffer("mask", mask)
    verdict = explained(with_buffer, policy="O0", loss_fn=entropy, temperature=nn.Linear(2, 1), keep=keep)
    assert (verdict.kind, verdict.op) == ("invalid", "div") and "comes from keep.mask" in verdict.detail

    def apart(model: Any, pair: list[Tensor]) -> Tensor:
        return F.cross_entropy((model(pair[0]) + pair[1]) * model.enter.bias.exp(), torch.zeros(4, dtype=torch.long))

    pair: Any = [torch.randn(4, 8), mask.expand(4, 8).clone()]
    verdict = explained(lambda m, h: h, policy="O0", x=pair, loss_fn=apart)
    assert (verdict.kind, verdict.op) == ("invalid", "mul") and "comes from input 1" in verdict.detail


def times_infinity(m: nn.Module, h: Tensor) -> Tensor:
    return h + HIDDEN.float() * -INF


@pytest.mark.parametrize("after", [times_infinity, multiplied, less_the_maximum])
def test_inputs_that_hold_infinities_are_not_called_finite(after: Callable[..., Tensor]) -> None:
    verdict = explained(after, policy="O0", loss_fn=entropy)
    assert verdict.kind == "invalid" and "finite inputs" not in str(verdict) and "inf" in verdict.detail


def test_a_row_that_is_masked_out_is_named_with_its_mask() -> None:
    def after(m: nn.Module, h: Tensor) -> Tensor:
        rows = torch.zeros(4, 8, dtype=torch.bool)
        rows[2] = True
        return h.masked_fill(rows, -INF).softmax(-1) + h

    verdict = explained(after)
    assert verdict.op == "softmax" and verdict.detail.startswith("1 of 4 rows is masked out entirely, the first at [2]")
    assert "masked_fill at test_story.py:" in verdict.detail


# ---------------------------------------------------------------------- casts


def test_the_cast_of_a_weight_that_an_update_made_too_large_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    step = hs.TrainStep(model, optimizer, squared, policy=hs.Policy.of("O2", dtype="fp16"))
    x = torch.randn(4, 8)
    step(x)
    for group in step.optimizer.param_groups:
        group["lr"] = 1e7
    while step(x).host().updated:
        pass
    verdict = step.explain()
    assert (verdict.kind, verdict.op, verdict.module, verdict.parameter) == ("overflow", "to", "0", "0.weight")
    assert verdict.value > 65504 == verdict.limit and "cast to float16" in verdict.detail
    assert verdict.cause == "divergence" and "in fp32: finite once: not finite in step 2" in verdict.because


def test_the_cast_of_a_weight_in_a_loop_of_ones_own_is_named() -> None:
    low = nn.Linear(8, 8).half()
    masters = [p.detach().float().clone().requires_grad_() for p in low.parameters()]
    with torch.no_grad():
        masters[0][0, 0] = 1e5
        low.weight.copy_(masters[0])
    box = hs.BlackBox(low, lambda m, x: squared(m, x.half()), torch.optim.SGD(masters, 1e-3))
    box(torch.randn(4, 8)).backward()
    verdict = box.explain()
    assert (verdict.op, verdict.parameter, verdict.value) == ("to", "weight", 1e5)
    with torch.no_grad():
        masters[0][0, 0] = 1.0  # it is not the cast then
    box(torch.randn(4, 8)).backward()
    assert box.explain().kind == "bad_state"
