"""Training that runs away is seen in the history of the run, before the NaN and at it; what only looks like it is not.

Controls: a spike that comes back, one bad batch, a loss that is large by nature, losses of a GAN, restarts of the
schedule, rewards that come late, weights that begin at zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.lens.box.advice import poisoned, runaway
from halfstep.lens.box.diagnose import Subject
from halfstep.lens.box.stepbox import Box
from halfstep.lens.rise import BAD, EARLY, Rise, learning_rate, outlier, rise
from halfstep.lens.verdict import Verdict

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> list[Subject]:
    """Return the list of the steps that black boxes explain; none is replayed."""
    found: list[Subject] = []

    def explain(self: Box, subject: Subject, topic: object = None) -> Verdict:
        found.append(subject)
        self.verdict = Verdict(kind="not_reproducible", step=subject.step)
        return self.verdict

    monkeypatch.setattr(Box, "explain_subject", explain)
    return found


def network(out: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out))


def batches(size: Callable[[int], float] = lambda number: 1.0, target: float = 3.0) -> Iterator[Batch]:
    for number in count(1):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(number))
        y = target * x[:, :1]
        x[0, 0] *= size(number)
        yield x, y


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return (model(x).float() - y).square().mean()


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), (y[:, 0] > 0).long())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = squares, **settings: Any) -> hs.TrainStep:
    dtype = settings.pop("dtype", "bf16")
    return hs.TrainStep(model, optimizer, loss, policy=hs.Policy.of("mixed", dtype=dtype), **settings)


def divergences(monitor: hs.Monitor) -> list[hs.lens.Finding]:
    return [finding for finding in monitor.findings() if finding.kind == "divergence"]


# ---------------------------------------------------------------------- runs that run away


def sgd(rate: float) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        return model, torch.optim.SGD(model.parameters(), lr=rate)

    return make


def adam(rate: float) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        return model, torch.optim.Adam(model.parameters(), lr=rate)

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "rate", "dtype"),
    [(sgd(1.0), "1", "fp16"), (sgd(3.0), "3", "bf16"), (sgd(30.0), "30", "fp32"), (adam(100.0), "100", "bf16")],
    ids=["SGD 1 fp16", "SGD 3 bf16", "SGD 30 fp32", "Adam 100 bf16"],
)
def test_a_learning_rate_that_is_too_high(
    make: Callable[[], Any], rate: str, dtype: str, subjects: list[Subject]
) -> None:
    step = trained(*make(), dtype=dtype)
    monitor = hs.Monitor(step)
    seen, last = False, 0.0
    for x, y in islice(batches(), 60):
        last = float(step(x, y).loss)
        if not math.isfinite(last) or last > 1e12:
            break
        seen = seen or bool(divergences(monitor))
    if math.isfinite(last):  # the verdict at the next step whose batch is not finite
        step(x * math.nan, y)
    step.explain()
    said = runaway(subjects[-1])
    assert seen, "early"
    assert "rose" in said and f"learning rate is {rate}" in said
    assert poisoned(subjects[-1]) == ""
    (finding,) = divergences(monitor)
    assert "lower the learning rate" in finding.remedy and finding.place == "the model"


def test_evidence_keeps_the_history(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    step = trained(*sgd(3.0)(), blackbox=tmp_path)
    for x, y in islice(batches(), 4):
        step(x, y)
    step(x * math.nan, y)
    task = hs.Task(
        name="t",
        model=network,
        loss_fn=squares,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=3.0),
        batches=lambda seed, number: (x, y),
    )
    (file,) = tmp_path.glob("*.pt")
    subjects: list[Subject] = request.getfixturevalue("subjects")  # not before: the evidence is that of a replay
    hs.lens.replay(file, task)
    (subject,) = subjects
    assert subject.signals is not step.record.signals
    assert runaway(subject) == runaway(replace(subject, signals=step.record.signals)) != ""


def test_weights_that_were_edited_have_not_run_away(subjects: list[Subject]) -> None:
    step = trained(*adam(1e-3)())
    for x, y in islice(batches(), 3):
        step(x, y)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(100)
    step(x * math.nan, y)
    step.explain()
    assert runaway(subjects[-1]) == ""


def test_a_loop_of_ones_own(subjects: list[Subject]) -> None:
    model, optimizer = sgd(1.0)()
    box, monitor = hs.BlackBox(model, squares, optimizer), hs.Monitor(model, optimizer, every=1, format="fp16")
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=16.0), 0
    for number, (x, y) in enumerate(islice(batches(), 12), 1):
        loss = box(x if number < 12 else x * math.nan, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not seen and divergences(monitor):
            seen = number
    box.explain()
    assert 0 < seen < 12
    assert "the learning rate is 1" in runaway(subjects[-1])


# ---------------------------------------------------------------------- runs that do not


def controlled(step: hs.TrainStep, data: Iterator[Batch], updates: int, subjects: list[Subject]) -> None:
    """Train, look at the monitor's findings often, and at the evidence of a bad batch at the end."""
    monitor, x, y = hs.Monitor(step), torch.empty(0), torch.empty(0)
    for number, (x, y) in enumerate(islice(data, updates), 1):
        step(x, y)
        if number <= 10 or number % 20 == 0:
            assert divergences(monitor) == []
    step(x * math.nan, y)
    step.explain()
    assert runaway(subjects[-1]) == poisoned(subjects[-1]) == ""


