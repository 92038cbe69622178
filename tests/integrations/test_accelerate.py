"""accelerate under a policy: the same bits as a loop by hand, skips, checkpoints, several optimizers, processes."""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, GradScalerKwargs

import halfstep as hs
from halfstep.errors import BindError, IntegrationError, PolicyError, ScaleError
from halfstep.integrations.accelerate import AcceleratedScaler, Accelerator, PolicyOptimizer, follow
from halfstep.integrations.shared import checking
from tests.examples.loading import load
from tests.two_processes import error_of, in_two_processes

POLICIES = [(name, dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")]
WINDOW = 2
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test accelerate's global states anew."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(policy: hs.Policy, **options: Any) -> Accelerator:
    """Return an Accelerator under `policy`."""
    return Accelerator(policy=policy, gradient_accumulation_steps=WINDOW, **options)


def network(seed: int = 0) -> nn.Sequential:
    """Return a small network with a norm and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))


def batches(count: int = 5, *, bad: int | None = None) -> list[Batch]:
    """Return batches; that of index `bad` makes gradients that are not finite."""
    generator = torch.Generator().manual_seed(3)
    found = [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(count)]
    if bad is not None:
        found[bad][0][0, 0] = torch.inf
    return found


def tools(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return an optimizer and a scheduler that shows every advance."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loader(data: list[Batch]) -> DataLoader[Any]:
    """Return a loader of `data` as they are."""
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, data: Any, scheduler: Any) -> list[float]:
    """Train for one pass over `data`, clipping at the end of windows; return losses."""
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_hand(policy: hs.Policy, data: list[Batch], passes: int = 2) -> nn.Module:
    """Return a model trained by the same loop with halfstep's own parts."""
    model = network()
    optimizer, scheduler = tools(model)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)
    scaler = checking(scaler)  # gradients of low weights are clipped in fp32
    for i, (x, y) in (step for _ in range(passes) for step in enumerate(loader(data), start=1)):
        scaler.scale(F.cross_entropy(model(x), y) / WINDOW).backward()
        if i % WINDOW == 0 or i == len(data):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if not scaler.skipped(optimizer):
                scheduler.step()
            optimizer.zero_grad()
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return fp32 weights by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two sets of weights have the same names, formats and bits."""
    same = one.keys() == other.keys() and all(one[n].dtype is other[n].dtype for n in one)
    return same and all(torch.equal(one[n], other[n]) for n in one)


# ------------------------------------------------------------------ one loop


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
def test_the_bits_are_those_of_a_loop_by_hand_with_a_partial_last_window(name: str, dtype: str) -> None:
    policy, data = hs.Policy.of(name, dtype=dtype), batches(5)
    expected = by_hand(policy, data)
    model = network()
    parts = (model, *tools(model))
    accelerator = made(policy)
    model_, optimizer, scheduler, data_ = accelerator.prepare(*parts, loader(data))
    for _ in range(2):
        epoch(accelerator, model_, optimizer, data_, scheduler)
    assert equal(values(model_), values(expected))
    assert scheduler.get_last_lr() == [1e-2 * 0.5**6]  # 3 windows in each pass


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
@pytest.mark.parametrize("first", ["accelerate", "hs", "hs.model", "one by one", "optimizer first"])
def test_every_order_gives_the_same_bits(first: str, order: tuple[int, ...]) -> None:
    policy = hs.Policy.of("O2", dtype="bf16")
    expected = values(by_hand(policy, batches(3), 1))
    model = network()
    optimizer, scheduler = tools(model)
    accelerator = made(policy)
    if first == "hs":
        hs.prepare(model, optimizer, policy=policy)
    if first == "hs.model":
        hs.prepare(model, policy=policy)
    parts = [model, optimizer, scheduler]
    done: list[Any] = [None] * 3
    if first == "one by one":
        for i in (0, 1, 2):
            done[i] = accelerator.prepare(parts[i])
    elif first == "optimizer first":
        for i in (1, 0, 2):
            done[i] = accelerator.prepare(parts[i])
    else:
        for i, part in zip(order, accelerator.prepare(*(parts[i] for i in order)), strict=True):
            done[i] = part
    hs.prepare(model, done[1], policy=policy)  # after it: changes nothing
    epoch(accelerator, done[0], done[1], accelerator.prepare(loader(batches(3))), done[2])
    assert equal(values(model), expected) and not accelerator._waiting


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize(
    ("name", "dtype", "scale"), [(*p, "auto") for p in POLICIES] + [("O2", "fp16", 128.0), ("O0", "fp32", "none")]
)
def test_a_skipped_step_changes_nothing_and_is_reported(
    name: str, dtype: str, scale: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = hs.Policy.of(name, dtype=dtype, scale=scale)
    accelerator, model = made(policy), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model_, wrapped, scheduler_ = accelerator.prepare(model, optimizer, scheduler)
    epoch(accelerator, model_, wrapped, accelerator.prepare(loader(batches(2))), scheduler_)
    before, state = values(model_), copy.deepcopy(wrapped.state_dict())
    scale_before = accelerator.scaler.get_scale()
    data = accelerator.prepare(loader(batches(2, bad=1)))
    with caplog.at_level(logging.WARNING, "halfstep"):
        for x, y in data:
            with accelerator.accumulate(model_):
                accelerator.backward(F.cross_entropy(model_(x), y))
                wrapped.step()
                scheduler_.step()
                if accelerator.sync_gradients:
                    assert accelerator.optimizer_step_was_skipped and wrapped.step_was_skipped
                wrapped.zero_grad()
    assert "AdamW: step skipped, gradients are not finite: 0.weight (" in caplog.text
    assert equal(values(model_), before) and scheduler_.get_last_lr() == [1e-2 * 0.5]
    for number, entry in wrapped.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][number][key]) for key, value in entry.items())
    with pytest.warns(UserWarning, match="static") if accelerator.scaler.rule.is_static else _nothing():
        after = accelerator.scaler.get_scale()
    assert after == scale_before * (1.0 if accelerator.scaler.rule.is_static else 0.5)
    epoch(accelerator, model_, wrapped, accelerator.prepare(loader(batches(2))), scheduler_)
    assert not accelerator.optimizer_step_was_skipped and not equal(values(model_), before)
    assert scheduler_.get_last_lr() == [1e-2 * 0.25]


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


def test_accelerate_itself_takes_such_a_step_in_bf16() -> None:
    """The twin of the test above: what it would miss without a policy."""
    accelerator, model = accelerate.Accelerator(mixed_precision="bf16"), network()
    model_, optimizer, scheduler = accelerator.prepare(model, *tools(model))
    for x, y in batches(1, bad=0):
        accelerator.backward(F.cross_entropy(model_(x), y))
        optimizer.step()
        scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert any(value.isnan().any() for value in values(model_).values())


def test_values_are_clipped_unscaled() -> None:
    accelerator, model = made(hs.Policy.of("pure", dtype="fp16")), network()
    model_, optimizer = accelerator.prepare(model, tools(model)[0])
    ((x, y),) = batches(1)
    accelerator.backward(F.cross_entropy(model_(x), y))
    accelerator.clip_grad_value_(model_.parameters(), 2.0**-10)
    gradients = [p.grad for p in model_.parameters() if p.grad is not None]
    assert len(gradients) == 6 and all(g.dtype is torch.float32 for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) == 2.0**-10
    norm = accelerator.clip_grad_norm_(model_[0].parameters(), 1e-4)  # a second clip does not unscale again
    assert 1e-4 < float(norm) < 1e-3 * 7
    assert accelerator.clip_grad_norm_(model_[0].weight, 1.0) <= 1.0001e-4
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_step_that_is_left_out_by_hand_leaves_nothing_scaled() -> None:
    policy = hs.Policy.of("O2", dtype="fp16")
    reference = network()
    reference, plain, scaler = hs.prepare(reference, tools(reference)[0], policy=policy)
    accelerator, model = Accelerator(policy=policy), network()
    model_, optimizer = accelerator.prepare(model, tools(model)[0])
    for i, (x, y) in enumerate(batches(3)):
        torch.manual_seed(i)
        accelerator.backward(F.cross_entropy(model_(x), y))
        accelerator.clip_grad_norm_(model_.parameters(), 0.5)
        if i != 1:
            optimizer.step()
            torch.manual_seed(i)
            scaler.scale(F.cross_entropy(reference(x), y)).backward()
            scaler.unscale_(plain)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            scaler.step(plain)
            scaler.update()
            plain.zero_grad()
        optimizer.zero_grad()
    assert equal(values(model_), values(reference)) and accelerator.scaler.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_torch_compile_is_accelerates_own(name: str) -> None:
    policy = hs.Policy.of(name, dtype="bf16")
    expected = values(by_hand(policy, batches(3), 1))
    accelerator, model = made(policy, dynamo_backend="eager"), network()
    model_, optimizer, scheduler = accelerator.prepare(model, *tools(model))
    assert model_ is not model
    epoch(accelerator, model_, optimizer, accelerator.prepare(loader(batches(3))), scheduler)
    assert equal(values(accelerator.unwrap_model(model_, keep_torch_compile=False)), expected)


def test_a_region_of_the_policy_and_one_that_casts_nothing() -> None:
    policy = hs.Policy.of("O2", dtype="fp16", scale=8.0).with_modules({"0": "fp32"})
    accelerator, x = made(policy), torch.randn(4, 4)
    with accelerator.autocast():
        assert (x @ x).dtype is torch.float16 and F.mse_loss((x @ x), x).dtype is torch.float32
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32
    assert (x @ x).dtype is torch.float32 and accelerator.mixed_precision == "no"


def test_a_black_box_takes_the_wrapped_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    def run(*, boxed: bool, bad: int | None) -> tuple[dict[str, Tensor], Any]:
        accelerator, model = Accelerator(policy=hs.Policy.of("O2", dtype="fp16")), network()
        model_, optimizer = accelerator.prepare(model, tools(model)[0])

        def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        box = hs.BlackBox(model_, loss_fn, optimizer)
        for x, y in batches(4, bad=bad):
            accelerator.backward(box(x, y) if boxed else loss_fn(model_, x, y))
            optimizer.step()
            optimizer.zero_grad()
        return values(model_), box

    plain, _ = run(boxed=False, bad=None)
    assert equal(run(boxed=True, bad=None)[0], plain)
    verdict = run(boxed=True, bad=3)[1].explain()
    assert "bad batch: input 0 holds inf in sample " in str(verdict) and "1 of 24 values" in str(verdict)


def test_a_black_box_accuses_no_loop_of_accelerates_and_names_what_no_scale_cures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(*, sloped: bool) -> hs.BlackBox:
        accelerator = Accelerator(policy=hs.Policy.of("mixed", dtype="fp16"), gradient_accumulation_steps=2)
        model = network()
        model_, optimizer = accelerator.prepare(model, tools(model)[0])

        def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            h = model(x).float()
            return F.cross_entropy(h, y) + ((h * 0).sum().sqrt() if sloped else 0.0)

        box = hs.BlackBox(model_, loss_fn, optimizer)
        for x, y in batches(16):
            with accelerator.accumulate(model_):
                accelerator.backward(box(x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model_.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return box

    with caplog.at_level(logging.WARNING, "halfstep"):
        assert run(sloped=False).verdict is None and not caplog.records
        verdict = run(sloped=True).verdict
    assert verdict is not None and (verdict.op, verdict.cause == "loop") == ("sqrt", False)
    assert sum("sqrt" in record.getMessage() for record in caplog.records) == 1


# ------------------------------------------------------------------ several models and optimizers


def two() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return two models and an optimizer for each."""
    torch.manual_seed(1)
    models: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 3)]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_a_scale_that_moves_between_two_steps_is_not_mixed_up(name: str, clip: bool) -> None:
    """One loss, two optimizers, and a scale that grows at every update: accelerate updates after the first step."""
    rule = hs.ScaleRule(init=2.0**8, growth=2.0, backoff=0.5, interval=1)
    policy = hs.Policy.of(name, dtype="fp16", scale=rule)
    data = batches(3)

    models, optimizers = two()
    models, optimizers, scaler = hs.prepare(models, optimizers, policy=policy)
    for x, y in data:
        scaler.scale(F.cross_entropy(models[1](models[0](x)), y)).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    expected, scale = [values(model) for model in models], scaler.get_scale()

    models, optimizers = two()
    accelerator = Accelerator(policy=policy)
    first, second, one, other = accelerator.prepare(*models, *optimizers)
    for x, y in data:
        accelerator.backward(F.cross_entropy(second(first(x)), y))
        for model, optimizer in ((first, one), (second, other)):
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        one.zero_grad()
        other.zero_grad()
    assert all(equal(values(m), e) for m, e in zip((first, second), expected, strict=True))
    assert accelerator.scaler.get_scale() == scale == 2.0**11


