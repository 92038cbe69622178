"""cuda_graph=: recorded on a tape that keeps CUDA's promises (see `tape`), training is eager training bit for bit."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import StepError, ours
from halfstep.step import graphs as graph_module
from halfstep.step.graphs import KINDS, RESETS, WARM_UPS, Graphs
from halfstep.step.parts import statistics
from halfstep.update.fused import FusedUpdate
from halfstep.weights import attachment, states
from tests.products import sampled
from tests.step.late import late
from tests.step.tape import CaptureError, TapeRecorder


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(graph_module.RECORDERS, "cpu", TapeRecorder)
    for module in (attachment, states):
        monkeypatch.setattr(module, "skipped", lambda optimizer: False)  # as on CUDA, where asking would wait
    monkeypatch.setattr(statistics, "peek", lambda flag: True)  # as on CUDA: a captured step repeats what was done
    tape = str(Path(__file__).with_name("tape.py"))
    monkeypatch.setattr(graph_module, "ours", lambda name: ours(name) or name == tape)
    yield


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop = nn.Dropout(drop)
        self.unused = nn.Linear(2, 2)  # gets no gradient, and no weight decay

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


BAD = (5, 9)  # batches with an inf, after the capture


def batch(i: int, n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(n, 8, generator=generator)
    return x * (float("inf") if i in BAD else 1.0), torch.randint(0, 3, (n,), generator=generator)


# Rates are powers of two: fp32, in which a graph holds them, has these exactly.
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 2**-7),
    "sgd": lambda p: torch.optim.SGD(p, 2**-5, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 2**-6),
}


def trained(
    graph: bool,
    *,
    optimizer: str = "adamw",
    drop: float = 0.0,
    preset: str = "mixed",
    dtype: str = "fp16",
    fields: dict[str, Any] | None = None,
    loss: Any = loss_fn,
    **named: Any,
) -> hs.TrainStep:
    torch.manual_seed(0)
    model = Net(drop)
    policy = hs.Policy.of(preset, dtype=dtype, **(fields or {}))
    made = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(7)
    return hs.TrainStep(model, made, loss, policy=policy, cuda_graph=graph, **named)


def pair(**named: Any) -> tuple[hs.TrainStep, hs.TrainStep]:
    return trained(False, **named), trained(True, **named)


def graphs(step: hs.TrainStep) -> Graphs:
    assert step._graphs is not None
    return step._graphs


def same(a: hs.TrainStep, b: hs.TrainStep) -> bool:
    left, right = a.model.state_dict(), b.model.state_dict()
    return all(torch.equal(value, right[name]) for name, value in left.items())


def run(step: hs.TrainStep, count: int, start: int = 0) -> list[str]:
    """Return everything that `count` calls report, as text: nan is nan."""
    state = torch.get_rng_state()
    torch.manual_seed(start)
    lines = [str(step(*batch(i)).host()) for i in range(start, start + count)]
    torch.set_rng_state(state)
    return lines


CASES: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"dtype": "bf16", "clip_norm": 0.5},
    "sgd": {"optimizer": "sgd", "clip_norm": 0.5},
    "adagrad": {"optimizer": "adagrad"},
    "dropout, clip_value": {"drop": 0.3, "clip_value": 0.01},
    "O2": {"preset": "O2"},
    "split": {"preset": "O2", "dtype": "bf16", "fields": {"master": "split"}},
    "kahan": {"preset": "O2", "dtype": "bf16", "fields": {"master": "kahan"}},
    "stochastic": {"preset": "O2", "dtype": "bf16", "fields": {"master": "stochastic"}},
    "windows of 2": {"accumulate": 2},
    "windows of 3, O2": {"accumulate": 3, "preset": "O2", "fields": {"grads": "fp32"}},
    "windows of 4": {"accumulate": 4, "clip_norm": 0.5, "drop": 0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_replays_are_eager_training_bit_for_bit(case: str) -> None:
    eager, graph = pair(**CASES[case])
    count = 12 * eager.accumulate
    assert run(graph, count) == run(eager, count)
    assert same(eager, graph) and graphs(graph).replays >= 4 * eager.accumulate
    assert graph.scaler.state_dict() == eager.scaler.state_dict()
    assert str(graph.optimizer.state_dict()) == str(eager.optimizer.state_dict())


def test_every_call_is_one_step_on_its_own_batch() -> None:
    """WARM_UPS eager ones, one that captures and replays, then replays."""
    step = trained(True)
    tape = graphs(step)._recorder
    assert isinstance(tape, TapeRecorder)
    for i in range(WARM_UPS + 3):
        assert step(*batch(0)).host().step == i + 1
    assert (tape.warmed, tape.captured, tape.replayed) == (WARM_UPS, 1, 3)
    state = next(iter(step.optimizer.state.values()))
    assert int(state["step"]) == WARM_UPS + 3


@pytest.mark.parametrize("fault", ["rates", "batch", "casts"])
def test_the_tape_notices_what_is_captured(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, graph = pair(dtype="bf16")
    if fault == "rates":
        monkeypatch.setattr(Graphs, "_rates_as_tensors", lambda self, updates: nullcontext())
        monkeypatch.setattr(Graphs, "_fill_rates", lambda self: None)
    if fault == "batch":
        fill = Graphs._fill_inputs

        def fill_rates(self: Graphs, graph: Any, found: Any, *, updates: bool) -> None:
            if graph.replay is None:
                fill(self, graph, found, updates=updates)
            self._fill_rates()

        monkeypatch.setattr(Graphs, "_fill_inputs", fill_rates)
    if fault == "casts":
        monkeypatch.setattr(Graphs, "_clear_casts", staticmethod(lambda: None))
        monkeypatch.setattr(Graphs, "_mark_written", lambda self: None)
    told = []
    with hs.autocast(policy=eager.policy):  # low copies of weights live as long as this region
        for step in (eager, graph):
            lines = run(step, WARM_UPS)
            step.model(batch(0)[0])  # leaves low copies of the weights as they are now
            lines += run(step, 2)
            for group in step.optimizer.param_groups:
                group["lr"] = 2**-3
            told.append(lines + run(step, 3, start=10) + [str(step.model(batch(0)[0]).sum().item())])
    assert told[0] != told[1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("fault", "kernel"), [("rate", r"halfstep\.adam_"), ("format", "torch.float64")])
def test_a_kernel_that_no_warm_up_has_called_fails_the_capture(
    fault: str, kernel: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Graphs._rates_as_tensors

    def warm() -> bool:
        return any(graph.calls < WARM_UPS for graph in graphs(step)._graphs.values())

    def rates_in_captures(self: Graphs, *, updates: bool) -> Any:
        return nullcontext() if warm() else rates(self, updates=updates)

    def wide_in_captures(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x, y) + (0 if warm() else x.double().mean())

    step = trained(True, accumulate=accumulate, loss=wide_in_captures if fault == "format" else loss_fn)
    if fault == "rate":
        monkeypatch.setattr(Graphs, "_rates_as_tensors", rates_in_captures)
    with pytest.raises(StepError, match=f"CaptureError: no warm-up has loaded .*{kernel}"):
        run(step, (WARM_UPS + 1) * accumulate)


def test_warm_ups_read_the_tensors_that_the_capture_reads() -> None:
    """Triton compiles another kernel for tensors that begin elsewhere, and torch.compile for other strides."""
    places, gradients = [], []

    def noting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        places.append((x.data_ptr(), x.stride(), y.data_ptr()))
        gradients.append(x.grad)
        return F.cross_entropy(model(x), y)

    step = trained(True, loss=noting)
    memory = torch.randn(6 * 9)
    for i in range(WARM_UPS + 3):
        x = memory[i : i + 48].view(8, 6).t().requires_grad_()  # at another address each time, and transposed
        step(x, batch(i)[1])
    assert len(places) == WARM_UPS + 1 and len(set(places)) == 1  # replays do not call it
    assert gradients == [None] * len(places)


def test_in_an_outer_region_low_copies_follow_the_weights() -> None:
    """The twin of the fault above, with a frozen weight: its copy is made in the graph, not taken from outside."""
    told = []
    for step in pair(dtype="bf16"):
        step.model.get_parameter("last.weight").requires_grad_(False)
        with hs.autocast(policy=step.policy):
            told.append(run(step, 8) + [str(step.model(batch(0)[0]).sum().item())])
    assert told[0] == told[1]


def test_a_scheduler_moves_the_rate_that_a_graph_reads() -> None:
    told = []
    for step in pair():
        step.scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda n: 2.0 ** -(n % 3))
        told.append(run(step, 12))
        group = step.optimizer.param_groups[0]
        assert isinstance(group["lr"], float) and group["capturable"] is False
        assert step.scheduler.last_epoch == 12 - len(BAD) - 1  # the last verdict is not read yet
    assert told[0] == told[1]


def test_the_verdict_of_a_replay_is_sent_behind_an_event_for_the_scheduler() -> None:
    step = trained(True)
    step.scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda n: 2.0 ** -(n % 3))
    landing = late(step)
    for i in range(12):
        step(*batch(i))
        assert landing.flag is step.record.bad
    assert step.host_reads == 0 and landing.waits == 11


def test_a_rate_that_fp32_rounds_is_off_by_that_rounding_alone() -> None:
    eager, graph = pair()
    for step in (eager, graph):
        step.optimizer.param_groups[0]["lr"] = 1e-2
        run(step, 8)
    for a, b in zip(eager.model.parameters(), graph.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_each_shape_gets_a_graph_and_those_beyond_the_bound_run_eagerly() -> None:
    eager, graph = pair()
    sizes = [6, 4] * 6
    for i, n in enumerate(sizes):
        assert str(eager(*batch(i, n)).host()) == str(graph(*batch(i, n)).host())
    assert graphs(graph).captures == 2
    with pytest.warns(UserWarning, match=f"this is the {KINDS + 1}th kind of batch .* the others run eagerly"):
        for n in range(7, 7 + KINDS):
            assert str(eager(*batch(n, n)).host()) == str(graph(*batch(n, n)).host())
    assert same(eager, graph)


def test_windows_of_different_shapes_share_what_one_micro_batch_leaves_for_the_next() -> None:
    eager, graph = pair(accumulate=3)
    for i in range(60):
        n = (6, 4)[(i * 7 // 4) % 2]
        assert str(eager(*batch(i, n)).host()) == str(graph(*batch(i, n)).host()), i
    assert same(eager, graph) and graphs(graph).captures >= 4


def test_flush_updates_with_an_unfinished_window_of_replays() -> None:
    eager, graph = pair(accumulate=3)
    for step in (eager, graph):
        run(step, 14)
        assert step.flush() is not None
        run(step, 6, start=20)
    assert same(eager, graph)


def test_what_is_no_tensor_is_part_of_the_kind() -> None:
    def weighted(model: nn.Module, x: Tensor, y: Tensor, *, factor: float) -> Tensor:
        return F.cross_entropy(model(x), y) * factor

    eager, graph = pair(loss=weighted)
    for i in range(12):
        factor = (1.0, 0.5)[i % 2]
        assert str(eager(*batch(i), factor=factor).host()) == str(graph(*batch(i), factor=factor).host())
    assert graphs(graph).captures == 2


def test_a_generator_in_the_batch_draws_on() -> None:
    def noisy(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        return F.cross_entropy(model(x + torch.randn(x.shape, generator=generator)), y)

    told = []
    for step in pair(loss=noisy):
        generator = torch.Generator().manual_seed(3)
        told.append([float(step(*batch(0), generator).loss) for _ in range(8)])
    assert told[0] == told[1]


def test_modes_and_frozen_parameters_are_part_of_the_kind() -> None:
    told = []
    for step in pair():
        lines = run(step, 6)
        step.model.get_submodule("norm").eval()
        lines += run(step, 6, start=20)
        step.model.get_submodule("norm").train()
        step.model.get_submodule("last").requires_grad_(False)
        told.append(lines + run(step, 6, start=30))
    assert told[0] == told[1]


def test_another_hyperparameter_makes_graphs_anew_and_doing_so_at_each_step_is_told() -> None:
    eager, graph = pair()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(RESETS):
            for step in (eager, graph):
                run(step, 6, start=10 * k)
                step.optimizer.param_groups[0]["weight_decay"] = 0.125 * k
        run(graph, 1, start=90)
        run(eager, 1, start=90)
    assert same(eager, graph)
    (told,) = [str(w.message) for w in caught if "graphs were dropped" in str(w.message)]
    assert f"dropped {RESETS} times because a hyperparameter in param_groups changed" in told


@pytest.mark.parametrize("whole", [True, False])
def test_a_loaded_state_drops_the_graphs(whole: bool) -> None:
    told = []
    for step in pair():
        run(step, 5)
        saved = copy.deepcopy(step.state_dict())
        run(step, 2, start=20)
        if whole:
            step.load_state_dict(saved)
        else:  # behind the step's back
            step.model.load_state_dict(saved["model"])
            step.optimizer.load_state_dict(saved["optimizer"])
        told.append(run(step, 8, start=30))
    assert told[0] == told[1]


def test_copies_and_pickles_make_their_own_graphs() -> None:
    step = trained(True)
    run(step, 5)
    others = [copy.deepcopy(step), pickle.loads(pickle.dumps(step))]
    expected = run(step, 6, start=20)
    for other in others:
        assert other.cuda_graph and graphs(other).captures == 0
        assert run(other, 6, start=20) == expected


def test_results_are_not_overwritten_by_the_next_replay() -> None:
    def with_aux(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(x)
        return F.cross_entropy(logits, y), {"logits": logits, "x": x}

    eager, graph = pair(loss=with_aux)
    kept = [graph(*batch(i)) for i in range(9)]
    for i, result in enumerate(kept):
        expected = eager(*batch(i))
        assert str(result.host()) == str(expected.host())
        assert torch.equal(result.aux["logits"].nan_to_num(), expected.aux["logits"].nan_to_num())
        assert torch.equal(result.aux["x"].nan_to_num(), batch(i)[0].nan_to_num())


def test_compiled_and_captured_together() -> None:
    torch._dynamo.reset()
    eager, graph = pair(dtype="bf16"), trained(True, dtype="bf16", compile={"backend": "aot_eager"})
    assert run(graph, 8) == run(eager[0], 8)
    assert same(eager[0], graph) and graphs(graph).replays == 4


def test_metrics_and_a_shared_scaler() -> None:
    told = []
    for step in pair():
        other = torch.nn.Linear(8, 3)
        beside = hs.TrainStep(
            other, torch.optim.AdamW(other.parameters(), 2**-7), loss_fn, policy=step.policy, scaler=step.scaler
        )
        metrics = step.metrics(every=2)
        for i in range(8):
            step(*batch(i))
            beside(*batch(i))
        told.append([(m.step, m.loss, m.scale, m.skipped) for m in metrics.flush()])
    assert str(told[0]) == str(told[1])


@pytest.mark.parametrize(("every", "case"), sampled((1, 2, 3, 5), ("fp16", "O2", "windows of 2")))
def test_a_monitor_sees_what_it_sees_of_eager_training(case: str, every: int) -> None:
    """Samples are due before, at and after the capture, and between replays, with bad steps among them."""

    def records(step: hs.TrainStep) -> list[str]:
        monitor = hs.Monitor(step, every=every, activations=True)
        found: list[str] = []
        for i in range(24):
            step(*batch(i))
            found += map(repr, monitor.poll())  # as text: nan is nan
        return found

    eager, captured = pair(**CASES[case])
    seen = records(captured)
    assert seen == records(eager) and len(seen) == 24 // eager.accumulate // every
    assert same(eager, captured)
    assert bool(graphs(captured).replays) is (every > 1)


def test_a_watcher_that_cannot_say_which_updates_it_wants_is_refused() -> None:
    step = trained(True)

    class Looker:
        def before_update(self, parameters: Any) -> None: ...

        def after_update(self, bad: Tensor) -> None: ...

    step.watchers.append(Looker())  # type: ignore[arg-type]
    with pytest.raises(StepError, match="Looker in step.watchers does not say which ones it wants"):
        step(*batch(0))


def test_a_scale_at_its_floor_warns_in_replays_too() -> None:
    step = trained(True, scaler=hs.GradScaler("cpu", init_scale=4.0, floor=2.0))
    x, y = batch(0)
    for _ in range(WARM_UPS + 1):
        step(x, y)
    step(x * float("inf"), y)
    with pytest.warns(UserWarning, match="the loss scale is at its floor 2.0"):
        step(x * float("inf"), y)


# ------------------------------------------------------------------ what cannot be captured


def test_a_wait_in_the_loss_is_named_with_its_line_and_nothing_is_trained() -> None:
    def waits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss if loss.item() < 1e9 else loss * 0

    eager, graph = pair(loss=waits, preset="O2")
    assert run(graph, WARM_UPS) == run(eager, WARM_UPS)
    with pytest.raises(StepError, match=r"cannot be captured at .*test_graphed.py:\d+ `return loss if loss.item\(\) <"):
        graph(*batch(WARM_UPS))
    assert same(eager, graph)
    on = hs.TrainStep(graph.model, graph.optimizer, waits, scaler=graph.scaler)
    assert [line.partition("loss")[2] for line in run(on, 4, start=20)] == [
        line.partition("loss")[2] for line in run(eager, 4, start=20)
    ]
    assert same(eager, on)


def test_a_failed_capture_ends_the_window_and_leaves_the_step_usable() -> None:
    wait = [False]

    def waits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if wait[0]:
            loss.item()
        return loss

    step = trained(True, loss=waits, accumulate=2)
    run(step, 2 * WARM_UPS + 1)
    before = copy.deepcopy(step.model.state_dict())
    wait[0] = True
    with pytest.raises(StepError, match="cannot be captured"):
        step(*batch(7))
    wait[0] = False
    expected = {k: v for k, v in before.items() if "running" not in k and "tracked" not in k}
    assert all(torch.equal(step.model.state_dict()[k], v) for k, v in expected.items())
    assert [step(*batch(i)).host().updated for i in (10, 11)] == [False, True]


class WaitsBehind(torch.autograd.Function):
    """Waits in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient.item()
        return gradient