def test_a_spike_that_comes_back(subjects: list[Subject]) -> None:
    step = trained(*adam(0.3)())
    losses = [float(step(x, y).loss) for x, y in islice(batches(), 60)]
    assert max(losses) > 10 * losses[0] and losses[-1] < losses[0]  # it is one
    controlled(trained(*adam(0.3)()), batches(), 60, subjects)


def test_a_loss_that_is_large_by_nature(subjects: list[Subject]) -> None:
    def summed(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return 1e5 * squares(model, x, y)

    controlled(trained(*adam(0.01)(), summed), batches(), 60, subjects)


def test_restarts_of_the_schedule(subjects: list[Subject]) -> None:
    model, optimizer = sgd(0.05)()
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)
    controlled(trained(model, optimizer, scheduler=restarts), batches(), 80, subjects)


def test_a_reward_that_comes_late(subjects: list[Subject]) -> None:
    def late(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return squares(model, x, y * float(y.shape[0] == 32) + 0.0)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    quiet = ((x[:16], y[:16]) for x, y in batches())
    data = iter([*islice(quiet, 60), *islice(batches(target=100.0), 60)])
    controlled(trained(model, optimizer, late), data, 120, subjects)


def test_weights_that_begin_at_zero_and_a_rate_that_warms_up(subjects: list[Subject]) -> None:
    model = nn.Linear(8, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=40)
    controlled(trained(model, optimizer, classes, scheduler=warm), batches(), 60, subjects)


def test_a_model_that_is_unfrozen(subjects: list[Subject]) -> None:
    model = network()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(100)
    model[0].requires_grad_(False)
    step = trained(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    for x, y in islice(batches(), 30):
        step(x, y)
    model[0].requires_grad_(True)
    controlled(step, batches(), 20, subjects)


@pytest.mark.parametrize("critic", [False, True], ids=["GAN", "WGAN"])
def test_losses_of_a_gan(critic: bool, subjects: list[Subject]) -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def judged(model: nn.Module, z: Tensor, x: Tensor) -> Any:
        with torch.no_grad():
            made = maker(z)
        fake, real = model(made).float(), model(x).float()
        return (fake - real).mean() if critic else F.softplus(fake).mean() + F.softplus(-real).mean()

    def fooled(model: nn.Module, z: Tensor, x: Tensor) -> Any:
        fake = judge(model(z)).float()
        return -fake.mean() if critic else F.softplus(-fake).mean()

    steps = [
        trained(model, torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9)), loss)
        for model, loss in ((judge, judged), (maker, fooled))
    ]
    monitors = [hs.Monitor(step) for step in steps]
    for number, (x, _) in enumerate(islice(batches(), 100)):
        for step, monitor in zip(steps, monitors, strict=True):
            step(torch.randn(32, 4), x)
            assert number % 20 or divergences(monitor) == []
    for step in steps:
        step(torch.randn(32, 4) * math.nan, x * math.nan)
        step.explain()
        assert runaway(subjects[-1]) == ""


