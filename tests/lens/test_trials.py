"""Trials: a cure that is called verified trains; the smallest comes first; all is as before afterwards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.binding import fsdp
from halfstep.errors import StepError
from halfstep.lens.box import stepbox
from halfstep.lens.box.advice import CAUSED, INVALID, KINDS, LOADED, NAMED, OVERFLOW, UNTRAINED, WITHOUT
from halfstep.lens.box.data import ALONE
from halfstep.lens.box.trials import STEPS, Trial, Trials
from tests.lens.broken import Body, explained, squared

pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")

FP16 = hs.Policy.of("mixed", dtype="fp16")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Trials]:
    """The trials of each step that is explained."""
    seen: list[Trials] = []

    class Kept(Trials):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append(self)

    monkeypatch.setattr(stepbox, "Trials", Kept)
    return seen


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4)
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def data(factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a batch; a large factor makes it overflow in fp16, and BatchNorm makes it harmless in fp32."""
    generator = torch.Generator().manual_seed(int(factor))
    return factor * torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


class Slow(Optimizer):
    """Steps through another optimizer of the same parameters."""

    def __init__(self, parameters: Any, inner: Callable[[Any], Optimizer]) -> None:
        kept = list(parameters)
        super().__init__(kept, {"lr": 0.1})
        self.inner = inner(kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "one inside another": lambda p: Slow(p, lambda q: torch.optim.SGD(q, 0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_is_the_training_it_stands_for(made: list[Trials], name: str) -> None:
    """From weights, optimizer state, statistics and random numbers of the bad step, on its batch."""
    model = classifier()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # puts a step of its own on the optimizer
    step = hs.TrainStep(model, optimizer, loss_of, policy=FP16, clip_norm=0.5, scheduler=scheduler)
    for _ in range(2):
        assert step(*data()).host().updated
    twin, others = copy.deepcopy((step.model, step.optimizer)), torch.get_rng_state()
    batch = data(1e5)
    assert step(*batch).host().skipped
    cure = step.explain().cures[0]
    assert cure.verified and "module 0 in fp32" in cure.text

    torch.set_rng_state(others)
    hs.unprepare(twin[0])
    reference = hs.TrainStep(*twin, loss_of, policy="O0", clip_norm=0.5)
    losses = [reference(*batch).host().loss for _ in range(STEPS)]
    assert len(set(losses)) == STEPS
    torch.testing.assert_close(made[-1].wide.losses, tuple(losses), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made[-1].of(cure.policy).losses, tuple(losses), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("policy", "fails"), [("mixed", False), ("O2", True), ("pure", False)])
def test_nothing_is_changed_by_a_trial(made: list[Trials], policy: str, fails: bool) -> None:
    class Failing(torch.optim.SGD):
        """Raises in the fourth step after each copy."""

        def step(self, closure: Any = None) -> Any:
            self.__dict__["count"] = self.__dict__.get("count", 0) + 1
            if fails and self.__dict__["count"] > 3:
                raise RuntimeError("no more steps")
            return super().step(closure)

    model = classifier()
    optimizer = Failing(model.parameters(), 0.1, momentum=0.9)
    chosen = hs.Policy.of(policy, dtype="fp16", scale=1.0)
    step = hs.TrainStep(model, optimizer, loss_of, policy=chosen)
    step(*data())
    before: list[Any] = []

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
        tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [
            list(map(id, model.parameters())),
            [Tensor.detach(t).clone() for t in tensors],
            vars(optimizer)["count"],
        ]

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        before[:] = before or state()
        return loss_of(model, x, y)

    step.loss_fn = forward
    batch = data(1e5)
    assert step(*batch).host().skipped
    verdict, after = step.explain(), state()
    assert made and verdict.cures[0].verified != fails
    assert fails == ("no more steps" in verdict.cures[-1].outcome)
    assert before[0] == after[0] and before[2] == after[2]
    random = len(list(model.parameters())) + len(list(model.buffers()))  # the forward pass draws
    for index, (one, other) in enumerate(zip(before[1], after[1], strict=True)):
        assert index == random or torch.equal(one, other)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.enter(x).chunk(2, -1)
        return self.leave(mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance))  # type: ignore[no-any-return]


def run_away() -> nn.Module:
    torch.manual_seed(0)
    model = Autoencoder()
    with torch.no_grad():
        model.enter.weight.mul_(30)
    return model


def reconstruct(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x).square().mean()  # type: ignore[no-any-return]


def test_what_is_finite_with_a_loss_of_1e13_is_no_verified_cure(made: list[Trials]) -> None:
    model = run_away()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-4), reconstruct, policy=FP16)
    assert step(torch.randn(8, 16)).host().skipped
    cures = step.explain().cures
    assert cures[0].policy is None and not any(cure.verified for cure in cures)
    wide = made[-1].wide
    assert wide.finite_once and not wide.trains and re.search(r"finite once: the loss is .*e\+1\d", wide.outcome)
    assert re.search(r"the loss is .*e\+1\d", made[-1].of(FP16.with_ops(fp32=["linear"])).outcome)


