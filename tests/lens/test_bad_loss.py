"""A loss that is not finite while all gradients are: the update is applied, and the black box says what made it so."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.lens.box.stepbox import MOST_REPLAYS, Streak
from tests.lens.broken import Body, squared
from tests.two_processes import in_two_processes

FP16 = hs.Policy.of("mixed", dtype="fp16", scale=64.0)
NAMED = "the loss is not finite while gradients are"


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Add a term whose square leaves fp16 where x is large, and whose gradient does not."""
    h = model(x / x.max()).half() + x.max().half()
    return h.float().mean() + (h * h).mean().float()  # type: ignore[no-any-return]


def made(blackbox: Any = True, **settings: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return hs.TrainStep(model, optimizer, loss_fn, policy=FP16, blackbox=blackbox, **settings)


def rows(large: bool) -> Tensor:
    return torch.full((4, 8), 300.0 if large else 1.0)


def test_it_is_explained_and_the_verdict_says_with_which_weights(caplog: pytest.LogCaptureFixture) -> None:
    step = made()
    with caplog.at_level(logging.WARNING, "halfstep"):
        result = step(rows(True)).host()
    assert result.updated and math.isinf(result.loss)
    verdict = step.explain()
    assert (verdict.kind, verdict.op, verdict.phase) == ("overflow", "mul", "forward")
    assert " return h.float().mean() + (h * h).mean().float()" in verdict.line
    assert any("the weights have been written to since" in note for note in verdict.notes)
    named, found = (record.getMessage() for record in caplog.records)
    assert f"step 1: {NAMED}" in named and found.startswith(f"black box: {verdict.headline}")


def test_it_is_not_reproducible_if_the_update_has_made_it_finite() -> None:
    step = made()
    with torch.no_grad():
        next(step.model.parameters()).fill_(1.0)
    for group in step.optimizer.param_groups:
        group["lr"] = 1e-2  # afterwards h is below 256, whose square fits
    assert math.isinf(step(torch.full((4, 8), 249.0)).host().loss)
    verdict = step.explain()
    assert verdict.kind == "not_reproducible"
    assert any("the weights have been written to since" in note for note in verdict.notes)
    assert any("was inf and is" in note for note in verdict.notes)


def test_one_line_for_a_streak_and_one_name_for_all(caplog: pytest.LogCaptureFixture) -> None:
    step = made()
    with caplog.at_level(logging.WARNING, "halfstep"):
        for large in (True, True, False, True, False):
            step(rows(large))
    texts = [record.getMessage() for record in caplog.records]
    assert sum(NAMED in text for text in texts) == 1
    assert sum(" | mul in " in text for text in texts) == 1
    assert step._verdicts.box._lone == 2


def test_no_more_than_so_many_are_replayed_unasked() -> None:
    step = made()
    for k in range(2 * MOST_REPLAYS + 4):
        step(rows(k % 2 == 0))
    assert step._verdicts.box._lone == MOST_REPLAYS


def test_a_long_streak_has_a_name_of_its_own() -> None:
    trouble = Streak()
    said = [text for _ in range(30) for text in trouble.lost()]
    assert [text.partition(":")[0] for text in said] == [
        NAMED,
        "10 steps in a row had a loss that is not finite and gradients that are",
    ]
    trouble.fine()
    assert (trouble.losses, trouble.streak) == (0, 0)


def test_a_micro_batch_in_the_middle_of_a_window_can_be_asked_about() -> None:
    step = made(accumulate=3)
    step(rows(False))
    step(rows(True))
    verdict = step.explain()
    assert verdict.op == "mul" and verdict.step == 2
    assert not any("written to" in note for note in verdict.notes)
    assert step(rows(False)).host().updated
    assert "micro-batch 2 of 3 of its window" in step.explain().notes


def test_it_can_be_asked_about_until_the_next_step_begins() -> None:
    step = made()
    step(rows(False))
    with pytest.raises(StepError, match="was applied and its loss was finite"):
        step.explain()
    step(rows(True))
    first = step.explain()
    assert step.explain() is first
    step(rows(False))
    assert step.explain() is first  # nothing newer


def test_training_is_the_same_bit_for_bit_with_and_without() -> None:
    def run(blackbox: bool) -> list[Tensor]:
        step = made(blackbox, accumulate=2)
        losses = [step(rows(k in (1, 4))).host().loss for k in range(8)]
        return [*step.model.state_dict().values(), torch.get_rng_state(), torch.tensor(losses)]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_a_good_step_runs_no_operator_for_it() -> None:
    """What the box is given to look at is the host's memory; torch is not asked."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for blackbox in (True, False):
        step = made(blackbox)
        for _ in range(2):
            step(rows(False))
        with Counts() as mode:  # type: ignore[no-untyped-call]
            step(rows(False))
        counts.append(mode.count)
    assert counts[0] == counts[1]


def test_a_loop_written_by_hand_names_it_too(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    box = hs.BlackBox(model, loss_fn, optimizer)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for large in (True, False):
            box(rows(large)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert box.verdict is not None and box.verdict.op == "mul"
    assert not any("written to" in note for note in box.verdict.notes)
    assert f"step 1: {NAMED}" in caplog.text


def test_a_loop_written_by_hand_names_repeated_trouble(caplog: pytest.LogCaptureFixture) -> None:
    model = Body(lambda m, h: h)
    with torch.no_grad():
        model.enter.weight.fill_(math.nan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    box = hs.BlackBox(model, squared, optimizer)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(3):
            optimizer.zero_grad()
            box(torch.ones(2, 8)).backward()
            box.read()
    assert "weights or optimizer state are not finite: no step can be finite any more" in caplog.text


def test_weights_that_are_not_finite_are_named_in_a_training_step(caplog: pytest.LogCaptureFixture) -> None:
    model = Body(lambda m, h: h)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), squared, policy=FP16.replace(scale="none"))
    with torch.no_grad():
        model.enter.weight.fill_(math.nan)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(4):
            assert step(torch.ones(2, 8)).host().skipped
    assert caplog.text.count("weights or optimizer state are not finite") == 1


def test_a_bf16_run_that_skips_is_named_in_a_training_step(caplog: pytest.LogCaptureFixture) -> None:
    model = Body(lambda m, h: h)
    step = hs.TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), squared, policy=FP16.replace(dtype="bf16", scale="none")
    )
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(4):
            assert step(torch.full((2, 8), math.inf)).host().skipped
    assert caplog.text.count("bf16 skips steps") == 1


def test_a_bf16_run_that_skips_is_named_where_the_device_has_chosen_bf16(caplog: pytest.LogCaptureFixture) -> None:
    model = Body(lambda m, h: h)
    model, optimizer, _ = hs.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed")  # dtype "auto"
    box = hs.BlackBox(model, squared, optimizer)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(3):
            box(torch.full((2, 8), math.inf)).backward()
            box.read()  # what the optimizer's step would ask for; without a step weights stay finite
            optimizer.zero_grad()
    assert caplog.text.count("bf16 skips steps") == 1


# -------------------------------------------------------------------------------------------------------------- ranks


def _train(rank: int) -> tuple[list[Any], Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(8, 8, bias=False)
    model, optimizer, scaler = hs.prepare(net, torch.optim.SGD(net.parameters(), 1e-6), policy=FP16)
    step = hs.TrainStep(nn.parallel.DistributedDataParallel(model), optimizer, loss_fn, scaler=scaler)
    seen: list[Any] = []
    for k in range(6):  # a bad loss on the second rank, then a batch that makes both skip, then good ones
        x = rows(k == 1 and rank == 1)
        x = x * math.nan if k == 3 and rank == 0 else x
        result = step(x).host()
        verdict = None if step._verdicts.box is None else step._verdicts.box.verdict
        seen.append((result.updated, None if verdict is None else (verdict.kind, verdict.rank, verdict.step)))
    seen.append(_refused(rank))
    if rank == 0:
        step.state_dict()  # by one rank alone, as it is saved
    return seen, net.weight.detach().float()


def _refused(rank: int) -> tuple[bool, str]:
    """Train one step of a loss that gathers over ranks and is bad on the second; return what explain() says."""

    def gathered(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        total = h.detach().sum()
        dist.all_reduce(total)
        return loss_fn(model, x) + total * 0  # type: ignore[no-any-return]

    net = nn.Linear(8, 8, bias=False)
    step = hs.TrainStep(net, torch.optim.SGD(net.parameters(), 1e-6), gathered, policy=FP16)
    result = step(rows(rank == 1)).host()
    try:
        step.explain()
    except StepError as error:
        return math.isinf(result.loss), str(error)
    return math.isinf(result.loss), ""


@pytest.mark.dist
def test_a_rank_explains_its_own_bad_loss_alone_and_a_bad_step_with_the_others(tmp_path: Path) -> None:
    (first, w0), (second, w1) = in_two_processes(_train, tmp_path)
    (_, nothing), (lossy, refusal) = first.pop(), second.pop()
    assert lossy and "communicates with other ranks (c10d." in refusal and "a replay runs on one alone" in refusal
    assert "there is no step to explain" in nothing
    for seen in (first, second):
        assert [updated for updated, _ in seen] == [True, True, True, False, True, True]
    assert [said for _, said in first] == [None, None, None, *[("bad_batch", 0, 4)] * 3]
    assert [said for _, said in second] == [None, *[("overflow", 1, 2)] * 2, *[("bad_batch", 0, 4)] * 3]
    assert torch.equal(w0, w1)


# ---------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
def test_losses_land_on_the_host_without_a_kernel_and_without_a_wait() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=FP16, accumulate=2)
    batches = [rows(k == 6).cuda() for k in range(8)]
    for k, x in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if k in (4, 5) else "default")
        try:
            step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert step.explain().op == "mul"
    assert len(step.record.landing.landed()) == 3
