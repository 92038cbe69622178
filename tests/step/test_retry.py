"""TrainStep(retry=...): an overflowed window runs again, bit-equal to a run that comes to it at the scale that fits."""

from __future__ import annotations

import copy
import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.arguments import ENOUGH
from halfstep.step.parts.scaling import Retry
from tests.step.cutting import Knife, plain, plain_copy
from tests.two_processes import in_two_processes

Batch = tuple[Tensor, Tensor, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
}
POLICIES: dict[str, hs.Policy] = {
    "mixed": hs.Policy.of("mixed", dtype="fp16"),
    "torch": hs.Policy.of("torch", dtype="fp16"),
    "O2": hs.Policy.of("O2", dtype="fp16"),
    "O2, none": hs.Policy.of("O2", dtype="fp16", master="none"),
    "O2, sums": hs.Policy.of("O2", dtype="fp16", grads="fp32"),
    "kahan": hs.Policy.of("O2", dtype="fp16", master="kahan"),
    "stochastic": hs.Policy.of("O2", dtype="fp16", master="stochastic"),
    "split": hs.Policy.of("O2", dtype="bf16", master="split"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
}
LIMIT = 2.0**10


class Limited(torch.autograd.Function):
    """The identity, with a gradient of inf from `LIMIT` on: an overflow that is the same in every format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(gradient.abs() >= LIMIT, gradient * float("inf"), gradient)


class Restless(nn.Module):
    """Everything that a forward pass changes: every kind of generator, buffers in place and replaced."""

    ahead: Tensor
    mean: Tensor
    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ahead", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("running_mean", torch.zeros(()))  # a name of BatchNorm's in a module of another kind
        self.register_buffer("table", torch.arange(16.0))
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.ahead = self.ahead + 1
        self.running_mean.add_(1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        noise = torch.rand((), generator=self.draws) + random.random() + float(np.random.rand())
        return x + 0.01 * (self.mean + noise).to(x.dtype)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Restless(), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss whose gradient overflows from the scale 2**(16 - height) on, about."""
    limited: Callable[[Tensor], Tensor] = Limited.apply
    outputs = limited(model(x).float()) * (torch.arange(3.0) == y[:, None]) * torch.exp2(height - 8.0)
    return outputs.sum(), outputs.detach()


def batch(number: int, height: float) -> Batch:
    generator = torch.Generator().manual_seed(50 + number)
    x = torch.randn(6, 8, generator=generator)
    return x, torch.randint(0, 3, (6,), generator=generator), torch.tensor(height)


def stepper(
    policy: str = "mixed", optimizer: str = "adamw", *, rule: hs.ScaleRule | None = None, **options: Any
) -> hs.TrainStep:
    random.seed(1), np.random.seed(1)
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    options = {"scheduler": schedule, "scaler": hs.GradScaler(rule=rule or hs.ScaleRule()), **options}
    step = hs.TrainStep(model, made, loss_fn, policy=POLICIES[policy], **options)
    torch.manual_seed(2)
    return step


def generators(step: hs.TrainStep) -> list[Any]:
    own = [m.draws for m in step.model.modules() if isinstance(m, Restless)]
    states = [torch.default_generator.get_state().clone(), *[g.get_state().clone() for g in own]]
    return [*states, random.getstate(), np.random.get_state()]


def put_generators(step: hs.TrainStep, states: list[Any]) -> None:
    (own,) = [m.draws for m in step.model.modules() if isinstance(m, Restless)]
    torch.default_generator.set_state(states[0]), own.set_state(states[1])
    random.setstate(states[2]), np.random.set_state(states[3])


def outcome(result: hs.step.StepResult) -> list[Any]:
    host = result.host()
    return [host.step, repr(host.loss), host.scale, host.updated, host.skipped, repr(host.grad_norm), plain(result.aux)]


def window_of(heights: Sequence[float], accumulate: int) -> Iterator[list[Batch]]:
    for start in range(0, len(heights), accumulate):
        yield [batch(i, heights[i]) for i in range(start, start + accumulate)]


def retried(step: hs.TrainStep, windows: Iterator[list[Batch]]) -> tuple[list[Any], list[int], list[Any]]:
    """Return what the updates gave, how often they were retried, and the state that is left."""
    outcomes, retries = [], []
    for window in windows:
        result = [step(*micro) for micro in window][-1]
        outcomes.append(outcome(result))
        retries.append(result.retries)
    return outcomes, retries, [plain(step.state_dict()), plain(generators(step))]


def restarted(step: hs.TrainStep, windows: Iterator[list[Batch]], most: int) -> tuple[list[Any], list[int], list[Any]]:
    """The same by checkpoints: a run goes back to the one before a bad update and comes to it at the next scale."""
    outcomes, retries = [], []
    for window in windows:
        before, chance = plain_copy(step.state_dict()), generators(step)
        first: tuple[Any, ...] | None = None
        for attempt in range(most + 1):
            results = [step(*micro) for micro in window]
            result = results[-1]
            first = first or (plain_copy(step.state_dict()), generators(step))
            if not result.skipped:
                break
            while step.scaler.get_scale() >= float(result.scale) > step.scaler.rule.floor:  # hysteresis
                step.scaler.record(torch.tensor(True))
                step.scaler.update()
            hopeless = not all(r.loss.isfinite() for r in results) or float(result.scale) <= step.scaler.rule.floor
            if attempt == most or hopeless:
                step.load_state_dict(first[0])  # skipped, as without retry
                put_generators(step, first[1])
                break
            step.load_state_dict({**before, "scaler": step.scaler.state_dict()})
            put_generators(step, chance)
        outcomes.append(outcome(result))
        retries.append(attempt)
    return outcomes, retries, [plain(step.state_dict()), plain(generators(step))]


TURNS = ((), pytest.mark.slow)
"""Each policy is retried once by `make test`, with one optimizer or the other."""

CASES = [
    *[pytest.param(policy, "adamw", 1, marks=TURNS[i % 2]) for i, policy in enumerate(POLICIES)],
    *[  # not with "O2, none": the eps of RMSprop is 0 in fp16
        pytest.param(policy, "sgd" if policy == "O2, none" else "rmsprop", 2, marks=TURNS[1 - i % 2])
        for i, policy in enumerate(POLICIES)
    ],
    ("mixed", "sgd", 3),
    ("O2, sums", "sgd", 3),
]
HEIGHTS = (5.0, 0.0, 8.0, 12.0, 8.0, 7.0, 0.0, 1.0, 9.0, 9.0, 14.0, 1.0)


@pytest.mark.parametrize(("policy", "optimizer", "accumulate"), CASES)
def test_a_retried_run_is_the_one_that_comes_to_each_update_at_the_scale_that_fits(
    policy: str, optimizer: str, accumulate: int
) -> None:
    options: dict[str, Any] = {
        "accumulate": accumulate,
        "clip_norm": 1.0,
        "rule": hs.ScaleRule(interval=2),
        "blackbox": False,
    }
    heights = HEIGHTS[: 4 * accumulate]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = retried(stepper(policy, optimizer, retry=True, **options), window_of(heights, accumulate))
        right = restarted(stepper(policy, optimizer, **options), window_of(heights, accumulate), ENOUGH)
    assert got == right
    assert sum(got[1]) > 4 and all(updated for _, _, _, updated, *_ in got[0])


RULES = {
    "halfstep": hs.ScaleRule(interval=2),
    "hysteresis": hs.ScaleRule(interval=3, hysteresis=2),
    "low": hs.ScaleRule(init=2.0**6, floor=2.0**3),
    "thirds": hs.ScaleRule(backoff=1 / 3, growth=3.0, interval=2),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    heights=st.lists(st.sampled_from([0.0, 2.0, 5.0, 9.0, 12.0, 16.0, 23.0, float("nan")]), min_size=6, max_size=6),
    accumulate=st.sampled_from([1, 2]),
    most=st.sampled_from([1, 2, 16]),
    rule=st.sampled_from(sorted(RULES)),
    policy=st.sampled_from(["mixed", "stochastic"]),
)
def test_any_overflows(heights: list[float], accumulate: int, most: int, rule: str, policy: str) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "rule": RULES[rule], "blackbox": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scale is at its floor
        got = retried(stepper(policy, retry=most, **options), window_of(heights, accumulate))
        right = restarted(stepper(policy, **options), window_of(heights, accumulate), most)
    assert got == right


# ---------------------------------------------------------------------- what is not retried


def counting(loss: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """Return `loss`, and count its calls."""

    def counted(*args: Any) -> Any:
        calls.append(1)
        return loss(*args)

    return counted


def plain_step(loss: Callable[..., Any] = loss_fn, policy: str = "mixed", **options: Any) -> hs.TrainStep:
    random.seed(1), np.random.seed(1)
    model = net()
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), loss, policy=POLICIES[policy], **options)


