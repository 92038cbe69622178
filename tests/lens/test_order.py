"""Errors in the order of a loop's calls, each beside a loop that does the same rightly."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.lens.box.loop import Loop

Data = tuple[Tensor, Tensor]


def net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.ReLU(), nn.Linear(16, 4))


def data(step: int, factor: float = 1.0) -> Data:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator) * factor, torch.randint(0, 4, (16,), generator=generator)


def low(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x), y)


class Program:
    """A loop in fp16 with what it needs; `run` does its steps and returns what was logged."""

    def __init__(
        self, *, scale: float = 2.0**10, norm: bool = False, kind: Any = torch.optim.SGD, **options: Any
    ) -> None:
        self.model = net(norm=norm)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.box = hs.BlackBox(self.model, low, self.optimizer)

    def backward(self, step: int, factor: float = 1.0) -> None:
        self.scaler.scale(self.box(*data(step, factor))).backward()

    def clip(self, limit: float = 0.1) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


Body = Callable[[Program, int], None]


def said(program: Program, body: Body, caplog: pytest.LogCaptureFixture, steps: int = 8) -> list[str]:
    with caplog.at_level(logging.WARNING, "halfstep"):
        for step in range(1, steps + 1):
            body(program, step)
    return [record.getMessage() for record in caplog.records]


# ------------------------------------------------------------------------------------------------------ healthy loops


def plain(p: Program, step: int) -> None:
    p.backward(step)
    p.update()
    p.optimizer.zero_grad()


def clears_first(p: Program, step: int) -> None:
    p.optimizer.zero_grad()
    p.backward(step)
    p.update()


def clears_between(p: Program, step: int) -> None:
    loss = p.box(*data(step))
    p.optimizer.zero_grad()
    p.scaler.scale(loss).backward()
    p.update()


def zeroes(p: Program, step: int) -> None:
    p.backward(step)
    p.update()
    p.optimizer.zero_grad(set_to_none=False)


def accumulates(p: Program, step: int) -> None:
    p.scaler.scale(p.box(*data(step)) / 4).backward()
    if step % 4 == 0:
        p.update()
        p.optimizer.zero_grad()


def clips(p: Program, step: int) -> None:
    p.backward(step)
    p.scaler.unscale_(p.optimizer)
    p.clip()
    plain_end(p)


def plain_end(p: Program) -> None:
    p.update()
    p.optimizer.zero_grad()


def clips_scaled_limit(p: Program, step: int) -> None:
    p.backward(step)
    p.clip(0.1 * p.scaler.get_scale())
    plain_end(p)


def clips_values(p: Program, step: int) -> None:
    p.backward(step)
    p.scaler.unscale_(p.optimizer)
    nn.utils.clip_grad_value_(p.model.parameters(), 0.01)
    plain_end(p)


def decays_gradients(p: Program, step: int) -> None:
    p.backward(step)
    p.update()
    for parameter in p.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def scales_by_hand(p: Program, step: int) -> None:
    (p.box(*data(step)) * 64.0).backward()
    for parameter in p.model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(64.0)
    p.optimizer.step()
    p.optimizer.zero_grad()


def weighs_the_loss(p: Program, step: int) -> None:
    (p.box(*data(step)) * 2.0).backward()
    p.optimizer.step()
    p.optimizer.zero_grad()


def two_passes(p: Program, step: int) -> None:
    """The second pass is not seen by the box, and has an update of its own."""
    plain(p, step)
    low(p.model, *data(step)).backward()
    p.optimizer.step()
    p.optimizer.zero_grad()


def two_passes_zeroed(p: Program, step: int) -> None:
    """The same where gradients stay the same tensors, with the batch of the first pass."""
    p.backward(step)
    p.update()
    p.optimizer.zero_grad(set_to_none=False)
    low(p.model, *data(step)).backward()
    p.optimizer.step()
    p.optimizer.zero_grad(set_to_none=False)


def clears_some_steps(p: Program, step: int) -> None:
    """Every third step is left out by clearing its gradients."""
    p.box(*data(step)).backward()
    if step % 3 == 2:
        p.optimizer.zero_grad()
    p.optimizer.step()
    p.optimizer.zero_grad()


def skips_by_hand(p: Program, step: int) -> None:
    loss = p.box(*data(step, 1e6 if step == 4 else 1.0))
    loss.backward()
    if all(bool(q.grad.isfinite().all()) for q in p.model.parameters() if q.grad is not None):
        p.optimizer.step()
    p.optimizer.zero_grad()


def evaluates(p: Program, step: int) -> None:
    plain(p, step)
    with torch.no_grad():
        p.box(*data(step))


HEALTHY: dict[str, tuple[Body, dict[str, Any]]] = {
    "plain": (plain, {}),
    "adam": (plain, {"kind": torch.optim.AdamW}),
    "fused": (plain, {"kind": torch.optim.AdamW, "fused": True}),
    "momentum": (plain, {"momentum": 0.9}),
    "zero_grad first": (clears_first, {}),
    "zero_grad after the forward pass": (clears_between, {}),
    "set_to_none=False": (zeroes, {}),
    "set_to_none=False, foreach": (zeroes, {"foreach": True}),
    "set_to_none=False, fused": (zeroes, {"fused": True}),
    "accumulation": (accumulates, {}),
    "clip in order": (clips, {}),
    "clip to a scaled limit": (clips_scaled_limit, {}),
    "clip values in order": (clips_values, {}),
    "gradients that decay": (decays_gradients, {}),
    "a scale by hand": (scales_by_hand, {}),
    "a weight on the loss": (weighs_the_loss, {}),
    "two losses, two updates": (two_passes, {}),
    "two losses, two updates, in the same gradients": (two_passes_zeroed, {}),
    "steps left out by clearing gradients": (clears_some_steps, {}),
    "evaluation through the box": (evaluates, {"norm": True}),
    "a scaler that skips rightly": (plain, {"scale": 2.0**22}),
    "a scaler that skips rightly, fused": (plain, {"scale": 2.0**22, "kind": torch.optim.SGD, "fused": True}),
    "accumulation, and a scaler that skips rightly": (accumulates, {"scale": 2.0**24}),
    "clip in order, and a scaler that skips rightly": (clips, {"scale": 2.0**22}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_not_accused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    body, options = HEALTHY[name]
    program = Program(**options)
    assert said(program, body, caplog, 12) == []
    assert program.box.verdict is None


def test_a_loop_that_skips_by_hand_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    program = Program()
    texts = said(program, skips_by_hand, caplog)
    assert len(texts) == 1 and "linear" in texts[0]
    verdict = program.box.verdict
    assert verdict is not None and verdict.step == 4 and verdict.cause != "loop"
    assert "its update was not applied: the weights are as they were" in verdict.notes


def test_closures_are_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    box = hs.BlackBox(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = box(*data(1))
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "halfstep"):
        for _ in range(3):
            optimizer.step(closure)
    assert not caplog.records and box.verdict is None


def test_a_gan_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    """Its generator's backward pass leaves gradients in the critic, after the critic's update."""
    critic, maker = nn.Linear(8, 1), nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (critic, maker)]
    boxes = [
        hs.BlackBox(critic, lambda m, x: m(x).mean() - m(maker(x).detach()).mean(), optimizers[0]),
        hs.BlackBox(maker, lambda m, x: critic(m(x)).square().mean(), optimizers[1]),
    ]
    with caplog.at_level(logging.WARNING, "halfstep"):
        for step in range(6):
            for box, optimizer in zip(boxes, optimizers, strict=True):
                optimizer.zero_grad()
                box(data(step)[0]).backward()
                optimizer.step()
    assert not caplog.records


# -------------------------------------------------------------------------------------------------------------- errors


def never_clears(p: Program, step: int) -> None:
    p.backward(step)
    p.update()


def steps_twice(p: Program, step: int) -> None:
    p.backward(step)
    p.update()
    p.optimizer.step()  # here
    p.optimizer.zero_grad()


def scaler_steps_twice(p: Program, step: int) -> None:
    p.backward(step)
    p.update()
    p.update()
    p.optimizer.zero_grad()


def clears_too_early(p: Program, step: int) -> None:
    p.scaler = torch.amp.GradScaler("cpu", enabled=False)
    p.backward(step)
    p.optimizer.zero_grad()
    p.update()


def scales_twice(p: Program, step: int) -> None:
    p.scaler.scale(p.scaler.scale(p.box(*data(step)))).backward()
    plain_end(p)


def clips_first(p: Program, step: int) -> None:
    p.backward(step)
    p.clip()
    plain_end(p)


def clips_values_first(p: Program, step: int) -> None:
    p.backward(step)
    nn.utils.clip_grad_value_(p.model.parameters(), 0.01)
    plain_end(p)


def forgets_the_scaler(p: Program, step: int) -> None:
    p.backward(step)
    p.optimizer.step()
    p.optimizer.zero_grad()


WRONG: dict[str, tuple[Body, str, int]] = {
    "never clears": (never_clears, r"zero_grad\(\) is missing: .* of step 3 begins", 3),
    "steps twice": (steps_twice, r"stepped twice with the gradients of one backward pass, at test_order.py:\d+ and", 2),
    "the scaler steps twice": (scaler_steps_twice, r"stepped twice with the gradients of one backward pass", 2),
    "clears too early": (clears_too_early, r"zero_grad\(\) ran between backward\(\) and the update", 2),
    "scales twice": (scales_twice, r"multiplied by 262144 before backward\(\), the square of the loss scale", 2),
    "clips first": (clips_first, r"clip_grad_norm_ ran before unscale_.*0\.1 / 1024", 3),
    "clips values first": (clips_values_first, r"clip_grad_value_ ran before unscale_.*0\.01 / 1024", 3),
    "forgets the scaler": (forgets_the_scaler, r"in the place of scaler.step.*multiplied by the loss scale, 1024", 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_reported_once_and_explained(name: str, caplog: pytest.LogCaptureFixture) -> None:
    body, words, step = WRONG[name]
    program = Program()
    texts = said(program, body, caplog, 5)
    verdict = program.box.explain()
    assert (verdict.kind, verdict.cause, verdict.sure, verdict.step) == ("loop", "loop", "shown", step)
    assert re.search(words, verdict.because), verdict.because
    assert len(texts) == 1 and len(verdict.cures) == 1


def test_a_step_past_the_scaler_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    program = Program(scale=2.0**22)
    texts = said(program, steps_twice, caplog, 1)
    verdict = program.box.explain()
    assert (verdict.kind, verdict.cause, verdict.sure, verdict.step) == ("loop", "loop", "shown", 1)
    assert "p.optimizer.step()  # here" in verdict.line and "4 of 4 parameters are not finite" in verdict.because
    assert len(texts) == 1
    said(program, steps_twice, caplog, 4)
    later = program.box.explain()
    assert later.cause == "loop" and "is not finite since the update of step 1: optimizer.step() at" in later.because
    assert later.line == verdict.line and later.step > 1


class GradScalerSettings:
    """Has the name of a scaler, and is none; has no attributes either."""

    __slots__ = ()


def test_odd_objects_in_the_loop_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = GradScalerSettings()

    def body(p: Program, step: int) -> None:
        own = settings
        steps_twice(p, step)
        del own

    texts = said(Program(scale=2.0**22), body, caplog, 2)
    assert "step 1" in texts[0] and not any("was not looked at" in text for text in texts)


def test_a_step_past_the_scaler_on_a_bad_batch_keeps_its_place(caplog: pytest.LogCaptureFixture) -> None:
    program = Program()

    def body(p: Program, step: int) -> None:
        p.backward(step, math.inf if step == 2 else 1.0)
        p.update()
        if step == 2:
            p.optimizer.step()
        p.optimizer.zero_grad()

    said(program, body, caplog, 2)
    verdict = program.box.explain()
    assert (verdict.kind, verdict.cause, verdict.parameter) == ("bad_batch", "loop", "input 0")
    assert "outside of GradScaler.step" in verdict.because


def test_what_the_loop_computes_from_the_loss_is_said_to_be_the_loops() -> None:
    program = Program()
    loss = program.box(*data(1))
    (loss / torch.zeros(())).backward()
    assert any("the loop has computed it" in note for note in program.box.explain().notes)


def test_a_bad_step_that_no_scaler_protects_is_said_to_be_applied(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    box = hs.BlackBox(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
    with caplog.at_level(logging.WARNING, "halfstep"):
        for step in range(1, 4):
            x, y = data(step)
            box(x * (math.nan if step == 2 else 1.0), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    first = box.verdict
    assert first is not None and (first.kind, first.step) == ("bad_batch", 2)
    assert any("its update was applied by optimizer.step() at test_order.py" in note for note in first.notes)
    x, y = data(9)
    box(x, y).backward()
    assert "is not finite since the update of step 2: " in box.explain().because


@pytest.mark.hours
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_an_optimizer_whose_step_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    program = Program()
    program.scaler = torch.amp.GradScaler("cpu", enabled=False)
    step: Callable[[], Any] = torch.compile(program.optimizer.step, backend="eager")

    def body(p: Program, number: int) -> None:
        p.backward(number, math.nan if number == 3 else 1.0)
        step()
        p.optimizer.zero_grad()

    texts = said(program, body, caplog, 4)
    verdict = program.box.verdict
    assert verdict is not None and (verdict.kind, verdict.step) == ("bad_batch", 3)
    assert any("its update was applied" in note for note in verdict.notes)
    assert not any("was not looked at" in text for text in texts)


@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_of_a_bad_step_that_are_never_cleared_are_the_loops(
    scaled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop clears gradients only after steps that were applied."""

    def body(p: Program, step: int) -> None:
        x, y = data(step)
        loss = p.box(x * (math.inf if step == 3 else 1.0), y)
        (p.scaler.scale(loss) if scaled else loss).backward()
        if scaled:
            p.update()
        bad = any(not bool(q.grad.isfinite().all()) for q in p.model.parameters() if q.grad is not None)
        if not bad:
            if not scaled:
                p.optimizer.step()
            p.optimizer.zero_grad()

    program = Program()
    texts = said(program, body, caplog, 6)
    verdict = program.box.verdict
    assert verdict is not None and (verdict.kind, verdict.cause, verdict.step) == ("loop", "loop", 4)
    assert "the gradients of step 3" in verdict.because and "its own are finite" in verdict.because
    assert len(texts) == 2 and "step 3" in texts[0] and "step 4" in texts[1]