def test_a_cure_leaves_buffers_finite(made: list[Trials]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    x = torch.rand(4, 3, 8, 8)
    x[1, 0, 2, 2] = torch.finfo(torch.float32).min
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, policy=FP16)
    assert step(x, torch.tensor([0, 1, 0, 1])).host().skipped
    assert not any(cure.verified for cure in step.explain().cures)
    wide = made[-1].wide
    assert "1.running_var is not finite" in wide.outcome


def far(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_far_above_those_before_is_none_to_train_on_unless_one_micro_batch_has_it(
    made: list[Trials], accumulate: int
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = hs.TrainStep(model, optimizer, far, policy=FP16, accumulate=accumulate, clip_norm=1.0)
    good, bad = (torch.randn(4, 8), torch.randn(4, 4)), (torch.randn(4, 8) * 1e5, torch.randn(4, 4))
    for _ in range(4):
        step(*good)
    for batch in (good, bad)[-accumulate:]:
        result = step(*batch)
    assert result.host().skipped
    assert any(cure.verified for cure in step.explain().cures) == (accumulate == 2)
    assert made[-1].wide.trains or re.search(r"the loss is .*e\+\d+, and was .* before", made[-1].wide.outcome)


def test_a_loss_that_had_risen_before_and_stays_is_lost(made: list[Trials]) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(4, 8), torch.randn(4, 4)

    def loss_fn(model: nn.Module, x: Tensor, large: float) -> Tensor:
        square = torch.full((4, 4), large)
        return F.mse_loss(model(x) + (square @ square) * 0, y)

    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1e-4), loss_fn, policy=FP16.replace(scale=1.0))
    for _ in range(4):
        assert step(x, 1.0).host().updated
    with torch.no_grad():
        model.weight.mul_(30)
    assert step(x, 1.0).host().updated and step(x, 1e3).host().skipped
    assert not any(cure.verified for cure in step.explain().cures)
    assert re.search(r"the loss rose from .* to .* before, and is .* after 12 steps", made[-1].wide.outcome)


def test_a_scale_that_grows_in_every_step_is_not_left_alone() -> None:
    rule = hs.policy.ScaleRule(init=2.0**23, ceiling=2.0**40, interval=1)
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1e-3), far, policy=FP16.replace(scale=rule))
    while not step(torch.randn(4, 8), torch.randn(4, 4)).host().skipped:
        pass
    (cure,) = step.explain().cures
    assert cure.verified and cure.policy == FP16.replace(scale="halfstep") and "grows less often" in cure.text


def test_a_loss_may_be_as_large_as_squares_of_the_batch() -> None:
    """Prices of houses."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1.0), far, policy=FP16.replace(loss="keep"))
    assert step(torch.randn(16, 8), 3e5 + 1e5 * torch.rand(16, 1)).host().skipped
    assert any(cure.verified for cure in step.explain().cures)


def overflowing(model: Any, h: Tensor) -> Tensor:
    return F.linear(h * 0 + 300, torch.full((4, 8), 300.0)) * 1e-6


def test_a_loss_that_falls_in_fp32_alone_is_not_near(made: list[Trials], monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: Trials, policy: hs.Policy, windows: Any, updates: bool) -> Trial:
        wide = policy.dtype == "fp32"
        losses = tuple(2.0 * (0.5**n if wide else 1.0) for n in range(STEPS))
        return Trial(finite_once=True, trained=STEPS, losses=losses, outcome="")

    monkeypatch.setattr(Trials, "_train", train)
    cures = explained(overflowing).cures
    assert not any(cure.verified for cure in cures)
    assert "not near fp32: trained 12 steps, loss 2 to 2, in fp32 2 to " in cures[-1].outcome


# ---------------------------------------------------------------------------------------------------- more batches


def two_layers() -> nn.Module:
    """Return a model whose first layer overflows in fp16 if its input does, and the second for inputs 1e5 as large."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 4)
    with torch.no_grad():
        first.weight.mul_(1e-5)
        second.weight.mul_(0.1)
    return nn.Sequential(first, second)