def retries(step: hs.TrainStep) -> bool:
    return any(isinstance(part, Retry) for part in step.parts)


def test_it_is_off_unless_asked_for_and_then_waits_once_an_update() -> None:
    off, on, bf16 = plain_step(blackbox=False), plain_step(retry=True, accumulate=2), plain_step(policy="pure", retry=3)
    for i in range(4):
        results = [step(*batch(i, 0.0)) for step in (off, on, bf16)]
        assert all(r.retries == 0 == r.host().retries for r in results)
    assert (off.retry, on.retry, bf16.retry) == (0, ENOUGH, 3)
    assert off.record.history is None and off.host_reads == 0 and not retries(off)
    assert on.host_reads == 2  # one for each update
    assert bf16.host_reads == 0 and not retries(bf16)  # nothing is scaled


def test_a_loss_that_is_not_finite_runs_once() -> None:
    calls: list[int] = []
    step = plain_step(counting(loss_fn, calls), retry=True, blackbox=False)
    result = step(*batch(0, float("nan")))
    assert result.skipped and result.retries == 0 and len(calls) == 1
    assert step.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("scaler", [hs.GradScaler(rule=hs.ScaleRule.static(2.0**16)), hs.GradScaler(rule="fairseq")])
def test_a_scale_that_does_not_move_and_one_that_must_not_are_left_alone(scaler: hs.GradScaler) -> None:
    calls: list[int] = []
    scaler.update(2.0**15) if scaler.rule.is_static is False else None
    step = plain_step(counting(loss_fn, calls), retry=1, scaler=scaler, blackbox=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = step(*batch(0, 24.0))
    assert result.skipped and result.retries == (0 if scaler.rule.is_static else 1) and len(calls) == 1 + result.retries


def nan_gradient(model: nn.Module, x: Tensor, y: Tensor, height: Tensor) -> Tensor:
    """Return a finite loss whose gradient is nan at any scale, where `height` is positive."""
    loss, _ = loss_fn(model, x, y, height * 0)
    return loss + (loss * 0).abs().sqrt() if height > 0 else loss


def test_a_window_that_stays_bad_is_skipped_as_without_retry_and_seen_once(caplog: pytest.LogCaptureFixture) -> None:
    states, warned = [], []
    for retry in (False, 5):
        calls: list[int] = []
        step = plain_step(counting(nan_gradient, calls), retry=retry, scaler=hs.GradScaler(init_scale=2.0**7))
        torch.manual_seed(2)
        with caplog.at_level(logging.WARNING, "halfstep"):
            results = [step(*batch(i, float(i == 1))) for i in range(4)]
        assert [bool(r.skipped) for r in results] == [False, True, False, False]
        assert [r.retries for r in results] == [0, int(retry), 0, 0]
        states.append((plain(step.state_dict()), plain(generators(step))))
        warned.append(len(caplog.records))
        caplog.clear()
        assert step.explain().step == 2
    assert states[0] == states[1]
    assert warned == [1, 1]


# ---------------------------------------------------------------------- what cannot run again


def doubled(model: nn.Module, x: Tensor, y: Tensor, height: Tensor) -> Any:
    x.mul_(2)
    return loss_fn(model, x, y, height)


def popped(model: nn.Module, data: dict[str, Tensor]) -> Any:
    return loss_fn(model, data.pop("x"), data["y"], data["height"])


def read(model: nn.Module, data: Iterator[Tensor]) -> Any:
    return loss_fn(model, *data)


def late(model: nn.Module, x: Tensor, y: Tensor, height: Tensor) -> Any:
    if height > 0:
        model.get_buffer("2.table").add_(1)
    return loss_fn(model, x, y, height)


@pytest.mark.parametrize(
    ("loss", "given", "obstacle"),
    [
        (doubled, lambda *b: b, "its batch has been written to"),
        (popped, lambda x, y, h: ({"x": x, "y": y, "height": h},), "loss_fn has changed which tensors the batch holds"),
        (read, lambda *b: (iter(b),), "the batch holds an iterator"),
        (loss_fn, lambda x, y, h: (x.requires_grad_(), y, h), "a tensor of its batch has a gradient"),
        (late, lambda *b: b, "has changed the buffer 'table' for the first time"),
    ],
)
def test_what_would_not_be_the_same_again_is_skipped_with_one_warning(
    loss: Any, given: Any, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = []
    for retry in (False, True):
        calls: list[int] = []
        step = plain_step(counting(loss, calls), retry=retry, blackbox=False)
        torch.manual_seed(2)
        results = [step(*given(*batch(i, height))) for i, height in enumerate((0.0, 0.0, 5.0, 5.0, 0.0))]
        skipped.append(([bool(r.skipped) for r in results], plain(step.state_dict())))
        again = loss is late  # from then on its buffer is kept
        assert sum(r.retries for r in results) == (3 if retry and again else 0)
    assert skipped[0] == skipped[1] or again
    assert skipped[1][0][2]
    assert [obstacle in r.getMessage() for r in caplog.records] == [True]
    assert "step 3 overflowed and cannot run again" in caplog.text


def test_a_buffer_that_the_loop_fills_again_for_each_micro_batch_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    step = plain_step(retry=True, accumulate=2, blackbox=False)
    own = batch(0, 9.0)
    for i in range(2):
        for mine, new in zip(own, batch(i, 9.0), strict=True):
            mine.copy_(new)
        result = step(*own)
    assert result.skipped and "give each micro-batch of a window tensors of its own" in caplog.text


# ---------------------------------------------------------------------- beside it


def test_a_watcher_sees_each_update_once_and_with_the_gradients_that_are_applied() -> None:
    step = stepper(retry=True, clip_value=0.1, blackbox=False)
    monitor = hs.Monitor(step, every=1)
    records = []
    for i, height in enumerate(HEIGHTS[:6]):
        step(*batch(i, height))
        records += monitor.poll()
    twin = stepper(clip_value=0.1, blackbox=False)
    other = hs.Monitor(twin, every=1)
    for i, record in enumerate(records):
        twin.scaler.update(record.scale)  # before the window: the one that fits
        twin(*batch(i, HEIGHTS[i]))
        (right,) = other.poll()
        assert plain(record) == plain(right) and record.step == i + 1 and record.samples == 1
    assert step.scaler.get_scale() == records[-1].scale < records[0].scale


def test_a_flush_is_retried_too() -> None:
    one, other = (stepper(accumulate=4, retry=retry, blackbox=False) for retry in (True, False))
    for i in range(3):
        one(*batch(i, 4.0))
    result = one.flush()
    assert result is not None and result.updated and result.retries > 0
    other.scaler.load_state_dict({**one.scaler.state_dict(), "_growth_tracker": 0})
    put_generators(other, generators(stepper()))
    for i in range(3):
        other(*batch(i, 4.0))
    right = other.flush()
    assert right is not None and outcome(result)[2:] == outcome(right)[2:]
    assert plain(one.state_dict()) == plain(other.state_dict())


def test_steps_that_share_a_scaler_fall_together() -> None:
    scaler = hs.GradScaler()
    first, second = (plain_step(retry=True, scaler=scaler, blackbox=False) for _ in range(2))
    one = first(*batch(0, 5.0))
    other = second(*batch(0, 5.0))
    assert one.retries > 0 and other.retries == 0 and float(one.scale) == float(other.scale) == scaler.get_scale()


def test_compiled_code_copies_and_metrics() -> None:
    def square(model: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, model(x)).square().mean()

    found = []
    for compiled in (False, {"backend": "eager"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        step = hs.TrainStep(
            model,
            torch.optim.AdamW(model.parameters(), 1e-2),
            square,
            policy=POLICIES["mixed"],
            retry=30,
            scaler=hs.GradScaler(init_scale=2.0**24),
            compile=compiled,
        )
        metrics = step.metrics(every=1)
        results = [step(batch(i, 0.0)[0]) for i in range(3)]
        assert [r.retries > 0 for r in results] == [True, False, False]
        assert [(m.step, m.skipped) for m in metrics.flush()] == [(1, 0), (2, 0), (3, 0)]
        found.append([outcome(r) for r in results])
        assert copy.deepcopy(step).retry == 30 and copy.deepcopy(step)(batch(0, 0.0)[0]).retries == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("retry", [-1, 2.0, "yes", None, torch.tensor(True)])
def test_arguments_that_make_no_sense(retry: Any) -> None:
    with pytest.raises(StepError, match="retry must be True or False or the most attempts, a whole number from 0"):
        plain_step(retry=retry)


def test_a_captured_step_is_refused() -> None:
    with pytest.raises(StepError, match="a CUDA graph makes the update and moves the scale without it; leave out"):
        plain_step(retry=True, cuda_graph=True)


def test_explain_needs_the_black_box_and_nothing_is_kept_between_updates() -> None:
    step = stepper(retry=True, blackbox=False)
    step(*batch(0, 24.0)), step(*batch(1, 0.0))
    with pytest.raises(StepError, match="built with blackbox=False"):
        step.explain()
    gc.collect()
    history = step.record.history
    assert history is not None and history.judged is None and not history.window.batches


# ---------------------------------------------------------------------- cut off


@pytest.mark.parametrize(("accumulate", "at"), [(1, 4), (2, 7)])
def test_an_exception_in_a_retry_leaves_the_state_before_the_window(accumulate: int, at: int) -> None:
    calls: list[int] = []

    def failing(model: nn.Module, *args: Tensor) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise ZeroDivisionError
        return loss_fn(model, *args)

    step = plain_step(failing, retry=True, blackbox=False, accumulate=accumulate)
    for _ in range(accumulate):
        step(*batch(0, 0.0))
    before = plain(step.state_dict())
    for _ in range(accumulate - 1):
        step(*batch(1, 9.0))
    with pytest.raises(ZeroDivisionError):
        step(*batch(1, 9.0))
    after = plain(step.state_dict())
    for state in (before, after):  # the other buffers are not restored, as in any window that an exception ends
        for name in ("2.ahead", "2.mean", "2.running_mean"):
            state["model"].pop(name)
    assert after == before
    results = [step(*batch(1, 0.0)) for _ in range(accumulate)]
    assert [r.due for r in results] == [*[False] * (accumulate - 1), True]
    assert len(calls) == at + accumulate and results[-1].retries == 0 and float(results[-1].scale) == 2.0**16


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_a_cut_at_some_lines_of_a_retry_leaves_the_state_before_or_after(optimizer: str, kind: Any) -> None:
    assert_cuts(optimizer, kind, stride=397)


@pytest.mark.hours
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_a_cut_at_any_line_of_a_retry_leaves_the_state_before_or_after(optimizer: str, kind: Any) -> None:
    assert_cuts(optimizer, kind, stride=1)


def assert_cuts(optimizer: str, kind: Any, stride: int) -> None:
    def run() -> hs.TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        made = OPTIMIZERS[optimizer](model.parameters())
        step = hs.TrainStep(model, made, loss_fn, policy=POLICIES["mixed"], retry=True, blackbox=False)
        step(*batch(0, 0.0))
        return step

    def cut(at: int) -> tuple[Knife, Any]:
        step, knife = run(), Knife(at, kind)
        before = plain(step.state_dict())
        try:
            with knife:
                step(*batch(1, 4.0))
        except kind:
            pass
        except StepError as error:
            assert isinstance(error.__cause__, kind)
        try:
            return knife, ("before" if (now := plain(step.state_dict())) == before else now)
        except StepError as error:
            assert "cut off" in str(error)
            return knife, "refused"

    whole, right = cut(-1)
    found = [cut(at)[1] for at in range(0, whole.seen, stride)]
    assert "before" in found and all(state in ("before", "refused", right) for state in found)
    assert kind is MemoryError or "refused" not in found


# ---------------------------------------------------------------------- ranks


KINDS = ("plain", "accumulate", "sent low", "static", "fsdp2")


def ranked(rank: int, kind: str, retry: bool, scale: float, changed: bool = False) -> Any:
    """Return what one rank's run gives in whose first update rank 1 alone overflows.

    Args:
        rank: of this process.
        kind: one of `KINDS`.
        retry: whether to retry.
        scale: the first one.
        changed: whether rank 1 writes to its first batch.
    """
    torch.manual_seed(0)
    norm = nn.LayerNorm(16) if kind == "fsdp2" else nn.BatchNorm1d(16)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 3))
    policy = POLICIES["mixed"].replace(reduce="low" if kind == "sent low" else "grad")
    if kind == "fsdp2":
        hs.prepare(model, policy=policy)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model, static_graph=kind == "static")
    step = hs.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        doubled if changed and rank == 1 else loss_fn,
        policy=policy,
        accumulate=2 if kind in {"accumulate", "sent low"} else 1,
        retry=retry,
        scaler=hs.GradScaler(init_scale=scale),
        blackbox=False,
    )
    torch.manual_seed(rank)
    outcomes, retries = [], []
    for i in range(6):
        result = step(*batch(2 * i + rank, 8.0 if rank == 1 and i == 0 else 0.0))
        outcomes.append(outcome(result)[:-1])
        retries.append(result.retries)
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    return outcomes, retries, plain(state), plain(torch.default_generator.get_state())


