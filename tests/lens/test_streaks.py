"""Many bad steps in a row: the third is replayed at lower scales, which decides whether to wait or what is wrong."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.lens.box.stepbox import SkippedStep, Streak
from tests.lens.test_blackbox import SEEN

FP16 = hs.Policy.of("mixed", dtype="fp16")


def rooted(model: nn.Module, x: Tensor) -> Tensor:
    """Return a finite loss whose gradient is not: that of a root at 0, on the diagonal."""
    z = model(x)
    return torch.relu(1 - (z[:, None] - z[None]).pow(2).sum(-1).sqrt()).float().mean()


def large(model: nn.Module, x: Tensor) -> Tensor:
    return 3e6 * model(x).float().square().mean()  # type: ignore[no-any-return]


def small(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


class Run:
    """A run of a TrainStep, or of a loop written by hand with torch's scaler."""

    def __init__(self, loop: str, loss_fn: Any, scale: float = 2.0**16) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(16, 8)
        self.calls = 0
        self.model.register_forward_hook(self._count)
        self.loop, self.optimizer = loop, torch.optim.SGD(self.model.parameters(), 1e-9)
        self.x = torch.randn(8, 16)
        if loop == "step":
            scaler = hs.GradScaler("cpu", init_scale=scale)
            self.step: Any = hs.TrainStep(self.model, self.optimizer, loss_fn, policy=FP16, scaler=scaler)
        else:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            self.step = hs.BlackBox(self.model, lambda m, x: _low(loss_fn, m, x), self.optimizer)

    @property
    def box(self) -> Any:
        return self.step._verdicts.box if self.loop == "step" else self.step

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def __call__(self, factor: float = 1.0) -> None:
        if self.loop == "step":
            self.step(self.x * factor).host()
            return
        self.optimizer.zero_grad()
        self.scaler.scale(self.step(self.x * factor)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _low(loss_fn: Any, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        loss: Tensor = loss_fn(model, x)
    return loss


LOOPS = pytest.mark.parametrize("loop", ["step", "hand"])


@LOOPS
@pytest.mark.filterwarnings("ignore:the loss scale is at its floor")
def test_gradients_that_no_scale_makes_finite_are_explained_at_the_third(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(loop, rooted)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(2):
            run()
        assert not caplog.records
        for _ in range(2):  # the verdict of a loop comes with the next call
            run()
        assert len(caplog.records) == 1 and "sqrt" in caplog.text
        for _ in range(36):
            run()
    assert "use bf16" not in caplog.text and len(caplog.records) <= 3
    verdict = run.box.verdict
    assert verdict is not None and (verdict.op, verdict.phase, verdict.step) == ("sqrt", "backward", 3)
    assert any(note.startswith("no loss scale helps: at 6.1") for note in verdict.notes)


@LOOPS
def test_a_streak_that_a_lower_scale_ends_costs_one_replay_and_no_word(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(loop, small, 2.0**24)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(5):
            run(factor=30.0)
    trouble = run.box._streak
    assert trouble.helps == 1.0 and trouble.streak >= 3  # it was a streak
    assert not caplog.records and run.calls == 6


@LOOPS
def test_it_is_said_that_a_loss_needs_a_scale_below_one(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(loop, large)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(36):
            run()
    texts = [record.getMessage() for record in caplog.records]
    assert "the loss is too large for fp16 gradients: at a loss scale of 1 they overflow too" in texts[0]
    assert not any("does not help" in text or "no loss scale helps" in text for text in texts)
    assert all("training stands still" in text and "finite at a loss scale of" in text for text in texts[1:])


@LOOPS
def test_a_verdict_on_a_scale_below_one_says_that_it_helps(loop: str) -> None:
    run = Run(loop, large)
    for _ in range(18):
        run()
    verdict = run.step.explain()
    assert verdict.kind == "scale_too_high" and verdict.cures[0].verified
    found = float(verdict.cures[0].text.partition("; at ")[2].partition(" ")[0])
    assert 0 < found < 1


@LOOPS
def test_a_streak_that_changes_its_reason_is_examined_again(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first three wait for the scale, and then gradients come that no scale makes finite."""
    run = Run(loop, lambda m, x: rooted(m, x) if float(x.abs().max()) < 1 else small(m, x), 2.0**40)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for k in range(8):
            run(factor=1.0 if k < 4 else 0.1)
    verdict = run.box.verdict
    assert verdict is not None and (verdict.op, verdict.step) == ("sqrt", 6)


def test_a_scaled_loss_that_its_format_cannot_hold_is_no_tensor_that_is_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run("hand", lambda m, x: m(x).square().mean(), 2.0**20)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(4):
            run(factor=0.01)
        verdict = run.box.explain()
        assert verdict.kind == "scale_too_high" and "float16, which cannot hold it" in verdict.because
        for _ in range(4):
            run(factor=0.01)
    assert not caplog.records and run.box._streak.streak == 0


def test_steps_that_are_examined() -> None:
    trouble = Streak()
    seen = []
    for streak in range(1, 50):
        trouble.skipped()
        seen += [streak] if trouble.undecided else []
    assert seen == [3, 6, 12, 24, 48]
    trouble.verdict = hs.lens.Verdict(kind="invalid")
    trouble.streak = 3
    assert not trouble.undecided


def test_the_floor_of_a_scale_blames_no_format(caplog: pytest.LogCaptureFixture) -> None:
    def said(**known: Any) -> str:
        (text,) = Streak(streak=2, **known).see(SkippedStep(**{**SEEN, "scale": 2.0**-14}))
        return text

    assert "bf16" not in said() and "step.explain() looks for it" in said()
    assert "the verdict on step 3 has the reason" in said(verdict=hs.lens.Verdict(kind="invalid", step=3))


def test_steps_that_were_applied_are_not_said_to_be_skipped() -> None:
    def said(applied: bool) -> str:
        trouble, seen = Streak(), SkippedStep(**{**SEEN, "scaling": "none", "low": "bf16", "applied": applied})
        texts: list[str] = []
        for _ in range(12):
            trouble.skipped()
            texts += trouble.see(seen)
        return "; ".join(texts)

    assert "skip" in said(False) and "skip" not in said(True) and "were not finite" in said(True)
    assert math.isfinite(SEEN["scale"])