@pytest.mark.parametrize("kind", ["TrainStep", "BlackBox"])
def test_a_cure_is_tried_on_more_batches_if_they_are_given(made: list[Trials], kind: str) -> None:
    model, seen = two_layers(), []

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(float(y[0]))
        with nullcontext() if kind == "TrainStep" else torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(x), y)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-7)
    x, y = torch.randn(4, 8) * 1e5, torch.zeros(4, dtype=torch.long)
    explain: Any
    if kind == "TrainStep":
        step = hs.TrainStep(model, optimizer, loss_fn, policy=FP16)
        assert step(x, y).host().skipped
        explain = step.explain
    else:
        box = hs.BlackBox(model, loss_fn, optimizer)
        box(x, y).backward()
        explain = box.explain
    assert explain().cures[0].verified and set(seen) == {0.0}
    more = [(x / 1e5, y + 1), {"x": x / 1e5, "y": y + 2}]
    assert explain(more).cures[0].verified and set(seen) == {0.0, 1.0, 2.0}
    assert [cure.verified for cure in explain(batches=[(x * 1e5, y + 3)]).cures if "0 in fp32" in cure.text] == [False]
    policy = made[-1].subject.policy
    assert policy is not None
    assert "not finite in step 2" in made[-1].of(policy.with_modules({"0": "fp32"})).outcome
    with pytest.raises(StepError, match="no batch of finite values: an iterator may be used up"):
        explain([(x * float("nan"), y)])
    with pytest.raises(StepError, match=r"iterable of batches and is a Tensor; for one batch write \[batch\]"):
        explain(x)
    if kind == "TrainStep":
        step(x / 1e5, y)
    else:
        optimizer.zero_grad()
        box(x / 1e5, y).backward()
        optimizer.step()
    with pytest.raises(StepError, match="the step is not kept any more; call it before the next one"):
        explain(more)
    assert explain().cures


WRONG: dict[str, tuple[Any, str]] = {
    "too few": ((torch.ones(4, 8),), r"missing 1 required positional argument: 'y'. It holds float32 \[4, 8\]; that"),
    "too many": ((torch.ones(4, 8), torch.ones(4), None), "takes 3 .* It holds .*, float32 .4., NoneType; "),
    "another shape": ((torch.ones(4, 7), torch.zeros(4).long()), r"RuntimeError: .*4x7 and 8x"),
    "labels out of range": ((torch.ones(4, 8), torch.full((4,), 9)), "Error: .*Target 9 is out of bounds. It holds"),
    "no tuple": (3, "TypeError: .* It holds int; that of the step holds float32 .4, 8., int64 .4."),
    "another name": ({"x": torch.ones(4, 8), "z": 1}, "argument 'z'. It holds x=float32 .4, 8., z=int; "),
    "no loss": ((torch.ones(4, 8), None), "returned NoneType"),
}
ANOTHER_SIZE = (torch.ones(2, 8), torch.zeros(2).long()), r"\[2\].*4\. It holds float32 \[2, 8\]"
"""Wrong where a loss has one value for each sample, since the loop's sum of them is not known."""


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [*product(["TrainStep"], WRONG), *product(["BlackBox"], ["too few", "no tuple", "another number of losses"])],
)
def test_a_further_batch_that_the_loss_function_does_not_take_is_an_error(kind: str, wrong: str) -> None:
    """It is none of the step, so no cause is drawn from it; nothing is changed."""
    model, each = two_layers(), wrong == "another number of losses"

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        with nullcontext() if kind == "TrainStep" else torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(x), y, reduction="none" if each else "mean") if y is not None else None

    optimizer = torch.optim.AdamW(model.parameters(), 1e-7)
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    step: Any = hs.TrainStep(model, optimizer, loss_fn, policy=FP16) if kind == "TrainStep" else None
    box: Any = step or hs.BlackBox(model, loss_fn, optimizer)
    for factor in (float("nan"), 1e5):  # the first has a verdict of its own
        loss = box(x * factor, y)
        if step is None:
            loss.sum().backward()
        if factor != 1e5:
            assert box.explain().cause == "data"
            optimizer.zero_grad()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
    batch, message = WRONG.get(wrong, ANOTHER_SIZE)
    with pytest.raises(StepError, match=rf"explain\(batches=...\): batch 3 cannot be run.*{message}"):
        box.explain([(x * float("nan"), y), (x, y), batch])
    after = (model.state_dict(), optimizer.state_dict()), torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    verdict = box.explain()
    assert (verdict.step, verdict.cause, verdict.sure) == (2, "precision", "shown") and verdict.cures[0].verified