def test_clipping_leaves_gradients_scaled_that_are_still_added_to() -> None:
    policy = hs.Policy.of("O2", dtype="fp16")
    models, optimizers = two()
    accelerator = Accelerator(policy=policy)
    first, second, one, other = accelerator.prepare(*models, *optimizers)
    (x, y), (u, v) = batches(2)
    reference = copy.deepcopy(models[1])
    accelerator.backward(F.cross_entropy(second(x), y))
    accelerator.backward(first(x).square().mean())
    accelerator.clip_grad_norm_(first.parameters(), 1.0)
    one.step()
    accelerator.backward(F.cross_entropy(second(u), v))
    other.step()
    hs.prepare(reference, plain := torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), policy=policy)
    scaler = hs.GradScaler()
    for a, b in ((x, y), (u, v)):
        scaler.scale(F.cross_entropy(reference(a), b)).backward()
    scaler.step(plain)
    assert equal(values(second), values(reference))


def test_one_optimizer_over_models_that_are_prepared_one_after_the_other() -> None:
    models, _ = two()
    optimizer = torch.optim.Adagrad([p for m in models for p in m.parameters()], initial_accumulator_value=0.1)
    accelerator = Accelerator(policy=hs.Policy.of("pure", dtype="bf16"))
    wrapped = accelerator.prepare(optimizer)
    first = accelerator.prepare(models[0])
    (x, y), *_ = batches(1)
    with pytest.raises(BindError, match=r"parameter 2 of group 0 of Adagrad.* is not a parameter of the model"):
        accelerator.backward(first(x).sum())
    second = accelerator.prepare(models[1])
    accelerator.backward(F.cross_entropy(second(first(x)), y))
    wrapped.step()
    sums = [s["sum"] for s in optimizer.state.values()]
    assert all(s.dtype is torch.float32 and float(s.min()) >= 0.1 for s in sums)


