"""Monitor: what it says is what is there, it changes nothing, and between samples it does nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.errors import StepError
from halfstep.lens.monitor.records import MonitorRecord, ParameterRecord
from halfstep.lens.sketch import ExponentSketch

POLICIES = {
    "fp32": hs.Policy.of("O0"),
    "mixed fp16": hs.Policy.of("mixed", dtype="fp16"),
    "O2 fp16": hs.Policy.of("O2", dtype="fp16", master="master"),
    "O2 bf16": hs.Policy.of("O2", dtype="bf16"),
    "pure kahan": hs.Policy.of("pure", dtype="bf16", master="kahan"),
    "stochastic": hs.Policy.of("O2", dtype="bf16", master="stochastic"),
    "low states": hs.Policy.of("O2", dtype="bf16", state="low"),
}


def network(width: int = 32) -> nn.Sequential:
    """Return a small network with a norm that has statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(model(x), y)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return the same batch for the same number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def trained(policy: hs.Policy, model: nn.Module | None = None, *, lr: float = 1e-2, **options: Any) -> hs.TrainStep:
    """Return a TrainStep of a small network with AdamW."""
    model = network() if model is None else model
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=lr), loss_fn, policy=policy, **options)


def run(step: hs.TrainStep, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        step(*batch(number))


class Looker:
    """A watcher that copies everything."""

    def __init__(self, step: hs.TrainStep) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.names = {id(p): n for n, p in step.model.named_parameters()}
        step.watchers.append(self)

    def wants_update(self) -> bool:
        return True

    def pass_update(self) -> None:
        raise AssertionError("every update is looked at")

    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients.append({self.names[id(p)]: p.grad.clone() for p in parameters if p.grad is not None})

    def after_update(self, bad: Tensor) -> None:
        pass


def named(record: MonitorRecord) -> dict[str, ParameterRecord]:
    return {p.name: p for p in record.parameters}


# ---------------------------------------------------------------------- what it says


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_of_every_second_update_are_sketched_as_they_are(name: str) -> None:
    step = trained(POLICIES[name], accumulate=2)
    looker = Looker(step)
    monitor = hs.Monitor(step, every=2)
    run(step, 12)
    (record,) = monitor.poll()
    assert (record.step, record.samples) == (6, 3)
    sampled = looker.gradients[1::2]
    for parameter, found in named(record).items():
        expected = ExponentSketch()
        for gradients in sampled:
            expected.merge_(ExponentSketch.of(gradients[parameter]))
        assert found.gradient == expected
        assert found.amax == expected.largest and found.zeros == expected.zeros / expected.count
        assert found.headroom == expected.headroom(monitor.format)
        assert found.underflow == expected.underflow(monitor.format)
    assert set(named(record)) == {n for n, _ in step.model.named_parameters()}


def test_ratios_and_swallowed_updates_are_those_of_arithmetic() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = hs.Monitor(model, optimizer, every=2, format="fp16")
    for number in (1, 2):
        optimizer.zero_grad()
        loss_fn(model, *batch(number)).backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    (record,) = monitor.poll()
    for name, parameter in model.named_parameters():
        found, old = named(record)[name], before[name]
        assert parameter.grad is not None
        active = parameter.grad != 0
        ratio = (parameter.detach() - old).norm() / old.norm() if old.any() else None
        if ratio is not None:
            assert found.update_ratio == pytest.approx(float(ratio), rel=1e-5)
        if active.any():
            assert found.swallowed == float((active & (parameter == old)).sum() / active.sum())
        assert found.weight == ExponentSketch.of(old)
    assert 0 < named(record)["0.weight"].swallowed < 1


def test_what_the_optimizer_moves_is_compared_and_not_the_low_weight() -> None:
    swallowed = {}
    for master in ("none", "split", "master", "kahan"):
        policy = hs.Policy.of("O2" if master != "none" else "O3", dtype="bf16", scale="none")
        step = trained(policy if master == "none" else policy.replace(master=master), lr=1e-4)
        monitor = hs.Monitor(step, every=1)
        run(step, 4)
        found = named(monitor.poll()[0])["0.weight"]
        swallowed[master] = found.swallowed
        assert (found.dtype, found.precise) == ("bf16", "bf16" if master == "none" else "fp32")
        if master == "none":
            assert [f.kind for f in monitor.findings()] == ["swallowed_update"]
        else:
            assert monitor.findings() == ()
    assert swallowed["none"] > 0.5 and max(swallowed[m] for m in ("split", "master", "kahan")) < 0.01


def test_activations_of_leaf_modules_are_sketched_on_sampled_updates() -> None:
    step = trained(POLICIES["mixed fp16"], accumulate=2)
    outputs: list[Tensor] = []
    step.model.get_submodule("0").register_forward_hook(
        lambda module, args, output: outputs.append(output.detach().clone())
    )
    monitor = hs.Monitor(step, every=3, activations=True)
    run(step, 10)
    (record,) = monitor.poll()
    first = record.activations[0]
    assert (first.module, first.kind, first.dtype) == ("0", "Linear", "fp16")
    assert first.sketch == ExponentSketch.of(torch.stack(outputs[4:6]))
    assert [a.module for a in record.activations] == ["0", "1", "2", "3"]


def test_an_update_that_was_not_applied_is_no_update() -> None:
    step = trained(POLICIES["mixed fp16"])
    monitor = hs.Monitor(step, every=1)
    x, y = batch(1)
    step(x * math.inf, y)
    (record,) = monitor.poll()
    found = named(record)["3.weight"]
    assert found.gradient.nans + found.gradient.infs > 0
    assert math.isnan(found.update_ratio) and math.isnan(found.swallowed)
    assert monitor.findings() == ()


@pytest.mark.parametrize("tensor", [False, True])
def test_at_a_learning_rate_of_zero_nothing_is_swallowed(tensor: bool) -> None:
    model = network()
    rate = torch.tensor(0.0) if tensor else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    monitor = hs.Monitor(model, optimizer, every=1, format="bf16")
    loss_fn(model, *batch(1)).backward()
    optimizer.step()
    assert math.isnan(named(monitor.poll()[0])["0.weight"].swallowed)
    assert monitor.findings() == ()


def test_drift_is_the_growth_of_the_largest_gradient_in_bits() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = hs.Monitor(model, optimizer, every=1, format="fp16")
    found = []
    for size in (1.0, 4.0, 2.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * size).sum().backward()
        optimizer.step()
        found += [named(record)["weight"].drift for record in monitor.poll()]
    assert math.isnan(found[0]) and found[1:] == [2.0, -1.0]


def test_what_gathers_between_two_polls_is_one_record() -> None:
    step = trained(POLICIES["fp32"])
    monitor = hs.Monitor(step, every=1)
    run(step, 3)
    (record,) = monitor.poll()
    assert (record.step, record.samples) == (3, 3)
    assert monitor.poll() == [] and monitor.flush() == []
    run(step, 2)
    monitor.findings()  # leaves records to be polled
    (record,) = monitor.poll()
    assert (record.step, record.samples) == (5, 2)
    assert record.parameters[0].gradient.count == 2 * step.model.get_parameter("0.weight").numel()
    assert str(record).startswith("step 5: 2 samples, scale 1\n  ")


def test_parameters_without_gradients_frozen_sparse_and_shared_ones() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 2)
            self.again = self.head
            self.unused = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.head(self.frozen(self.table(x)))[..., :2].repeat(1, 2))  # type: ignore[no-any-return]

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = hs.Monitor(model, optimizer, every=1, format="fp16", activations=True)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    (record,) = monitor.poll()
    assert set(named(record)) == {"table.weight", "head.weight", "head.bias"}
    assert named(record)["table.weight"].swallowed == 0.0
    assert [(a.module, a.sketch.count) for a in record.activations] == [("table", 8), ("frozen", 8), ("head", 8)]