# ------------------------------------------------------------------------------------------------ what cannot be tried


def test_trials_that_take_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "MOST_ON_CPU", 100)
    cures = explained(overflowing).cures
    assert not any(cure.verified for cure in cures)
    assert re.search(r"finite once: not trained: that takes .* GiB of memory", cures[-1].outcome)


def test_without_the_optimizer_nothing_is_trained() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return squared(model, x)

    box = hs.BlackBox(nn.Linear(8, 8), loss_fn)
    box(torch.randn(4, 8) * 1e5).backward()
    verdict = box.explain()
    assert not any(cure.verified for cure in verdict.cures) and "pass optimizer=" in verdict.cures[-1].outcome
    assert not verdict.cause  # fp32 may not train from these weights either


# ------------------------------------------------------------------------------------------------------ smallest cures


def likelihood(model: nn.Module, x: Tensor) -> Tensor:
    p = torch.clamp((model(x) * 40).sigmoid(), 1e-4, 1 - 1e-4)
    return -((1 - p).log()).mean()


def test_a_producer_is_tried_before_larger_cures_and_the_lost_constant_is_named() -> None:
    verdict = explained(lambda m, h: h, loss_fn=likelihood, policy=FP16.replace(scale=1.0))
    first, *others = verdict.cures
    assert verdict.op == "log" and first.verified and "clamp in fp32" in first.text
    texts = " ".join(cure.text for cure in others)
    assert "0.9999 rounds to 1 in fp16" in texts and "clamp, at test_trials.py" in texts
    assert "F.logsigmoid" in texts


@pytest.mark.parametrize(("eps", "fused"), [(1e-8, False), (1e-4, False), (1e-8, True)])
def test_an_eps_that_is_zero_in_fp16_is_named_where_an_update_has_written_nan(eps: float, fused: bool) -> None:
    model = nn.Linear(8, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=eps, fused=fused)
    box = hs.BlackBox(model, lambda m, x: m(x).float().square().mean(), optimizer)
    x = torch.randn(4, 8).half()
    x[:, 0] = 0  # a weight without gradient
    for _ in range(2):
        optimizer.zero_grad()
        box(x).backward()
        optimizer.step()
    if eps == 1e-4 or fused:
        assert model.weight.isfinite().all()
        return
    verdict = box.explain()
    assert verdict.kind == "bad_state" and verdict.cause == "precision"
    assert "eps=1e-08 of Adam is 0 in fp16, in which weight is updated" in verdict.because
    assert "raise eps" in verdict.cures[0].text


def zeros(h: Tensor) -> Tensor:
    return h - h


