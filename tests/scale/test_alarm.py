"""Floor, ceiling, static scales, patience: what happens when the scale cannot move, and what is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import ScaleRule
from halfstep.scale import GradScaler
from tests.scale import loops
from tests.scale.loops import OPTIMIZERS, one_step, parameters


def overflow(scaler: Any, optimizer: torch.optim.Optimizer, times: int) -> None:
    """Make bad steps; warnings do not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(times):
            one_step(scaler, optimizer, bad=True)


def test_torchs_scale_dies_and_takes_the_weights_along() -> None:
    """What the floor is for: 200 overflows, then one good batch."""
    weights = {}
    for make in (torch.amp.GradScaler, GradScaler):
        scaler, params = make("cpu"), parameters(1)
        optimizer = torch.optim.SGD(params, lr=0.1)
        overflow(scaler, optimizer, 200)
        one_step(scaler, optimizer)
        weights[make] = (scaler.get_scale(), bool(params[0].isfinite().all()))
    assert weights == {torch.amp.GradScaler: (0.0, False), GradScaler: (2.0**-14, True)}


def test_even_without_a_floor_a_dead_scale_skips() -> None:
    scaler, params = GradScaler(rule="torch"), parameters(1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    overflow(scaler, optimizer, 170)
    one_step(scaler, optimizer)
    assert scaler.get_scale() == 0.0 and params[0].isfinite().all() and scaler.skipped(optimizer)


def test_the_ceiling_holds() -> None:
    scaler = GradScaler("cpu", growth_interval=1)
    optimizer = torch.optim.SGD(parameters(1), lr=0.0)
    for _ in range(12):
        one_step(scaler, optimizer)
    assert scaler.get_scale() == 2.0**24


@pytest.mark.parametrize("kind", ["sgd", "sgd-fused"])
def test_at_the_floor_it_warns_once_and_names_the_parameters(kind: str) -> None:
    scaler = GradScaler("cpu", init_scale=2.0, floor=1.0)
    model = torch.nn.Linear(2, 1)
    params = list(model.parameters())
    optimizer = OPTIMIZERS[kind](params)
    scaler.name_parameters(model.named_parameters())
    one_step(scaler, optimizer, bad=True)  # reaches the floor
    with pytest.warns(UserWarning) as caught:
        one_step(scaler, optimizer, bad=True)
    assert len(caught) == 1 and caught[0].filename == loops.__file__
    text = str(caught[0].message)
    assert "the loss scale is at its floor 1.0 (now 1.0) and gradients are still not finite" in text
    assert "such steps are skipped. Not finite: bias (1 of 1 values)." in text and "lower the learning rate" in text
    start = [p.detach().clone() for p in params]
    one_step(scaler, optimizer, bad=True)  # warnings are errors here: no second one
    assert all(torch.equal(p, q) for p, q in zip(params, start, strict=True))
    one_step(scaler, optimizer)
    assert not torch.equal(params[0], start[0])


def test_good_steps_at_the_floor_say_nothing() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, floor=1.0)
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    for _ in range(3):
        one_step(scaler, optimizer)
    assert not scaler._warned


@pytest.mark.parametrize("kind", ["sgd", "sgd-fused"])
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (ScaleRule(init=1.0, floor=1.0, at_floor="raise"), "the loss scale is at its floor 1.0"),
        (ScaleRule(init=2.0, floor=1.0, at_floor="refuse"), "at its floor 1.0 (now 2.0)"),
        (ScaleRule(init=2.0**10, patience=1), "2 steps in a row had gradients that are not finite (loss scale 256.0)"),
    ],
)
def test_rules_of_peers_that_raise(kind: str, rule: ScaleRule, text: str) -> None:
    scaler = GradScaler("cpu", rule=rule)
    optimizer = OPTIMIZERS[kind](parameters(1))
    if rule.patience:
        one_step(scaler, optimizer, bad=True)
    with pytest.raises(ScaleError) as caught:
        one_step(scaler, optimizer, bad=True)
    assert text in str(caught.value) and "Not finite: param_groups[0]['params'][0]" in str(caught.value)
    one_step(scaler, optimizer)  # and training can go on
    assert not scaler.skipped(optimizer)