# ---------------------------------------------------------------------- bad batches


@pytest.mark.parametrize("make", [sgd(0.01), adam(0.01)], ids=["SGD", "Adam"])
def test_a_bad_batch_is_no_divergence(make: Callable[[], Any], subjects: list[Subject]) -> None:
    step = trained(*make())
    for x, y in islice(batches(lambda number: 1e30 if number == 40 else 1.0), 40):
        result = step(x, y)
    assert result.skipped
    step.explain()
    assert runaway(subjects[-1]) == poisoned(subjects[-1]) == ""
    assert divergences(hs.Monitor(step)) == []


def test_what_follows_the_update_of_a_bad_batch_has_the_batch_as_its_cause(subjects: list[Subject]) -> None:
    step = trained(*sgd(0.01)())
    monitor = hs.Monitor(step)
    for x, y in islice(batches(lambda number: 1e4 if number == 40 else 1.0), 300):
        if (result := step(x, y)).skipped:
            break
    assert result.skipped
    step.explain()
    assert runaway(subjects[-1]) == ""
    assert "batch of step 40 holds" in poisoned(subjects[-1])
    (finding,) = divergences(monitor)
    assert "batch of step 40" in finding.cause and "batches" in finding.remedy


# ---------------------------------------------------------------------- the arithmetic of it


def flat(step: int, before: float = 1.0, now: float = 1.0) -> tuple[int, float, float]:
    return step, before, now


GROWN = partial(flat, now=8.0)


def rows(*losses: float) -> list[tuple[int, float, float]]:
    return [(step, loss, 1.0) for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "bad", "early"),
    [
        ((1, 1, 1, 999), False, False),
        ((1, 1, 1, 1001), True, False),
        ((1, 1, 1, 1.1e6), True, True),
        ((1, 1, 1, 33, 33), True, False),
        ((1, 1, 1, 1, 33, 33, 33, 33), True, True),
        ((1, 1, 1, 29, 29, 29), False, False),
        ((1, 1, 1, 1e9, 1), False, False),
        ((1, 100, 100, 100, 100, 100), True, True),
        ((-1, -1, -1, -1e7), True, True),
        ((1, 2, 4, 8, 16, 32, 64), True, False),
        ((0, 0, 1, 1), False, False),
        ((5,), False, False),
        ((), False, False),
    ],
)
def test_how_much_evidence_is_enough(losses: tuple[float, ...], bad: bool, early: bool) -> None:
    assert (rise(rows(*losses), GROWN, BAD) is not None) is bad
    assert (rise(rows(*losses), GROWN, EARLY) is not None) is early
    assert rise(rows(*losses), flat, BAD) is None, "weights that stay"


def test_without_norms_of_weights_more_is_asked_for() -> None:
    assert rise(rows(1, 1, 1e5), lambda step: None, BAD) is None
    assert rise(rows(1, 1, 1e7), lambda step: None, BAD) is not None


def test_what_rose_and_its_words() -> None:
    found = rise(rows(2, 3, 3, 8e6), GROWN, BAD)
    numbers = "from 2 at step 1 to 8e+06 at step 4; the weights grew 8 times"
    assert str(found) == f"the loss rose 4e+06 times in 3 steps, {numbers}"
    found = rise([(1, 1.0, 1.0), (2, 1.0, 1.0), (3, 1.0, 2e5)], GROWN, BAD)
    assert found is not None and str(found).startswith("the gradients rose 2e+05 times in 1 step, from 1 at step 2 to")
    found = rise(rows(1, 1), partial(flat, now=50.0), BAD)
    assert str(found) == "the weights rose 50 times since step 1, 1 to 50"


def test_an_outlier_is_one_against_the_batches_before() -> None:
    found = Rise(what="loss", first=8, last=9, before=1.0, after=1e6)
    inputs = [(1, (3.0, 1.0)), (4, (4.0, 1.0)), (9, (4.0, 31.0))]
    assert outlier(inputs, found, 10).startswith("floating tensor 1 of the batch of step 9 holds 31, 31 times")
    assert outlier(inputs, found, 9) == outlier(inputs[2:], found, 10) == outlier(inputs[:2], found, 10) == ""
    assert learning_rate(None) == 0.0