@pytest.mark.parametrize(
    ("place", "case"),
    [
        *((place, "fp16") for place in ("forward", "backward", "update", "scale", "end")),
        *((place, case) for place in ("update", "scale") for case in ("adagrad", "O2")),
    ],
)
def test_a_capture_that_fails_anywhere_leaves_the_state_before_it(
    place: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its twin, trained eagerly, has not seen the batch."""
    fails = [False]

    def drawing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        random.random()
        loss = F.cross_entropy(model(x) * torch.rand(()), y)
        if fails[0] and place == "forward":
            loss.item()
        if fails[0] and place == "backward":
            loss = WaitsBehind.apply(loss)  # type: ignore[no-untyped-call]  # torch's
        return loss

    def fail_after(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def method(*args: Any, **named: Any) -> Any:
            result = real(*args, **named)
            if fails[0]:
                raise CaptureError("operation not permitted when stream is capturing")
            return result

        monkeypatch.setattr(owner, name, method)

    eager, graph = pair(**{**CASES[case], "drop": 0.3, "loss": drawing})
    if place == "update":
        fail_after(graph._updater, "plan")
    elif place == "scale":
        fail_after(graph.scaler, "update")
    elif place == "end":  # all is done, and CUDA refuses to end the capture
        fail_after(graph_module, "_packed")
    expected = run(eager, WARM_UPS) + run(eager, 5, start=20)
    told = run(graph, WARM_UPS)
    fails[0] = True
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(StepError, match="cannot be captured.*Nothing was trained on this batch"):
        graph(*batch(90))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    fails[0] = False
    assert told + run(graph, 5, start=20) == expected and same(eager, graph)
    assert (graphs(graph).captures, graphs(graph).replays) == (1, 3)  # a warm-up, the capture, replays


@pytest.mark.parametrize("place", ["forward", "update"])
def test_a_capture_that_runs_out_of_memory_raises_torchs_error_and_takes_all_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that search for a batch size wait for it."""
    full = [False]
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def allocates() -> None:
        if full[0]:
            raise lack

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), y)
        if place == "forward":
            allocates()
        return found

    eager, graph = pair(preset="O2", drop=0.3, loss=loss)
    if place == "update":
        write = FusedUpdate.write

        def writes(update: FusedUpdate, *given: Any) -> None:
            allocates()
            write(update, *given)

        monkeypatch.setattr(FusedUpdate, "write", writes)
    assert run(graph, WARM_UPS) == run(eager, WARM_UPS)
    full[0] = True
    with pytest.raises(torch.OutOfMemoryError) as raised:
        graph(*batch(90))
    assert raised.value is lack and same(eager, graph)
    full[0] = False
    assert run(graph, 5, start=20) == run(eager, 5, start=20) and same(eager, graph)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ([1, 2, {3}], "the batch holds a set, which cannot be compared from call to call; pass tensors"),
        (torch.ones(2, requires_grad=True) * 2, r"a tensor of the batch, shape \(2,\), was computed with gradients"),
    ],
)
def test_a_batch_that_has_no_kind_is_refused(extra: Any, text: str) -> None:
    step = trained(True, loss=lambda model, x, y, extra: loss_fn(model, x, y))
    with pytest.raises(StepError, match=text):
        step(*batch(0), extra)