# ---------------------------------------------------------------------- loops of one's own


def own_loop(monitored: bool, scaler: Any, policy: hs.Policy | None) -> tuple[list[Tensor], Any]:
    """Train with a hand-written loop and return the weights and the monitor."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=policy is None)
    if policy is not None:
        model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)
    low = "fp16" if policy is None else None
    monitor = hs.Monitor(model, optimizer, every=2, scaler=scaler, format=low) if monitored else None
    for number in range(1, 7):
        with torch.autocast("cpu", torch.bfloat16, enabled=policy is None):
            loss = loss_fn(model, *batch(number))
        scaler.scale(loss).backward()
        if policy is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], monitor


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (lambda: torch.amp.GradScaler("cpu", init_scale=2.0**8), None),
        (lambda: hs.GradScaler("cpu", init_scale=2.0**8), None),
        (lambda: None, POLICIES["O2 fp16"]),
        (lambda: None, POLICIES["O2 bf16"]),
        (lambda: None, POLICIES["mixed fp16"]),
    ],
)
def test_a_loop_of_ones_own_is_watched_and_not_changed(make: Callable[[], Any], policy: hs.Policy | None) -> None:
    plain, _ = own_loop(False, make(), policy)
    watched, monitor = own_loop(True, make(), policy)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    (record,) = monitor.poll()
    assert (record.step, record.samples) == (6, 3)
    assert record.scale == (2.0**8 if policy is None else 1.0 if policy.dtype == "bf16" else 2.0**16)
    found = named(record)["0.weight"]
    assert found.amax > record.scale * 1e-4  # with the scale in it
    assert found.swallowed < 0.05 and found.update_ratio > 1e-4
    assert monitor.findings() == ()


# ---------------------------------------------------------------------- findings


def deep(activation: type[nn.Module], depth: int = 14) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), activation())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def test_gradients_that_fade_away_in_fp16_are_found_once_with_what_to_do() -> None:
    step = trained(hs.Policy.of("mixed", dtype="fp16", scale="none"), deep(nn.Sigmoid))
    monitor = hs.Monitor(step, every=1)
    run(step, 3)
    (finding,) = monitor.findings()
    assert (finding.kind, finding.role, finding.step) == ("underflow", "weight gradient", 3)
    assert "0.weight" in finding.where and "28.weight" not in finding.where
    assert "loss scale" in finding.remedy
    assert str(finding).startswith("underflow: ") and "\n  remedy: " in str(finding)
    run(step, 3)
    assert [f.kind for f in monitor.findings()] == ["underflow"]
    scaled = trained(hs.Policy.of("mixed", dtype="fp16"), deep(nn.Tanh))
    monitor = hs.Monitor(scaled, every=1)
    run(scaled, 3)
    assert monitor.findings() == ()


def test_a_low_state_that_stands_still_is_found() -> None:
    model = network(64).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-1, betas=(0.9, 0.9999), foreach=False)
    monitor = hs.Monitor(model, optimizer, every=5)
    for number in range(1, 11):
        optimizer.zero_grad()
        x, y = batch(1)
        loss_fn(model, x.bfloat16(), y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1.0) if number < 4 else parameter.grad.mul_(0.5)
        optimizer.step()
    kinds = {f.kind: f for f in monitor.findings()}
    assert "low_state" in kinds and "fp32" in kinds["low_state"].remedy
    assert monitor.format.name == "bf16"


def test_a_weight_decay_below_half_an_ulp_is_found() -> None:
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    monitor = hs.Monitor(model, optimizer, every=1)
    (model(torch.zeros(1, 64, dtype=torch.bfloat16)) * 0).sum().backward()
    optimizer.step()
    (finding,) = monitor.findings()
    assert finding.kind == "swallowed_update" and "weight decay takes 1e-05" in finding.cause


def test_activations_at_the_end_of_their_format_are_found() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(4.5e4)  # type: ignore[operator]
    step = trained(hs.Policy.of("mixed", dtype="fp16"), model)
    monitor = hs.Monitor(step, every=1, activations=True)
    run(step, 1)
    (finding,) = monitor.findings()
    assert (finding.kind, finding.role, finding.where) == ("overflow_risk", "activation", ("3",))


def test_activations_that_are_cut_off_are_found() -> None:
    model = network()
    step = trained(hs.Policy.of("mixed", dtype="fp8_e4m3"), model)
    with torch.no_grad():
        model[0].weight.mul_(1e3)  # type: ignore[operator]
    monitor = hs.Monitor(step, every=1, activations=True)
    run(step, 1)
    found = {f.kind: f for f in monitor.findings()}
    assert found["saturation"].role == "activation" and "where fp8_e4m3 cuts off" in found["saturation"].cause


def test_what_rounding_leaves_of_a_gradient_that_is_zero_is_no_underflow() -> None:
    step = trained(POLICIES["mixed fp16"])  # the bias before BatchNorm has no gradient
    monitor = hs.Monitor(step, every=1)
    run(step, 2)
    (record,) = monitor.poll()
    assert named(record)["0.bias"].amax < 0.01 * named(record)["0.weight"].amax
    assert monitor.findings() == ()


def test_complex_parameters_are_watched_by_their_parts() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.turn = nn.Linear(16, 4), nn.Parameter(torch.ones(4, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x).float() * self.turn).abs()  # type: ignore[no-any-return]  # module calls are Any

    model = Turned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).mean(), policy=hs.Policy.of("mixed", dtype="bf16"))
    monitor = hs.Monitor(step, every=1, activations=True)
    step(torch.ones(2, 16))
    (record,) = monitor.poll()
    assert named(record)["turn"].dtype == "fp32" and named(record)["turn"].gradient.count == 8
    assert monitor.findings() == ()


def test_weights_that_are_nan_are_found() -> None:
    step = trained(POLICIES["fp32"])
    monitor = hs.Monitor(step, every=1)
    with torch.no_grad():
        step.model.get_parameter("3.bias")[0] = math.nan
    run(step, 1)
    assert [(f.kind, f.where) for f in monitor.findings()] == [("bad_state", ("3.bias",))]


@pytest.mark.parametrize("name", POLICIES)
def test_a_healthy_run_has_no_findings(name: str) -> None:
    step = trained(POLICIES[name], clip_norm=1.0)
    monitor = hs.Monitor(step, every=3, activations=True)
    run(step, 30)
    assert monitor.findings() == ()


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_training_is_the_same_bit_for_bit(name: str, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    results = []
    for watched in (False, True):
        model = network()
        step = hs.TrainStep(
            model, optimizer(model.parameters(), lr=1e-2), loss_fn, policy=POLICIES[name], clip_norm=1.0, accumulate=2
        )
        if watched:
            hs.Monitor(step, every=2, activations=True)
        torch.manual_seed(1)
        run(step, 12)
        results.append((step.host_reads, [*model.state_dict().values()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


class Calls(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_between_samples_nothing_runs_and_no_hook_is_there_and_a_sample_waits_for_nothing() -> None:
    plain, watched = (trained(POLICIES["O2 bf16"]) for _ in range(2))
    monitor = hs.Monitor(watched, every=3, activations=True)
    counts = []
    for number in range(1, 8):
        hooks = sum(len(m._forward_hooks) for m in watched.model.modules())
        assert hooks == (4 if number % 3 == 0 else 0)
        names = []
        for step in (plain, watched):
            with Calls() as calls:
                step(*batch(number))
            names.append(calls.names)
        counts.append(len(names[1]) - len(names[0]))
        assert "aten._local_scalar_dense.default" not in names[1]
    assert [bool(count) for count in counts] == [False, False, True, False, False, True, False]
    monitor.close()
    assert not watched.watchers and not any(m._forward_hooks for m in watched.model.modules())
    assert [r.samples for r in monitor.flush()] == [2]


def test_a_compiled_model_is_watched_without_a_break_or_a_second_compilation() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = hs.prepare(network(), policy=POLICIES["mixed fp16"])
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    step = hs.TrainStep(compiled, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
    monitor = hs.Monitor(step, every=2)
    run(step, 5)
    assert counter.frame_count == 1
    assert [r.samples for r in monitor.poll()] == [2]
    with pytest.raises(StepError, match="watch the model before it is compiled"):
        hs.Monitor(step, activations=True)


# ---------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, o: hs.Monitor(o), "target must be a TrainStep or a model and is"),
        (lambda m, o: hs.Monitor(m, o, every=0, format="fp16"), "every must be a whole number from 1 and is 0"),
        (lambda m, o: hs.Monitor(m), r"pass the one that trains the model, Monitor\(model, optimizer\)"),
        (lambda m, o: hs.Monitor(m, o), "pass format='fp16'"),
        (lambda m, o: hs.Monitor(trained(POLICIES["fp32"]), o), "knows the step's own optimizer"),
        (lambda m, o: hs.Monitor(network(), o, format="fp16"), "SGD holds no parameter of Sequential"),
        (
            lambda m, o: hs.Monitor(m, o, format="fp16", scaler="auto"),
            "loop's GradScaler.* is 'auto'",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[Any, Any], Any], words: str) -> None:
    model = network()
    with pytest.raises(StepError, match=words):
        make(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_copy_of_a_watched_step_is_not_watched() -> None:
    import copy

    step = trained(POLICIES["fp32"])
    hs.Monitor(step)
    assert copy.deepcopy(step).watchers == []


def test_updates_that_vanish_at_the_end_of_a_schedule_are_no_finding() -> None:
    for last in (1e-9, 1e-2):
        step = trained(POLICIES["fp32"])
        monitor = hs.Monitor(step, every=1)
        run(step, 3)
        monitor.poll()
        for group in step.optimizer.param_groups:
            group["lr"] = last
        run(step, 3)
        (record,) = monitor.poll()
        assert (named(record)["0.weight"].swallowed > 0.5) == (last < 1e-8)
        assert monitor.findings() == ()