# ------------------------------------------------------------------ checkpoints


def trained(policy: hs.Policy, passes: int, folder: Path | None = None, *, seed: int = 0) -> Any:
    """Train for some passes, from what is in `folder`; return accelerator, model, optimizer, scheduler, losses."""
    model = network(seed)
    accelerator = made(policy)
    parts = accelerator.prepare(model, *tools(model))
    if folder is not None:
        accelerator.load_state(str(folder))
    data = accelerator.prepare(loader(batches(5)))
    losses = [epoch(accelerator, parts[0], parts[1], data, parts[2]) for _ in range(passes)]
    return accelerator, *parts, losses


@pytest.mark.parametrize(
    ("name", "dtype", "more"),
    [
        *((*p, {}) for p in POLICIES),
        *(("O2", "bf16", {"master": master}) for master in ("split", "kahan", "stochastic")),
        ("pure", "bf16", {"master": "split", "state": "low"}),
        ("mixed", "bf16", {"state": "low"}),
    ],
)
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(
    name: str, dtype: str, more: dict[str, Any], tmp_path: Path
) -> None:
    policy = hs.Policy.of(name, dtype=dtype, **more)
    if dtype == "fp16":
        policy = policy.replace(scale=hs.ScaleRule(init=2.0**8, growth=2.0, backoff=0.5, interval=2))
    accelerator, *_ = trained(policy, 1)
    accelerator.save_state(str(tmp_path))
    data = accelerator.prepare(loader(batches(5)))
    losses = epoch(accelerator, accelerator._models[0], accelerator._optimizers[0], data, accelerator._schedulers[0])
    other, model, optimizer, scheduler, resumed = trained(policy, 1, tmp_path, seed=7)
    assert resumed == [losses]
    assert equal(values(model), values(accelerator._models[0]))
    assert other.scaler.state_dict() == accelerator.scaler.state_dict()
    assert scheduler.state_dict() == accelerator._schedulers[0].state_dict()
    expected = accelerator._optimizers[0].state_dict()["state"]
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, expected[number][key]) for key, value in entry.items())


