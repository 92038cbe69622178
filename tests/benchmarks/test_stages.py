"""Stages are those of the step, in every library; weight casts are found where they are."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from benchmarks.cases import Case, mlp_case
from benchmarks.counts import count, watch
from benchmarks.loops import Run, amp, fp32, low, policy
from benchmarks.stages import Stages, recast

SMALL = mlp_case("small", 64, 128, 10)


def started(make: str, case: Case = SMALL) -> Run:
    torch.manual_seed(0)
    model = case.model()
    loop = {"fp32": fp32, "amp": amp}.get(make)
    run = policy(case, model, make) if loop is None else loop(case, model)
    for number in range(2):
        run.step(case.batch(number))
    return run


@pytest.mark.parametrize("make", ["fp32", "amp", "mixed", "pure"])
def test_a_watched_step_has_three_stages_and_ends_in_the_same_place(make: str) -> None:
    watched, plain = started(make), started(make)
    assert watched.stages is not None
    parts = watched.stages.run(lambda: watched.step(SMALL.batch(2)))
    plain.step(SMALL.batch(2))
    assert len(parts) == 3 and all(part > 0 for part in parts)
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


def test_the_tail_begins_when_backward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    weight, stages, told = nn.Parameter(torch.ones(())), Stages("cpu"), []
    weight.register_post_accumulate_grad_hook(lambda p: told.append(stages.stage))

    def step() -> None:
        stages.watched(lambda model: model * 2.0)(weight).backward()
        told.append(stages.stage)

    assert stages.run(step) == (1.0, 1.0, 1.0)
    assert told == ["backward", "tail"]


def test_a_step_without_a_backward_pass_is_refused() -> None:
    with pytest.raises(RuntimeError, match="one forward and one backward pass; this one left 2 marks, not 4"):
        Stages("cpu").run(lambda: None)


def test_torch_amp_casts_every_weight_and_low_weights_need_none() -> None:
    tensors = len(list(SMALL.model().parameters()))
    seen = {make: watch(started(make), SMALL.batch(2))[0] for make in ("fp32", "amp", "pure")}
    assert [len(s.weights) for s in seen.values()] == [0, tensors, 0]
    assert seen["fp32"].casts == 0 and seen["amp"].casts > tensors
    assert all(dtype is torch.bfloat16 for _, _, dtype in seen["amp"].weights)


def test_recast_writes_into_what_it_is_given_and_leaves_the_weight() -> None:
    weight, target = nn.Parameter(torch.randn(3)), torch.zeros(3, dtype=torch.bfloat16)
    before = weight.detach().clone()
    assert recast([(weight, target, torch.bfloat16), (weight, None, torch.bfloat16)], "cpu") > 0
    assert torch.equal(target, before.bfloat16()) and torch.equal(weight.detach(), before)


def test_counts_of_fp32_agree_with_arithmetic() -> None:
    counts, _ = count(started("fp32"), SMALL.batch(2))
    parameters = sum(p.numel() for p in SMALL.model().parameters())
    steps = 4 * len(list(SMALL.model().parameters()))  # fused AdamW's counters, fp32 scalars
    assert counts.state_bytes == 12 * parameters + steps
    assert counts.casts == 0 and counts.host_reads == 0 and counts.launches is None
    assert counts.peak_bytes > counts.state_bytes + 4 * parameters - 1  # gradients


def test_the_limit_trains_nothing_and_casts_nothing_but_its_input() -> None:
    model = SMALL.model()
    run = low(SMALL, model)
    before = [p.detach().clone() for p in model.parameters()]
    loss: Tensor = run.step(SMALL.batch(0))
    assert torch.isfinite(loss) and all(p.dtype is torch.bfloat16 and p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