def flushed(rank: int, retry: bool, scale: float) -> Any:
    """Return what a flush gives on a rank: rank 0 has two of three micro-batches, rank 1 has none."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)))
    step = hs.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        loss_fn,
        policy=POLICIES["mixed"],
        accumulate=3,
        retry=retry,
        scaler=hs.GradScaler(init_scale=scale),
        blackbox=False,
    )
    for i in range(0 if rank else 2):
        step(*batch(i, 8.0))
    result = step.flush()
    assert result is not None and result.updated
    for i in range(3):  # the ranks still communicate in step
        step(*batch(i + 3 * rank, 0.0))
    return float(result.scale), float(result.grad_norm), plain(model.state_dict()), result.retries


def ranks_retry(rank: int) -> dict[str, Any]:
    """Return for each kind a run that retries, and one that starts at the scale that fits."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        got = ranked(rank, kind, True, 2.0**16)
        found[kind] = got, ranked(rank, kind, False, got[0][-1][2])
    got = flushed(rank, True, 2.0**16)
    found["flush"] = got, flushed(rank, False, got[0])
    found["changed"] = ranked(rank, "plain", True, 2.0**16, changed=True), ranked(rank, "plain", False, 2.0**16)
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_retry_together(tmp_path: Path) -> None:
    both = in_two_processes(ranks_retry, tmp_path)
    for kind in KINDS:
        for got, right in (found[kind] for found in both):
            last = 1 if kind in {"accumulate", "sent low"} else 0
            assert got[1][last] > 3 and sum(got[1]) == got[1][last]
            assert got[0][last:] == right[0][last:] and got[2:] == right[2:], kind
        assert both[0][kind][0][1] == both[1][kind][0][1]
    for got, right in (found["flush"] for found in both):
        assert got[:3] == right[:3] and got[3] == both[0]["flush"][0][3] > 3
    for got, right in (found["changed"] for found in both):  # it is rank 1 that cannot run again
        assert got[1] == [ENOUGH, 0, 0, 0, 0, 0]
        assert [o[2:5] for o in got[0]] == [[1.0, False, True], *[[2.0**15, True, False]] * 5]
        assert [o[3:5] for o in right[0]][:2] == [[False, True], [True, False]]