def test_what_is_saved_is_fp32_under_plain_names(tmp_path: Path) -> None:
    accelerator, model, *_ = trained(hs.Policy.of("pure", dtype="bf16"), 1)
    assert model[0].weight.dtype is torch.bfloat16
    assert accelerator.unwrap_model(model) is model
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(tmp_path))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == state.keys() == network().state_dict().keys()
    assert all(v.dtype is torch.float32 and torch.equal(v, saved[n]) for n, v in state.items())
    plain = network(5)
    plain.load_state_dict(saved)
    assert equal(values(plain), values(model))


def test_memory_is_freed_and_another_model_is_trained() -> None:
    accelerator, model, optimizer, scheduler, _ = trained(hs.Policy.of("O2", dtype="fp16"), 1)
    accelerator.backward(model(batches(1)[0][0]).sum())
    accelerator.unscale_gradients(optimizer)
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    assert model is None and accelerator._models == []
    fresh = network()
    model_, optimizer_, scheduler_ = accelerator.prepare(fresh, *tools(fresh))
    epoch(accelerator, model_, optimizer_, accelerator.prepare(loader(batches(2))), scheduler_)
    assert not accelerator.optimizer_step_was_skipped


# ------------------------------------------------------------------ an Accelerator that exists


class Own(accelerate.Accelerator):
    """An Accelerator of a user."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Count the calls."""
        self.calls = getattr(self, "calls", 0) + 1
        super().backward(loss, **kwargs)