def test_a_static_scale_skips_and_stays() -> None:
    scaler = GradScaler("cpu", rule=ScaleRule.static(128))
    optimizer = torch.optim.SGD(parameters(1), lr=0.1)
    with pytest.warns(UserWarning, match=r"not finite under the static loss scale 128\.0.*Use a smaller static scale"):
        one_step(scaler, optimizer, bad=True)
    assert scaler.get_scale() == 128.0 and scaler.skipped(optimizer)
    for _ in range(3):
        one_step(scaler, optimizer)
    assert scaler.get_scale() == 128.0


def test_the_scale_one_is_not_to_blame() -> None:
    scaler = GradScaler("cpu", rule=ScaleRule.static(1))
    with pytest.warns(UserWarning, match=r"under the static loss scale 1\.0.*Look for inf or NaN in the batch"):
        one_step(scaler, torch.optim.SGD(parameters(1), lr=0.1), bad=True)


def test_hysteresis_forgives() -> None:
    scaler = GradScaler("cpu", hysteresis=2, growth_interval=3)
    optimizer = torch.optim.SGD(parameters(1), lr=0.0)
    scales = []
    for bad in (True, True, True, False, False, False, True, True):
        one_step(scaler, optimizer, bad=bad)
        scales.append(scaler.get_scale() / 2.0**16)
    assert scales == [1.0, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.25]


# ---------------------------------------------------------------------- gradients that were not scaled


def own_loop(policy: hs.Policy, optimizers: int = 1) -> tuple[nn.Module, list[torch.optim.Optimizer], GradScaler]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(optimizers)))
    made = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    hs.prepare(model, policy=policy)
    _, made, scaler = hs.prepare([model], made, policy=policy)
    return model, made, scaler


def backward(model: nn.Module, scaler: Any = None) -> None:
    loss = model(torch.randn(2, 4)).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("preset", ["mixed", "O2", "pure"])
def test_a_step_without_the_scaler_that_prepare_returned_warns_once(preset: str) -> None:
    model, optimizers, _ = own_loop(hs.Policy.of(preset, dtype="fp16"), 2)
    for optimizer in optimizers:
        optimizer.step()  # there are no gradients yet
    for number in range(2):
        backward(model)
        for optimizer in optimizers:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            assert len(caught) == (number == 0)
            for one in caught:
                assert one.filename == __file__ and "scaler.step(optimizer)" in str(one.message)
                assert "below 6e-08 are zero" in str(one.message) and "65536" in str(one.message)


@pytest.mark.parametrize("preset", ["mixed", "O2"])
@pytest.mark.parametrize(
    "way", ["step", "unscale", "torchs", "another", "again", "unprepared", "unscaled", "in a step"]
)
def test_no_step_warns_that_is_scaled_or_need_not_be(preset: str, way: str) -> None:
    policy = hs.Policy.of(preset, dtype="fp16")
    if way == "unscaled":
        policy = policy.replace(scale="none")
    scaler: Any
    model, (optimizer,), scaler = own_loop(policy)
    if way == "unprepared":
        hs.unprepare(model)
        scaler = None
    elif way == "trained":
        step = hs.TrainStep(model, optimizer, lambda m, x: m(x).float().square().mean(), policy=policy, clip_value=1.0)
        step(torch.randn(2, 4))
        way, scaler = "unscaled", None
    elif way == "again":
        _, _, scaler = hs.prepare(model, optimizer, policy=policy)
    elif way == "torchs":
        scaler = torch.amp.GradScaler("cpu") if preset == "mixed" else scaler  # torch's takes no low gradients
    elif way == "another":
        scaler = hs.GradScaler("cpu")
    backward(model, scaler)
    if way in {"unscale", "another"}:
        scaler.unscale_(optimizer)
    if way in {"unscale", "another", "unscaled", "unprepared"}:
        optimizer.step()
    else:
        scaler.step(optimizer)
    assert not [hook for hook in optimizer._optimizer_step_pre_hooks.values() if "Expected" in repr(hook)]


def test_bf16_expects_no_scaler() -> None:
    model, (optimizer,), _ = own_loop(hs.Policy.of("O2", dtype="bf16"))
    backward(model)
    optimizer.step()