def test_a_bad_micro_batch_makes_no_streak_of_its_window(caplog: pytest.LogCaptureFixture) -> None:
    def body(p: Program, step: int) -> None:
        p.scaler.scale(p.box(*data(step, math.inf if step == 9 else 1.0)) / 8).backward()
        if step % 8 == 0:
            plain_end(p)

    program = Program()
    said(program, body, caplog, 16)
    assert program.box._streak.streak <= 1
    verdict = program.box.verdict
    assert verdict is not None and (verdict.kind, verdict.step) == ("bad_batch", 9)
    assert len(caplog.records) == 1


def test_statistics_that_a_skipped_step_has_left_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def body(p: Program, step: int) -> None:
        p.backward(step, math.inf if step == 2 else 1.0)
        plain_end(p)

    program = Program(norm=True)
    texts = said(program, body, caplog, 4)
    assert (
        sum("1.running_mean and 1.running_var are not finite since the forward pass of step 2" in t for t in texts) == 1
    )
    verdict = program.box.verdict
    assert verdict is not None and verdict.step == 2 and any("running_mean" in note for note in verdict.notes)
    program.model.eval()
    program.backward(9)
    after = program.box.explain()
    assert after.cause == "loop" and after.parameter.startswith("1.running_") and "step 2" in after.because


def test_a_scale_that_never_falls_is_not_called_dynamic(caplog: pytest.LogCaptureFixture) -> None:
    """A scaler that is made anew in each step skips them all."""

    def body(p: Program, step: int) -> None:
        p.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        plain(p, step)

    program = Program()
    texts = said(program, body, caplog, 8)
    assert len(texts) == 1 and "step 6" in texts[0]
    verdict = program.box.verdict
    assert verdict is not None and "fixed" in verdict.detail and any("make the scaler once" in n for n in verdict.notes)


def test_a_good_step_reads_two_gradients_only() -> None:
    """Nothing of a good step grows with the number of parameters, and no value is read after the first updates."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)])
    loop = Loop()
    loop.optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    model(torch.ones(2, 4)).sum().backward()
    loop.end()
    assert len(loop._made) == 2


def test_unscaled_gradients_are_not_said_to_be_scaled() -> None:
    """The unscale_ of torch counts no version of a gradient, so a step past the scaler is told by the values."""
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=64.0)
    box = hs.BlackBox(model, lambda model, x: model(x).square().mean(), optimizer)
    for _ in range(4):
        scaler.scale(box(torch.ones(2, 4))).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
    assert box.verdict is None