@pytest.mark.parametrize("kind", [accelerate.Accelerator, Own])
def test_an_accelerator_follows_a_policy_from_now_on(kind: Any) -> None:
    policy = hs.Policy.of("O2", dtype="bf16")
    expected = values(by_hand(policy, batches(3), 1))
    plain = kind(gradient_accumulation_steps=WINDOW)
    accelerator = follow(plain, policy)
    assert accelerator is plain and isinstance(plain, Accelerator) and isinstance(plain, kind)
    assert follow(plain, policy) is plain
    model = network()
    model_, optimizer, scheduler = accelerator.prepare(model, *tools(model))
    epoch(accelerator, model_, optimizer, accelerator.prepare(loader(batches(3))), scheduler)
    assert equal(values(model_), expected)
    assert kind is accelerate.Accelerator or plain.calls == 3
    with pytest.raises(IntegrationError, match="follows policy 'O2' already and was given 'pure'"):
        follow(plain, "pure")


def test_an_accelerator_that_cannot_follow_stays_as_it_was() -> None:
    plain = accelerate.Accelerator()
    with pytest.raises(PolicyError, match="O22"):
        follow(plain, "O22")
    plain.prepare(network())
    with pytest.raises(IntegrationError, match=r"has prepared 1 models and 0 optimizers without a policy; call follow"):
        follow(plain, "O2")
    plain.free_memory()
    plain.scaler_handler = GradScalerKwargs()
    with pytest.raises(IntegrationError, match="GradScalerKwargs"):
        follow(plain, "O2")
    assert type(plain) is accelerate.Accelerator and plain.scaler is None


