"""Settings of a built training step: refused, or in effect from the next window on; nothing that is dropped stays."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import BindError, SettingError, StepError

POLICIES = ("O0", "mixed", "O2", "pure", "lean")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def weight(step: hs.TrainStep) -> Tensor:
    """Return the first weight of the model."""
    return next(step.model.parameters())


def built(policy: str = "mixed", **settings: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = net()
    wanted = hs.Policy.of(policy, dtype="bf16")
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, policy=wanted, **settings)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ fixed


def test_every_public_attribute_refuses_nonsense() -> None:
    step = built()
    step(batch())
    names = [name for name in dir(step) if not name.startswith("_") and not callable(getattr(type(step), name, None))]
    assert {"model", "policy", "record", "optimizer", "scaler", "host_reads"} < set(names)
    for name in names:
        before = getattr(step, name)
        with pytest.raises(hs.HalfstepError):
            setattr(step, name, object())
        with pytest.raises(AttributeError):
            delattr(step, name)
        assert getattr(step, name) is before
    assert not [name for name in vars(step) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("policy", "unprepare"),
        ("compile", "build the TrainStep anew"),
        ("scaler", r"scaler=\.\.\..*load_state_dict"),
        ("watchers", "append or remove"),
    ],
)
def test_what_is_fixed_names_the_remedy(name: str, remedy: str) -> None:
    step = built()
    with pytest.raises(SettingError, match=rf"TrainStep\.{name} is fixed when the object is built; .*{remedy}"):
        setattr(step, name, getattr(step, name))


def test_clipping_assigned_late_clips() -> None:
    step, other = built(clip_norm=1e-3), built()
    other.clip_norm = torch.tensor(1e-3)  # type: ignore[assignment]
    for one in (step, other):
        one(batch())
    assert torch.equal(weight(step), weight(other))
    with pytest.raises(SettingError, match="one gradient at a time"):
        built(update_in_backward=True).clip_norm = 1.0


def test_accumulate_between_windows_of_a_step_that_accumulates() -> None:
    step = built(accumulate=4)
    step(batch())
    with pytest.raises(StepError, match=r"step\.accumulate = .* after 1 of 4 micro-batches"):
        step.accumulate = 2
    step.flush()
    step.accumulate = 2
    assert [step(batch()).due for _ in range(4)] == [False, True, False, True]
    with pytest.raises(SettingError, match="build the TrainStep anew"):
        built().accumulate = 2


def test_a_loss_function_assigned_late_is_called() -> None:
    step = built()
    step.loss_fn = lambda model, x: model(x).float().sum() * 0 + 7
    assert float(step(batch()).loss) == 7
    with pytest.raises(StepError, match="takes no model"):
        step.loss_fn = nn.functional.mse_loss
    compiled = built(compile={"backend": "eager"})
    with pytest.raises(SettingError, match="compiled"):
        compiled.loss_fn = step.loss_fn


# ------------------------------------------------------------------ another optimizer


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    }
    return kinds[kind](model.parameters())


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("policy", POLICIES)
def test_another_optimizer_trains_as_if_the_step_were_built_with_it(policy: str, kind: str) -> None:
    replaced, wanted = built(policy), built(policy)
    for step in (replaced, wanted):
        step(batch(1))
    old = weakref.ref(replaced.optimizer)
    replaced.optimizer = made(kind, replaced.model)
    twin = hs.TrainStep(wanted.model, made(kind, wanted.model), loss_fn)
    for number in range(3):
        replaced(batch(number))
        twin(batch(number))
    assert replaced.optimizer.state and replaced.record.done == 4
    state, other = replaced.model.state_dict(), twin.model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)
    gc.collect()
    assert old() is None


def test_a_checkpoint_after_the_change_is_of_the_new_optimizer(tmp_path: Any) -> None:
    step, twin = built("O2"), built("O2")
    for one in (step, twin):
        one(batch())
        one.optimizer = made("SGD", one.model)
    step(batch(1))
    hs.save(step, tmp_path)
    hs.load(twin, tmp_path)
    for one in (step, twin):
        one(batch(2))
    assert torch.equal(weight(step), weight(twin))


def test_another_optimizer_under_update_in_backward() -> None:
    step, twin = built(update_in_backward=True), built()
    for one in (step, twin):
        one(batch())
        one.optimizer = made("SGD", one.model)
        one(batch())
    assert torch.equal(weight(step), weight(twin))
    kept = step.optimizer
    with pytest.raises(StepError, match="RMSprop is none of"):
        step.optimizer = made("RMSprop", step.model)
    assert step.optimizer is kept
    step(batch())
    twin(batch())
    assert torch.equal(weight(step), weight(twin))


def test_optimizers_that_are_refused_change_nothing() -> None:
    step = built(accumulate=2, policy="O2")
    kept = step.optimizer
    step(batch())
    with pytest.raises(StepError, match="after 1 of 2 micro-batches"):
        step.optimizer = made("SGD", step.model)
    step.flush()
    with pytest.raises(BindError, match="not a parameter of the model"):
        step.optimizer = made("SGD", net())
    with pytest.raises(StepError, match="must be a torch optimizer, or a list or a dict of some, and is 'sgd'"):
        step.optimizer = "sgd"  # type: ignore[assignment]
    step.scheduler = torch.optim.lr_scheduler.ExponentialLR(kept, 0.5)
    with pytest.raises(StepError, match=r"assign step\.scheduler = None"):
        step.optimizer = made("SGD", step.model)
    assert step.optimizer is kept
    step.scheduler = None
    step.optimizer = new = made("SGD", step.model)
    with pytest.raises(StepError, match="belongs to another optimizer"):
        step.scheduler = torch.optim.lr_scheduler.ExponentialLR(kept, 0.5)
    step.scheduler = torch.optim.lr_scheduler.ExponentialLR(new, 0.5)
    for _ in range(4):
        step(batch())
    step.state_dict()
    assert new.param_groups[0]["lr"] == 0.1 * 0.5**2


def test_retry_and_the_loss_scale_go_on_with_another_optimizer() -> None:
    torch.manual_seed(0)
    model: Any = net()
    policy = hs.Policy.of("mixed", dtype="fp16")
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn, policy=policy, retry=True)
    step.optimizer = made("SGD", model)
    before = model[3].weight.detach().clone()
    step.loss_fn = lambda model, x: loss_fn(model, x) * 1e3  # overflows in fp16 at the first scale
    result = step(batch())
    assert result.retries and not result.host().skipped and not torch.equal(model[3].weight, before)


# ------------------------------------------------------------------ what is dropped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("own", [False, True], ids=["step", "loop"])
def test_models_that_are_replaced_are_freed(policy: str, own: bool) -> None:
    step = built(policy)
    current: list[nn.Module] = [step.model]
    replaced: list[weakref.ref[nn.Module]] = []

    def both(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = current[0](x).float()
        loss: Tensor = (model(x).float() - wanted - 1).square().mean()
        return loss

    step.loss_fn = both
    for number in range(8):
        current[0] = copy.deepcopy(step.model) if number % 2 else hs.prepare(net(), policy=step.policy)
        replaced.append(weakref.ref(current[0]))
        if own:
            both(step.model, batch()).backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
        else:
            step(batch())
    current[0] = step.model
    step(batch())
    gc.collect()
    assert not [one for one in replaced if one() is not None]


def test_statistics_of_a_model_that_stays_are_restored_after_others_are_gone() -> None:
    step = built()
    other: Any = hs.prepare(net(), policy=step.policy)
    current: list[nn.Module] = [hs.prepare(net(), policy=step.policy)]

    def all_of_them(model: nn.Module, x: Tensor) -> Tensor:
        return loss_fn(model, x) + loss_fn(other, x) * 0 + loss_fn(current[0], x) * 0

    step.loss_fn = all_of_them
    for _ in range(3):
        step(batch())
        current[0] = hs.prepare(net(), policy=step.policy)
    before = other[1].running_mean.clone()
    assert step(batch() * float("inf")).host().skipped
    assert torch.equal(other[1].running_mean, before)


def test_hooks_of_steps_monitors_and_boxes_that_are_gone_are_taken_off() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        step = hs.TrainStep(model, optimizer, loss_fn, policy="mixed", update_in_backward=True)
        step(batch())
    del step
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks
    for _ in range(5):
        monitor = hs.Monitor(model, optimizer, format="bf16", every=1)
        box = hs.BlackBox(model, loss_fn, optimizer)
        box(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert monitor.flush()
    del monitor, box
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


# ------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("policy", POLICIES)
def test_building_draws_from_no_global_generator(policy: str) -> None:
    torch.manual_seed(0)
    models = [net(), net()]
    states = torch.get_rng_state(), random.getstate()
    hs.prepare(models[0], torch.optim.AdamW(models[0].parameters()), policy=hs.Policy.of(policy, dtype="bf16"))
    step = hs.TrainStep(models[1], torch.optim.AdamW(models[1].parameters()), loss_fn, policy=policy)
    hs.Monitor(step, format="bf16")
    step(batch())
    step.evaluate(batch())
    hs.resolve(hs.Policy.of(policy), models[1])
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_bits_of_rounding_follow_from_the_seed() -> None:
    def trained(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = net()
        torch.manual_seed(seed)
        step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, policy=policy)
        for number in range(3):
            step(batch(number))
        found: Tensor = model.state_dict()["0.weight"]
        return found

    policy = hs.Policy.of("pure", dtype="bf16", master="stochastic")
    assert torch.equal(trained(1), trained(1)) and not torch.equal(trained(1), trained(2))
