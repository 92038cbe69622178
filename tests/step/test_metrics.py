"""Metrics: the numbers of a run, exact, collected without a read of the device and without changing training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.parts.metrics import Metrics
from tests.step.late import Late


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def make(**options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    scaler = hs.GradScaler("cpu", init_scale=8.0)
    return hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O0", scaler=scaler, **options)


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def test_a_record_says_what_the_steps_said() -> None:
    step = make()
    metrics = step.metrics(every=3)
    results = [step(x).host() for x in batches(7)]
    records = metrics.poll()
    assert [r.step for r in records] == [3, 6]
    for record, part in zip(records, (results[:3], results[3:6]), strict=True):
        assert record.loss == pytest.approx(sum(r.loss for r in part) / 3, rel=1e-6)
        assert (record.scale, record.grad_norm, record.skipped) == (8.0, part[-1].grad_norm, 0)
        assert record.samples_per_second > 0
    assert metrics.poll() == []


def test_skips_are_counted_and_the_scale_is_told() -> None:
    step = make()
    metrics = step.metrics(every=1)
    step(torch.ones(5, 3))
    step(torch.full((5, 3), float("inf")))
    step(torch.ones(5, 3))
    assert [(r.skipped, r.scale) for r in metrics.flush()] == [(0, 8.0), (1, 8.0), (1, 4.0)]


def test_a_window_of_micro_batches_is_one_update() -> None:
    step = make(accumulate=2)
    metrics = step.metrics(every=2)
    losses = [float(step(x).loss) for x in batches(4)]
    (record,) = metrics.poll()
    assert record.step == 4 and record.loss == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_collecting_reads_nothing_and_changes_nothing() -> None:
    def run(*, collect: bool) -> tuple[list[Tensor], int]:
        step = make()
        if collect:
            step.metrics(every=2)
        with Reads() as reads:  # type: ignore[no-untyped-call]
            for x in batches(6):
                step(x)
        return [p.detach().clone() for p in step.model.parameters()], reads.count

    (plain, without), (collected, within) = run(collect=False), run(collect=True)
    assert within == without
    assert all(torch.equal(a, b) for a, b in zip(plain, collected, strict=True))


def test_samples_are_counted_by_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 2.5])
    monkeypatch.setattr("halfstep.step.parts.metrics.time", SimpleNamespace(perf_counter=lambda: next(times)))
    metrics = Metrics(1)
    step = make()
    for x in batches(2):
        metrics.end_call(step(x), ((x,), {}))
    assert [r.samples_per_second for r in metrics.poll()] == [2.5, 10.0]


def test_a_record_waits_for_its_copy_and_nobody_for_the_record() -> None:
    metrics, landing = Metrics(1), Late()
    landing.send([torch.tensor([0.5, 1.0, 0.0, 3.0])])
    metrics._waiting.append((1, 2.0, landing, None))
    assert metrics.poll() == []
    (record,) = metrics.flush()
    assert landing.waits == 1
    assert str(record) == "step 1: loss 0.5, scale 1, 0 skipped, gradient norm 3, 2 samples/s"


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    with pytest.raises(StepError, match="every must be a whole number from 1"):
        make().metrics(every=every)


def test_names_come_with_the_record_of_the_window_in_which_a_step_was_skipped_and_nothing_waits() -> None:
    data = [torch.ones(5, 3), torch.full((5, 3), float("inf")), *[torch.ones(5, 3)] * 3]
    counts = []
    for collects in (False, True):
        step = make(blackbox=False)
        metrics = step.metrics(every=2) if collects else None
        with Reads() as reads:  # type: ignore[no-untyped-call]
            results = [step(x) for x in data]
        counts.append(reads.count)
    assert counts[0] == counts[1] and metrics is not None
    first, second = metrics.poll()
    assert first.culprits == results[1].culprits == ("weight", "bias") and second.culprits == ()
    assert str(first).endswith("samples/s, not finite: weight, bias")
    assert set(first.numbers()) == {"loss", "scale", "skipped", "grad_norm", "samples_per_second"}


def test_records_go_to_a_logger_as_they_arrive() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def add(self, record: Any) -> None:
            self.steps.append(record.step)

    step, keeps = make(), Keeps()
    metrics = step.metrics(every=2, to=keeps)
    for x in batches(5):
        step(x)
    assert keeps.steps == [2, 4] and metrics.poll() == [] == metrics.flush()
    with pytest.raises(StepError, match=r"metrics\(to='runs'\): expected a logger with a method add\(record\)"):
        step.metrics(to="runs")  # type: ignore[arg-type]


def test_records_that_are_not_polled_do_not_pile_up() -> None:
    metrics = Metrics(1)
    step = make()
    result = step(torch.ones(5, 3))
    for _ in range(1000):
        metrics.end_call(result, ((), {}))
    with pytest.warns(UserWarning, match=r"1000 records .* the oldest are dropped; call metrics\.poll\(\)"):
        metrics.end_call(result, ((), {}))
    metrics.end_call(result, ((), {}))  # one warning
    assert metrics.dropped == 2 and len(metrics.poll()) == 1000