# ------------------------------------------------------------------ refusals


def test_accelerates_own_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "accelerate's mixed precision is 'bf16' .* beside policy 'O2': set mixed_precision='no'"
    with pytest.raises(IntegrationError, match=text):
        Accelerator(policy="O2", mixed_precision="bf16")
    with pytest.raises(IntegrationError, match=text):
        Accelerator(True, False, "bf16", policy="O2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` sets it
    with pytest.raises(IntegrationError, match=text):
        Accelerator(policy="O2")
    assert not AcceleratorState._shared_state  # nothing was set up
    Accelerator(policy="O2", mixed_precision="no")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    AcceleratorState._reset_state()
    accelerate.Accelerator(mixed_precision="bf16")
    with pytest.raises(IntegrationError, match=text):
        Accelerator(policy="O2")


def test_what_a_policy_decides_is_refused_beside_it() -> None:
    with pytest.raises(IntegrationError, match=r"GradScalerKwargs.* beside policy 'O2' has no effect.*\(scale=\)"):
        Accelerator(policy="O2", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    with pytest.raises(IntegrationError, match=r"AutocastKwargs.* beside policy 'O2' has no effect.*\(its rules\)"):
        Accelerator(policy="O2", kwargs_handlers=[AutocastKwargs()])
    with pytest.raises(PolicyError, match="did you mean 'O2'"):
        Accelerator(policy="o2")


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [("DEEPSPEED", "set bf16 or fp16"), ("MEGATRON_LM", "set bf16 or fp16"), ("FSDP", "fsdp_version=2"), ("XLA", "")],
)
def test_other_engines_are_refused(engine: str, remedy: str) -> None:
    kind = type("Engine", (accelerate.Accelerator,), {"distributed_type": getattr(accelerate.DistributedType, engine)})
    plain = kind()
    with pytest.raises(IntegrationError, match=f"policy 'mixed': .*{remedy}"):
        follow(plain)
    assert type(plain) is kind


def test_optimizers_that_cannot_follow_are_refused() -> None:
    accelerator, model = made(hs.Policy.of("mixed", dtype="bf16")), network()
    foreign = accelerate.optimizer.AcceleratedOptimizer(tools(model)[0])
    with pytest.raises(IntegrationError, match="another Accelerator has prepared"):
        accelerator.prepare(model, foreign)
    accelerator.free_memory()
    lomo = type("Lomo", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(IntegrationError, match="Lomo updates weights inside the backward pass"):
        accelerator.prepare(model, lomo)
    model_, optimizer = accelerator.prepare(model, tools(model)[0])
    accelerator.backward(model_(batches(1)[0][0]).sum())
    with pytest.raises(ScaleError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(BindError, match="already prepared with policy 'mixed' and was given 'O2'"):
        hs.prepare(model, policy="O2")


def test_a_loss_that_was_not_scaled_is_an_error() -> None:
    accelerator, model = made(hs.Policy.of("mixed", dtype="bf16")), network()
    model_, optimizer = accelerator.prepare(model, tools(model)[0])
    model_(batches(1)[0][0]).sum().backward()
    with pytest.raises(ScaleError, match="no loss has been scaled yet"):
        optimizer.step()


# ------------------------------------------------------------------ the scaler


def test_updates_wait_for_the_next_loss_and_are_never_lost() -> None:
    rule = hs.ScaleRule(init=4.0, growth=2.0, backoff=0.5, interval=1)
    scaler, weight = AcceleratedScaler(rule), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step() -> None:
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.update()  # for an optimizer that had nothing to step

    step()
    assert float(scaler.scale_on("cpu")) == 4.0 and scaler.state_dict()["scale"] == 8.0
    step()
    assert scaler.get_scale() == 16.0
    step()
    assert float(scaler.scale(torch.ones(()))) == 32.0
    step()
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0
    step()
    scaler.load_state_dict(hs.GradScaler(rule=rule).state_dict())
    assert scaler.get_scale() == 4.0


# ------------------------------------------------------------------ processes


def _ranks(rank: int, folder: str) -> dict[str, Any]:
    """Train under DistributedDataParallel and under FSDP2."""
    os.environ.update(  # let accelerate find the group that the test has made
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    out: dict[str, Any] = {}
    for name, dtype in (("O2", "fp16"), ("pure", "bf16")):
        policy = hs.Policy.of(name, dtype=dtype)
        model = network(rank)  # DistributedDataParallel sends those of rank 0
        accelerator, parts = made(policy), (model, *tools(model))
        prepared = accelerator.prepare(*parts)
        out[f"start {name}"] = equal(values(model), values(network(0)))
        out[f"DDP {name}"] = _skip_and_resume(accelerator, prepared, rank, f"{folder}/DDP{name}")
        accelerator.free_memory()
    for name, dtype, before in (("mixed", "bf16", False), ("pure", "fp16", False), ("O2", "bf16", True)):
        policy = hs.Policy.of(name, dtype=dtype)
        accelerator, prepared = _sharded(policy, before=before, whole=name == "mixed")
        found = out[f"FSDP {name}"] = _skip_and_resume(accelerator, prepared, rank, f"{folder}/FSDP{name}")
        if "losses" in found:
            accelerator, prepared = _sharded(policy, before=before, whole=name == "mixed")  # has no states yet
            accelerator.load_state(f"{folder}/FSDP{name}")
            resumed = epoch(accelerator, prepared[0], prepared[1], batches(2), prepared[2])
            found["same"] &= resumed == found["losses"] and accelerator.scaler.state_dict() == found["scale"]
    out["error"] = error_of(lambda: _sharded(hs.Policy.of("O2", dtype="bf16"), before=False))
    out["mixed precision"] = error_of(lambda: _sharded(hs.Policy.of("O2"), before=False, own=True))
    out["prepared"] = error_of(
        lambda: _sharded(
            hs.Policy.of("O2", dtype="bf16"), before=True, shard=lambda m, policy: hs.prepare(m, policy=policy)
        )
    )
    accelerator, _ = _sharded(hs.Policy.of("pure", dtype="bf16"), before=False, whole=True)
    out["whole"] = [error_of(lambda: accelerator.save_state(folder)), error_of(lambda: accelerator.load_state(folder))]
    return out


def _skip_and_resume(accelerator: Accelerator, prepared: Any, rank: int, folder: str) -> dict[str, Any]:
    """Train over a batch that is bad on one rank, save, train on, load, and train on again."""
    model, optimizer, scheduler = prepared
    epoch(accelerator, model, optimizer, batches(2), scheduler)
    before = _gathered(model)
    epoch(accelerator, model, optimizer, batches(2, bad=1 if rank else None), scheduler)
    skipped = accelerator.optimizer_step_was_skipped, equal(before, _gathered(model))
    found = {
        "kind": type(model).__name__,
        "skipped": skipped,
        "lr": scheduler.get_last_lr()[0],
        "weights": before,
        "names": list(accelerator.get_state_dict(model)),
    }
    accelerator.save_state(folder)
    if "SHARDED" in str(getattr(accelerator.state, "fsdp_plugin", "")) and OLD:
        return found
    losses = epoch(accelerator, model, optimizer, batches(2), scheduler)
    after, scale = _gathered(model), accelerator.scaler.state_dict()
    accelerator.load_state(folder)
    again = epoch(accelerator, model, optimizer, batches(2), scheduler)
    same = losses == again and equal(after, _gathered(model)) and scale == accelerator.scaler.state_dict()
    return {**found, "same": same, "losses": losses, "scale": scale}


OLD = accelerate.__version__.startswith(("1.10.", "1.11.", "1.12."))
"""These cannot load the sharded optimizer states that they save under FSDP2."""


def _sharded(
    policy: hs.Policy, *, before: bool, whole: bool = False, own: bool = False, shard: Any = hs.shard
) -> tuple[Accelerator, Any]:
    """Prepare a model under FSDP2; accelerate refuses to shard on a CPU, so its state is told otherwise."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plain = accelerate.Accelerator(gradient_accumulation_steps=WINDOW)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT",
    )
    if own:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp = accelerate.DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = plain.state.distributed_type = fsdp
    plain.state.fsdp_plugin = plugin
    accelerator, model = follow(plain, policy), network()
    if before:
        shard(model, policy)
    elif policy.name == "O2":
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), network())  # two norms in one group
    return accelerator, accelerator.prepare(model, *tools(model))


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return whole fp32 weights by name, without a wrapper's prefix."""
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {n: v.full_tensor().clone() if isinstance(v, DTensor) else v.clone() for n, v in state.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_two_processes(_ranks, folder, str(folder))


@pytest.mark.dist
@pytest.mark.parametrize("case", ["DDP O2", "DDP pure", "FSDP mixed", "FSDP pure", "FSDP O2"])
def test_two_processes_train_skip_and_resume_together(case: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[case] for rank in ranks)
    assert first["kind"] == ("DistributedDataParallel" if case.startswith("DDP") else "FSDPSequential")
    for found in (first, second):
        assert found["skipped"] == (True, True) and equal(found["weights"], first["weights"])
        assert found["lr"] == 1e-2 * 0.5**2  # of two windows one was skipped; accelerate advances once a process
        assert found["same"] if "losses" in found else OLD and case in ("FSDP pure", "FSDP O2")
    assert first["names"] == list(network().state_dict())
    assert all(rank.get(case.replace("DDP", "start"), True) for rank in ranks)  # weights are the first rank's, in fp32


@pytest.mark.dist
def test_fsdp2_that_cannot_carry_out_the_policy_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "this group gets two" in rank["error"] and "hs.shard(model, policy)" in rank["error"]
        assert rank["mixed precision"].startswith(
            "IntegrationError: FullyShardedDataParallelPlugin(mixed_precision_policy=...) beside policy 'O2'"
        )
        assert "the model was given to hs.prepare with policy 'O2' and is to be sharded" in rank["prepared"]
        assert all("torch would round the fp32 weights that it loads; use 'SHARDED" in text for text in rank["whole"])


# ------------------------------------------------------------------ the example


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
def test_the_example_trains_within_the_noise_of_fp32(name: str, dtype: str) -> None:
    train = load("frameworks/accelerate_loop").train
    seeds = _fp32()
    loss = train(hs.Policy.of(name, dtype=dtype))
    assert abs(loss - seeds[0]) <= max(seeds) - min(seeds)


_SEEDS: list[float] = []


def _fp32() -> list[float]:
    """Return the losses of four runs in fp32 that differ in their seed."""
    if not _SEEDS:
        _SEEDS.extend(load("frameworks/accelerate_loop").train("O0", seed=seed) for seed in range(4))
    return _SEEDS


def test_the_wrapper_is_accelerates() -> None:
    accelerator, model = made(hs.Policy.of("mixed", dtype="bf16")), network()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, PolicyOptimizer) and accelerator.prepare(optimizer) is optimizer
    assert "step" not in vars(optimizer.optimizer)  # accelerate's own puts a method there