def assert_refused(text: str, model: nn.Module, optimizer: torch.optim.Optimizer, **named: Any) -> None:
    kind = type(model)
    with pytest.raises(StepError, match=text):
        hs.TrainStep(model, optimizer, loss_fn, cuda_graph=True, **named)
    assert type(model) is kind


def test_what_no_graph_can_hold_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    adam = torch.optim.AdamW(model.parameters())
    assert_refused("skips a bad step on the device, and RMSprop", model, torch.optim.RMSprop(model.parameters()))
    assert_refused("and AdamW as it is here does not", model, torch.optim.AdamW(model.parameters(), foreach=True))
    assert_refused("the model is in DataParallel", nn.DataParallel(model), adam)
    assert_refused("makes CUDA graphs of its own", model, adam, compile={"mode": "reduce-overhead"})
    sparse = nn.Embedding(4, 2, sparse=True)
    assert_refused("has sparse gradients", sparse, torch.optim.SGD(sparse.parameters(), 0.1))
    monkeypatch.delitem(graph_module.RECORDERS, "cpu")
    assert_refused(
        r"needs a model on one CUDA device and this one is on cpu; move it with model.to\('cuda'\)", model, adam
    )


def test_a_place_is_the_users_innermost_line() -> None:
    try:
        torch.ones(2).reshape(3)
    except RuntimeError as error:
        assert "test_graphed.py" in graph_module.place_of(error) and "reshape(3)" in graph_module.place_of(error)
    assert graph_module.place_of(RuntimeError("none")) == ""


def test_a_buffer_that_stops_being_finite_is_logged_between_replays(caplog: pytest.LogCaptureFixture) -> None:
    step = trained(True, dtype="bf16")
    run(step, 12)
    step.model.get_buffer("norm.running_mean").fill_(float("inf"))
    run(step, 12, 12)
    said = [record.message for record in caplog.records if "buffer" in record.message]
    assert [text.partition(":")[0] for text in said] == [
        "buffer norm.running_mean is not finite any more before step 17"
    ]