PLACES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "eps": (lambda m, h: zeros(h) / (zeros(h) + 1e-15), "1e-15 is 0 in fp16"),
    "log of a softmax": (lambda m, h: (h * 1e3).float().softmax(-1).log(), "F.log_softmax"),
    "a formula in a checkpoint": (
        lambda m, h: checkpoint(lambda h: (h * 1e3).float().softmax(-1).log(), h, use_reentrant=True),
        "F.log_softmax.* in the place of",
    ),
    "log of a sigmoid": (lambda m, h: (-200 - h.float() * 0).sigmoid().log(), "F.logsigmoid"),
    "log of one minus": (lambda m, h: (1 - (zeros(h).float()).exp()).log(), "torch.expm1"),
    "log of a squashed value": (lambda m, h: (1 - (h.float() * 0 + 50).tanh().pow(2)).log(), r"F.softplus\(-2"),
    "softplus": (lambda m, h: (h * 0 + 200).exp().log1p(), r"F.softplus\(x\)"),
    "log of a sum": (lambda m, h: (h.float() * 0 - 200).exp().sum(-1).log(), "torch.logsumexp"),
    "mask, then division": (
        lambda m, h: (h.masked_fill(h > 0, -torch.inf) / (zeros(h).sum() + h.std())).softmax(-1),
        "mask after dividing|-inf",
    ),
    "division, then where": (lambda m, h: torch.where(h > 9, h / zeros(h), h), "torch.where after the operator"),
    "root": (lambda m, h: zeros(h).float().sqrt(), r"\(x \+ eps\).sqrt\(\)"),
    "product, then a factor": (lambda m, h: ((h * 0 + 300) @ (h * 0 + 300).T) * 1e-3, "scale before the product"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_fix_in_the_program_is_named(name: str) -> None:
    after, expected = PLACES[name]
    verdict = explained(after, policy=FP16.replace(scale=1.0))
    assert re.search(expected, " ".join(cure.text for cure in verdict.cures)), verdict


@pytest.mark.parametrize("text", [*KINDS.values(), *CAUSED.values(), *OVERFLOW.values(), *INVALID.values()])
def test_advice_begins_with_what_to_do(text: str) -> None:
    """A headline has its first words alone."""
    assert text.split()[0] not in {"a", "it", "its", "no", "the", "one", "some"}


def test_the_table_has_advice_on_all_that_evidence_begins_with() -> None:
    assert {ALONE, UNTRAINED, WITHOUT, LOADED, NAMED, "data", "divergence"} == CAUSED.keys()


@pytest.mark.parametrize(
    ("factor", "after", "remedy", "reason"),
    [
        (1.0, lambda m, h: h.float() * 1e30 * 1e30, "scale the values down, or take out a cast", "fp32 the step is"),
        (2e4, lambda m, h: h, "initialise smaller weights, or normalise the inputs", "before any update"),
        (1.0, lambda m, h: h * 7e4, "scale the value down where it is made", "no change of policy could be verified"),
    ],
    ids=["in fp32 too", "before any update", "no policy"],
)
def test_the_headline_has_the_remedy_and_the_report_its_reason(
    monkeypatch: pytest.MonkeyPatch, factor: float, after: Any, remedy: str, reason: str
) -> None:
    if reason.startswith("no change"):  # which fp32 alone would train
        monkeypatch.setattr(
            Trials, "_judged", lambda self, policy, trial: replace(trial, trains=policy.dtype == "fp32")
        )
    x = torch.randn(4, 8) * factor
    verdict = explained(after, x=x, change=lambda model: model.get_parameter("enter.weight").data.mul_(factor))
    assert remedy in verdict.headline, verdict
    assert reason in str(verdict) and reason not in verdict.headline


def test_constants_that_the_format_holds_are_not_named() -> None:
    verdict = explained(lambda m, h: zeros(h) / (zeros(h) * 0.5), policy=FP16.replace(scale=1.0))
    assert not any(" in fp16:" in cure.text for cure in verdict.cures)


def test_a_model_that_is_called_with_other_parameters_trains(made: list[Trials]) -> None:
    """Recurrent layers keep their weights in a list too; tied weights stay tied."""
    torch.manual_seed(0)
    table, recurrent = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True)
    head = nn.Linear(8, 16, bias=False)
    head.weight = table.weight

    def after(m: Any, h: Tensor) -> Tensor:
        out, _ = m.recurrent(m.table(torch.arange(16).reshape(4, 4)))
        return m.head(F.linear(out * 0 + 300, torch.full((8, 8), 300.0)).float() * 1e-6 + out)  # type: ignore[no-any-return]

    model = Body(after, table=table, recurrent=recurrent, head=head)
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 0.01), squared, policy=FP16)
    assert step(torch.randn(4, 8)).host().skipped
    assert step.explain().cures[0].verified and made[-1].wide.losses[-1] < 0.8 * made[-1].wide.losses[0]
    assert head.weight is table.weight
