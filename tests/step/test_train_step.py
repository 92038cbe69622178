"""TrainStep: the same training as a hand-written loop, and bad steps that leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import BindError, StepError
from tests.products import sampled
from tests.stepping import fragile, own_step

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def net(*, norm: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(norm=norm)


def batch(i: int, n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + i)
    return torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def weights(step: hs.TrainStep) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in step.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("own", [False, True])
def test_preset_torch_is_the_torch_amp_loop(optimizer: str, clip: float | None, own: bool) -> None:
    """bf16, torch.autocast, the same (fused) optimizer, clip_grad_norm_.

    Equal bit for bit through the optimizer's own step, and to some roundings of update and clip factor through ours.
    """
    model = net()
    stepped = OPTIMIZERS[optimizer](model.parameters())
    if not own:
        own_step(stepped)
    step = hs.TrainStep(model, stepped, loss_fn, policy=hs.Policy.of("torch", dtype="bf16"), clip_norm=clip)
    reference = net()
    other = OPTIMIZERS[optimizer](reference.parameters())
    if optimizer != "rmsprop":
        for group in other.param_groups:
            group["fused"], group["foreach"] = True, False
    for i in range(5):
        x, y = batch(i)
        result = step(x, y)
        with torch.autocast("cpu", dtype=BF16):
            loss = loss_fn(reference, x, y)
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert torch.allclose(result.grad_norm, norm)
        other.step()
        other.zero_grad()
        if i == 0:
            assert torch.equal(result.loss, loss.detach())
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        exact = clip is None and step.generic
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


PRESETS = ("O0", "torch", "O1", "mixed", "O2", "pure", "lean", "O3")


@pytest.mark.parametrize(("optimizer", "dtype", "name"), sampled(OPTIMIZERS, ("bf16", "fp16"), PRESETS))
def test_every_preset_learns(name: str, dtype: str, optimizer: str) -> None:
    if name == "O0" and dtype == "fp16":
        pytest.skip("O0 is fp32")
    if name == "O3" and dtype == "fp16" and optimizer in {"adamw", "rmsprop"}:
        pytest.skip("eps=1e-8 is zero in fp16 state: O3 is the speed of light, not for training")
    model = net()
    chosen = hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype=dtype)
    step = hs.TrainStep(model, OPTIMIZERS[optimizer](model.parameters()), loss_fn, policy=chosen, clip_norm=1.0)
    x, y = batch(0)
    losses = [step(x, y).host() for _ in range(30)]
    assert losses[-1].loss < losses[0].loss - 0.1
    assert losses[-1].updated


@pytest.mark.parametrize("name", ["mixed", "O2", "pure"])
def test_the_skip_comes_and_goes(name: str) -> None:
    model = net()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        loss_fn,
        policy=hs.Policy.of(name, dtype="fp16", scale=2.0**24),
        scaler=hs.GradScaler("cpu", init_scale=2.0**24),
    )
    results = [step(*batch(i)).host() for i in range(20)]
    assert results[0].skipped and not results[0].updated and results[0].culprits
    assert any(r.updated for r in results[-8:]) and results[-1].scale < 2.0**24
    assert all(torch.isfinite(torch.tensor(r.grad_norm)) == r.updated for r in results)


def poisoned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_fn(model, x, y) * (float("inf") if x[0, 0] > 90 else 1.0)


def bad(i: int) -> tuple[Tensor, Tensor]:
    x, y = batch(i)
    x[0, 0] = 100.0
    return x, y


@pytest.mark.parametrize(
    ("when", "optimizer", "name"), sampled((0, 3), OPTIMIZERS, ("O0", "torch", "mixed", "O2", "pure", "lean"))
)
def test_a_bad_step_leaves_no_trace(name: str, optimizer: str, when: int) -> None:
    """Parameters, optimizer state, step counts, BatchNorm statistics: as if the batch had not been there."""

    def run(*, with_bad: bool) -> tuple[dict[str, Tensor], dict[str, Any], list[bool]]:
        model = net(norm=True)
        chosen = hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype="bf16")
        made = OPTIMIZERS[optimizer](model.parameters())
        step = hs.TrainStep(model, made, poisoned, policy=chosen, clip_norm=1.0, blackbox=when == 0)
        skips = []
        for i in range(6):
            if with_bad and i == when:
                skips.append(step(*bad(50)).host().skipped)
            skips.append(step(*batch(i)).host().skipped)
        return weights(step), copy.deepcopy(step.optimizer.state_dict()["state"]), skips

    clean, clean_state, none = run(with_bad=False)
    dirty, dirty_state, skips = run(with_bad=True)
    assert not any(none) and sum(skips) == 1 and skips[when]
    assert same(clean, dirty)
    for i in clean_state:
        for key, value in clean_state[i].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(dirty_state[i][key])), key


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_raises_leaves_no_trace(accumulate: int, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("backward")

    def loss_fn(model: nn.Module, x: Tensor, fail: bool = False) -> Tensor:
        out = model(x)
        if fail and where == "forward":
            raise ValueError("forward")
        if fail:  # after half of the parameters have their gradients
            out = model[0](Fails.apply(x.clone().requires_grad_())) + out  # type: ignore[index,no-untyped-call]
        return out.square().mean()  # type: ignore[no-any-return]

    def made() -> tuple[nn.Module, hs.TrainStep]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, hs.TrainStep(model, optimizer, loss_fn, policy="O0", accumulate=accumulate)

    (model, step), (twin, other) = made(), made()
    good = torch.randn(4, 8, 4).unbind()
    for x in good[:accumulate]:
        step(x), other(x)
    for x in good[1:accumulate]:
        step(x)  # in a window that is lost
    with pytest.raises(ValueError, match=where):
        step(torch.randn(8, 4) * 100, True)
    for x in good[2 : 2 + accumulate]:
        step(x), other(x)
    for left, right in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_without_the_guard_statistics_would_be_poisoned() -> None:
    model = net(norm=True)
    x, _ = batch(0)
    x[0, 0] = float("inf")
    model(x)
    assert not torch.isfinite(model.norm.running_mean).all()  # type: ignore[arg-type]
    model = net(norm=True)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O0")
    before = weights(step)
    x, y = batch(0)
    x[0, 0] = float("inf")
    result = step(x, y).host()
    assert result.skipped and "first.weight" in result.culprits
    assert same(before, weights(step))


def test_accumulation_is_the_mean_of_the_micro_batches() -> None:
    def train(accumulate: int) -> dict[str, Tensor]:
        model = net()
        step = hs.TrainStep(
            model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O0", accumulate=accumulate
        )
        for i in range(3):
            x, y = batch(i, 8)
            for j in range(accumulate):
                part = slice(j * 8 // accumulate, (j + 1) * 8 // accumulate)
                result = step(x[part], y[part])
                assert bool(result.updated) == (j + 1 == accumulate)
        return weights(step)

    whole, parts = train(1), train(4)
    assert all(torch.allclose(whole[k], parts[k], atol=1e-6) for k in whole)


def test_flush_takes_the_mean_of_an_unfinished_window() -> None:
    model, other = net(), net()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O0", accumulate=4)
    single = hs.TrainStep(other, torch.optim.SGD(other.parameters(), 0.1), loss_fn, policy="O0")
    assert step.flush() is None
    x, y = batch(0, 8)
    step(x[:4], y[:4])
    step(x[4:], y[4:])
    result = step.flush()
    assert result is not None and bool(result.updated)
    single(x, y)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_gradients_accumulate_in_fp32_if_asked() -> None:
    """64 micro-batches: a sum of bf16 gradients is off by far more than a sum kept in fp32."""

    def error(grads: str) -> float:
        model, exact = net(), net()
        for p in exact.parameters():
            p.data = p.data.bfloat16().float()
        chosen = hs.Policy.of("O2", dtype="bf16", grads=grads)
        step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1.0), loss_fn, policy=chosen, accumulate=64)
        before = weights(step)["last.weight"]
        for i in range(64):
            x, y = batch(i)
            step(x, y)
            with torch.autocast("cpu", dtype=BF16):
                (loss_fn(exact, x, y) / 64).backward()
        moved = before - weights(step)["last.weight"]
        want = exact.last.weight.grad
        assert want is not None
        return float((moved - want).norm() / want.norm())

    assert error("fp32") < error("param")


def test_clip_value() -> None:
    model = net()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1.0), loss_fn, policy="O0", clip_value=1e-3)
    before = weights(step)
    step(*batch(0))
    after = weights(step)
    largest = max(float((before[k] - after[k]).abs().max()) for k in before)
    assert largest == pytest.approx(1e-3, rel=1e-4)


def test_the_scheduler_does_not_advance_on_a_skip() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = hs.TrainStep(model, optimizer, poisoned, policy="O0", scheduler=scheduler)
    rates = []
    for data in (batch(0), bad(1), batch(2), batch(3)):
        step(*data)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]  # the rate each update ran with
    assert step.state_dict()["scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize(
    ("optimizer", "dtype", "name"), sampled(OPTIMIZERS, ("bf16", "fp16"), ("O0", "mixed", "O2", "pure", "lean"))
)
def test_resume_is_bit_exact(name: str, dtype: str, optimizer: str, tmp_path: Any) -> None:
    def fresh() -> hs.TrainStep:
        model = net(norm=True)
        made = OPTIMIZERS[optimizer](model.parameters())
        chosen = hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype=dtype)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        return hs.TrainStep(model, made, loss_fn, policy=chosen, clip_norm=1.0, scheduler=scheduler)

    whole = fresh()
    for i in range(3):
        whole(*batch(i))
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    rest = [whole(*batch(i)).host() for i in range(3, 7)]
    resumed = fresh()
    resumed(*batch(40))  # a state of its own, to be replaced
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    again = [resumed(*batch(i)).host() for i in range(3, 7)]
    assert rest == again
    assert same(weights(whole), weights(resumed))
    assert whole.optimizer.param_groups[0]["lr"] == resumed.optimizer.param_groups[0]["lr"]


def test_parameters_replaced_after_prepare_are_refused() -> None:
    model = hs.prepare(net(), policy=hs.Policy.of("O2", dtype="bf16"))
    model.last.weight = nn.Parameter(Tensor.detach(model.last.weight).clone())
    with pytest.raises(StepError, match=r"parameter last\.weight is low and has no fp32 master.*hs.shard"):
        hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)


def test_a_scheduler_that_needs_a_metric() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(StepError, match="call scheduler.step.metric. yourself"):
        hs.TrainStep(model, optimizer, loss_fn, policy="O0", scheduler=plateau)


def test_loading_is_validated_first() -> None:
    model = net()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O2")
    before = weights(step)
    state = step.state_dict()
    with pytest.raises(StepError, match="'optimizer' is missing; nothing was loaded"):
        step.load_state_dict({"model": {}})
    other = net()
    mixed = hs.TrainStep(other, torch.optim.SGD(other.parameters(), 0.1), loss_fn, policy="mixed")
    with pytest.raises(StepError, match="another policy"):
        mixed.load_state_dict(state)
    state["model"] = {**state["model"], "first.weight": torch.zeros(2, 2)}
    with pytest.raises(StepError, match=r"first\.weight"):
        step.load_state_dict(state)
    assert same(before, weights(step))


def test_one_scaler_for_two_steps() -> None:
    a, b = net(), net()
    scaler = hs.GradScaler("cpu", init_scale=4.0)
    chosen = hs.Policy.of("mixed", dtype="fp16")
    steps = [
        hs.TrainStep(m, torch.optim.SGD(m.parameters(), 0.1), loss_fn, policy=chosen, scaler=scaler) for m in (a, b)
    ]
    for step in steps:
        assert step.scaler is scaler
        assert step(*batch(0)).host().scale == 4.0


def test_aux_and_named_batches() -> None:
    model = net()

    def with_aux(model: nn.Module, *, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        return F.cross_entropy(logits, y), logits

    step = hs.TrainStep(
        model, torch.optim.SGD(model.parameters(), 0.1), with_aux, policy=hs.Policy.of("mixed", dtype="bf16")
    )
    x, y = batch(0)
    result = step(x=x, y=y)
    assert result.aux.dtype is BF16 and result.loss.dtype is FP32


def test_an_exception_in_loss_fn_restores_and_training_goes_on() -> None:
    def run(*, failing: bool) -> dict[str, Tensor]:
        model = net()
        broken = [failing]

        def sometimes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_fn(model, x, y)
            if broken[0]:
                broken[0] = False
                raise ZeroDivisionError
            return loss

        step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 0.1), sometimes, policy="O2")
        if failing:
            with pytest.raises(ZeroDivisionError):
                step(*batch(9))
        for i in range(3):
            step(*batch(i))
        return weights(step)

    assert same(run(failing=False), run(failing=True))


def test_an_exception_in_the_optimizer_restores_and_training_goes_on() -> None:
    def run(*, failing: bool) -> dict[str, Tensor]:
        model = net()
        optimizer = fragile(torch.optim.SGD)(model.parameters(), 0.1)
        step = hs.TrainStep(model, optimizer, loss_fn, policy="O2")
        step(*batch(0))
        if failing:
            optimizer.broken = True
            with pytest.raises(ZeroDivisionError):
                step(*batch(9))
            assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
            optimizer.zero_grad()
        for i in range(3):
            step(*batch(i))
        return weights(step)

    assert same(run(failing=False), run(failing=True))


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"clip_norm": 0}, StepError, "clip_norm must be a positive finite number or None and is 0"),
        ({"clip_value": float("nan")}, StepError, "clip_value"),
        ({"accumulate": 0}, StepError, "accumulate must be a whole number"),
        ({"loss_fn": 3}, StepError, "loss_fn must be callable"),
        ({"scaler": torch.amp.GradScaler("cpu")}, StepError, "must be an hs.GradScaler"),
        ({"policy": "mixd"}, ValueError, "mixed"),
    ],
)
def test_bad_arguments_change_nothing(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    model = net()
    arguments: dict[str, Any] = {"loss_fn": loss_fn, "policy": "O2", **change}
    with pytest.raises(kind, match=text):
        hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), **arguments)
    assert type(model) is Net and all(p.dtype is FP32 for p in model.parameters())


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda m, x, y: m(x), r"a tensor of shape \(6, 3\)"),
        (lambda m, x, y: 3.0, "returned float"),
        (lambda m, x, y: m(x).sum().detach(), "the loss has no gradient"),
    ],
)
def test_a_loss_that_is_none(loss: Any, text: str) -> None:
    model = net()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, policy="O2")
    before = weights(step)
    with pytest.raises(StepError, match=text):
        step(*batch(0))
    assert same(before, weights(step))


def test_a_different_policy_on_a_prepared_model() -> None:
    model = hs.prepare(net(), policy="mixed")
    with pytest.raises(BindError, match="already prepared"):
        hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="O2")
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    assert step.policy.name == "mixed"


def test_fused_steps_never_read_the_device_on_the_host() -> None:
    model = net()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        loss_fn,
        policy=hs.Policy.of("O2", dtype="fp16"),
        clip_norm=1.0,
    )
    for i in range(5):
        step(*batch(i))
    assert step.host_reads == 0


def test_compiled_models_train() -> None:
    torch._dynamo.reset()
    model = hs.prepare(net(), policy=hs.Policy.of("mixed", dtype="bf16"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step = hs.TrainStep(compiled, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn)  # type: ignore[arg-type]
    x, y = batch(0)
    losses = [float(step(x, y).loss) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_float64_parameters_train() -> None:
    model = nn.Linear(8, 4).double()
    before = model.weight.detach().clone()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum(), policy="O0")
    x = torch.ones(2, 8, dtype=torch.float64)
    result = step(x)
    assert torch.allclose(model.weight, before - 0.2) and float(result.grad_norm) == pytest.approx(
        (4 * 8 * 4 + 16) ** 0.5
    )


def test_gradients_somebody_left_are_not_trained_on() -> None:
    model = nn.Linear(2, 1, bias=False)
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, x: m(x).sum(), policy="O0")
    before = model.weight.detach().clone()
    (100 * model(torch.ones(1, 2))).sum().backward()
    step(torch.ones(1, 2))
    assert torch.equal(model.weight, before - 1.0)


def test_an_optimizer_with_a_closure_is_refused_with_the_remedy() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(StepError, match=r"LBFGS evaluates the loss itself.*optimizer.step\(closure\) yourself"):
        hs.TrainStep(model, torch.optim.LBFGS(model.parameters()), lambda m, x: m(x).sum(), policy="O0")


def test_flush_brings_the_scheduler_up_to_date() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).mean(), policy="O0", scheduler=scheduler)
    for _ in range(3):
        step(torch.ones(2, 2))
    assert step.flush() is None and scheduler.last_epoch == 3


def test_a_scale_that_changes_inside_a_window_is_for_the_next() -> None:
    model = nn.Linear(4, 1, bias=False)
    scaler = hs.GradScaler("cpu", init_scale=1024.0)
    chosen = hs.Policy.of("mixed", dtype="fp16")
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    step = hs.TrainStep(model, sgd, lambda m, x: m(x).sum(), policy=chosen, accumulate=2, scaler=scaler)
    x = torch.ones(1, 4)
    for finish in (lambda: step(x), step.flush):
        before = model.weight.detach().clone()
        step(x)
        scaler.update(new_scale=512.0)
        finish()
        assert torch.equal(model.weight, before - 1.0)
        scaler.update(new_scale=1024.0)


@pytest.mark.parametrize("when", [0, 2])
def test_a_bad_step_leaves_no_trace_in_another_model_it_calls(when: int) -> None:
    torch.manual_seed(0)
    generator = nn.Linear(2, 4)
    judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    chosen = hs.Policy.of("mixed", dtype="fp16")
    sgd = torch.optim.SGD(generator.parameters(), lr=0.1)
    hs.prepare(judge, policy=chosen)
    step = hs.TrainStep(generator, sgd, lambda m, z: judge(m(z)).mean(), policy=chosen)
    for _ in range(when):
        step(torch.randn(4, 2))
    norm = judge[1]
    assert isinstance(norm, nn.BatchNorm1d)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    assert step(torch.full((4, 2), 1e9)).host().skipped
    assert same(before, norm.state_dict())
    step.scaler.update(new_scale=1024.0)
    assert step(torch.randn(4, 2)).host().updated
    assert not same(before, norm.state_dict())


@pytest.mark.parametrize("region", [torch.autocast("cpu", dtype=BF16), hs.autocast(policy="mixed", dtype=BF16)])
def test_a_region_around_the_step_does_not_keep_it_on_old_weights(region: Any) -> None:
    """The cache of torch.autocast, of low weights, lives as long as the outermost region and notices no update."""
    told = []
    for around in (nullcontext(), region):
        model = net()
        policy = hs.Policy.of("mixed", dtype="bf16")
        step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.5), loss_fn, policy=policy)
        with around:
            told.append([float(step(*batch(i)).loss) for i in range(3)])
            told[-1].append(float(loss_fn(model, *batch(0)).detach()))
    assert told[0][:3] == told[1][:3] and told[0][3] == pytest.approx(told[1][3], rel=1e-2)


@pytest.mark.parametrize("outer", [hs.suspended, lambda: torch.autocast("cpu", dtype=BF16, enabled=False)])
def test_steps_inside_an_outer_region_see_the_weights_of_the_last_update(outer: Callable[[], Any]) -> None:
    def losses(around: Any) -> list[float]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = hs.TrainStep(model, optimizer, loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"))
        with around:
            return [step(*batch(0)).host().loss for _ in range(3)]

    assert losses(outer()) == losses(nullcontext())
