"""megengine.amp.GradScaler: the scale's trajectory, what happens to gradients, and wrong orders of calls."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
import halfstep.compat.megengine as mge
import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp
from halfstep.compat.megengine.amp import GradScaler
from halfstep.compat.megengine.autodiff import GradManager
from halfstep.compat.megengine.optimizer import SGD, Adam
from halfstep.errors import ScaleError, StepError
from tests.compat.megengine.model import Model

SEQUENCES = 2000


def parameter(*numbers: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(numbers))


def given(tensor: Tensor, *numbers: float) -> None:
    tensor.grad = torch.tensor(numbers)


# ---------------------------------------------------------------------- the scale, against a model of the rules


def numbers(draw: random.Random) -> dict[str, Any]:
    """Draw the four numbers, with zeros and factors that are no powers of two."""
    return {
        "init_scale": draw.choice([16.0, 1.0, 2.0**20, draw.uniform(0.1, 1e4)]),
        "growth_factor": draw.choice([2.0, 2.0, 1.0, 4, draw.uniform(1.0, 3.0), 0]),
        "backoff_factor": draw.choice([0.5, 0.5, 1.0, draw.uniform(0.2, 1.0)]),
        "growth_interval": draw.choice([1, 2, 3, 5, 2000, 0]),
    }


def run(draw: random.Random, make: type[Model] = Model) -> list[str]:
    """Drive a scaler and the model with the same random calls; return what differed, with the calls so far."""
    chosen = numbers(draw)
    scaler = GradScaler(**chosen)
    model = make(chosen["init_scale"], *list(chosen.values())[1:])
    first, second, unused = parameter(0.0, 0.0), parameter(0.0), parameter(0.0)
    log: list[str] = [repr(chosen)]
    bias = draw.random()
    for _ in range(draw.randint(1, 12)):
        for tensors in draw.choice([([first, second],), ([first], [second]), ([first, second, unused],), ([],)]):
            bad = draw.random() < bias
            for tensor in tensors:
                if tensor is not unused:
                    value = draw.choice([math.inf, -math.inf, math.nan]) if bad else draw.uniform(-8, 8)
                    given(tensor, *([value] + [1.0] * (tensor.numel() - 1)))
                    bad = bad and draw.random() < 0.5
            want = model.unscale([None if t.grad is None else t.grad.double().tolist() for t in tensors])
            log.append(f"unscale({[None if t.grad is None else t.grad.tolist() for t in tensors]})")
            assert scaler.unscale(tensors) is scaler
            for tensor, expected in zip(tensors, want, strict=True):
                if (tensor.grad is None) != (expected is None):
                    return [*log, f"gradient {tensor.grad} instead of {expected}"]
                if expected is not None and tensor.grad is not None:
                    if not all(
                        math.isclose(*pair, rel_tol=3e-7) for pair in zip(tensor.grad.tolist(), expected, strict=True)
                    ):
                        return [*log, f"gradient {tensor.grad.tolist()} instead of {expected}"]
        if scaler.found_non_finite != model.found:
            return [*log, f"found {scaler.found_non_finite} instead of {model.found}"]
        step = draw.choice(["update", "update", "update", "new", "set", "interval", "copy", "state"])
        log.append(step)
        if step == "new" and model.moves:
            value = draw.uniform(0.5, 4096)
            scaler.update(value)
            model.update(value)
        else:
            if step == "set":
                scaler.scale_factor = model.scale_factor = draw.choice([8.0, 3.3])
            elif step == "interval":
                interval = draw.choice([1, 2, 4])
                scaler.growth_interval = model.growth_interval = interval
                model.tracker = min(model.tracker, interval - 1)  # growing late is growing at the next good step
            scaler.update()
            model.update()
            if step == "copy":
                scaler = copy.deepcopy(scaler)
            elif step == "state":
                fresh = GradScaler()
                fresh.load_state_dict(scaler.state_dict())
                scaler = fresh
        state = scaler.state_dict()
        if scaler.scale_factor != model.scale_factor or (model.moves and state["_growth_tracker"] != model.tracker):
            return [*log, f"{state} instead of {model}"]
        first.grad = second.grad = None
    return []


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.hours)], ids=["a quarter", "all"])
def test_the_scale_moves_as_megengines_for_any_numbers_and_any_overflows(share: int) -> None:
    for seed in range(SEQUENCES // share):
        assert not (difference := run(random.Random(seed))), (seed, difference)


class Hasty(Model):
    """A seeded fault: a bad step does not start the count anew."""

    def update(self, new_scale: float | None = None) -> None:
        tracker, found = self.tracker, self.found
        super().update(new_scale)
        if found and new_scale is None:
            self.tracker = tracker


class Late(Model):
    """A seeded fault: grows one step late."""

    def update(self, new_scale: float | None = None) -> None:
        self.growth_interval += 1 if self.moves else 0
        super().update(new_scale)
        self.growth_interval -= 1 if self.moves else 0


@pytest.mark.parametrize("fault", [Hasty, Late])
def test_a_fault_in_the_model_is_seen(fault: type[Model]) -> None:
    assert any(run(random.Random(seed), fault) for seed in range(50))


@pytest.mark.parametrize(
    ("numbers", "bad", "scales"),
    [  # measured in MegEngine 1.13.0
        ((2.0**10, 3), (3, 4, 8), (1024, 1024, 2048, 1024, 512, 512, 512, 1024, 512, 512, 512, 1024, 1024, 1024)),
        ((2.0**30, 2000), range(12), [2.0**30 / 2**n for n in range(1, 13)] + [2.0**18] * 2),
    ],
)
def test_the_trajectories_of_real_runs(numbers: tuple[float, int], bad: Any, scales: Any) -> None:
    weight, found = parameter(1.0), []
    gm, scaler = GradManager().attach(weight), GradScaler(numbers[0], growth_interval=numbers[1])
    for step in range(14):
        with gm:
            scaler.backward(gm, (weight * (math.inf if step in bad else 1.0)).sum())
        assert (weight.grad is None) == (step in bad)
        weight.grad = None
        found.append(scaler.scale_factor)
    assert found == list(scales)


# ---------------------------------------------------------------------- a step


def setup() -> tuple[nn.Module, GradManager, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return net, GradManager().attach(net.parameters()), torch.randn(8, 2, 6, 6)


def train(*, manual: bool, bad: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], list[float]]:
    """Train for 8 steps by one of the document's two transmissions; return the state and the scales."""
    net, gm, x = setup()
    opt, scaler, scales = Adam(net.parameters(), lr=0.01), GradScaler(2.0**10, growth_interval=3), []
    for step in range(8):
        batch = x * math.inf if step in bad else x + step
        with amp.autocast(), gm:
            loss = F.nn.cross_entropy(net(batch), mge.tensor([step % 3] * 8))
            if manual:
                gm.backward(loss, dy=mge.tensor(scaler.scale_factor))
            else:
                scaler.backward(gm, loss)
        if manual:
            scaler.unscale(gm.attached_tensors())
            scaler.update()
        opt.step().clear_grad()
        scales.append(scaler.scale_factor)
    return net.state_dict(), scales


@pytest.mark.parametrize("bad", [(), (3, 4, 6)])
def test_both_transmissions_give_the_same_bits(bad: tuple[int, ...]) -> None:
    (automatic, scales), (manual, others) = train(manual=False, bad=bad), train(manual=True, bad=bad)
    assert scales == others
    assert automatic.keys() == manual.keys()
    for name, value in automatic.items():
        assert torch.equal(value, manual[name]) and bool(value.isfinite().all()), name


@pytest.mark.parametrize("manual", [False, True])
def test_a_bad_step_leaves_no_trace_in_parameters_optimizer_and_statistics(manual: bool) -> None:
    net, gm, x = setup()
    opt, scaler = Adam(net.parameters(), lr=0.01), GradScaler()
    for batch in (x, x * math.inf):
        before = copy.deepcopy((net.state_dict(), opt.state_dict()))
        with amp.autocast(), gm:
            loss = F.nn.cross_entropy(net(batch), mge.tensor([0] * 8))
            if manual:
                gm.backward(loss, mge.tensor(scaler.scale_factor))
            else:
                scaler.backward(gm, loss, update_scale=False)
        if manual:
            scaler.unscale(gm.attached_tensors())
        assert scaler.found_non_finite == (batch is not x)
        assert all((p.grad is None) == (batch is not x) for p in net.parameters())
        scaler.update()
        opt.step().clear_grad()
    torch.testing.assert_close((net.state_dict(), opt.state_dict()), before, rtol=0, atol=0)
    assert scaler.scale_factor == 8.0


def test_statistics_of_good_steps_count() -> None:
    net, gm, x = setup()
    scaler, norm = GradScaler(), net[1]  # type: ignore[index]
    for step in range(3):
        with gm:
            scaler.backward(gm, net(x).sum())
        for p in net.parameters():
            p.grad = None
        assert norm.num_batches_tracked == step + 1


def test_a_window_with_one_bad_micro_batch_is_dropped_as_a_whole() -> None:
    weight = parameter(1.0)
    gm, scaler = GradManager().attach(weight), GradScaler(growth_interval=1)
    for factors, kept in (((1.0, 2.0, 3.0), [6.0]), ((1.0, math.inf, 3.0), None)):
        for number, factor in enumerate(factors):
            with gm:
                scaler.backward(gm, (weight * factor).sum(), unscale_grad=number == 2)
        assert kept is None if weight.grad is None else weight.grad.tolist() == kept
        weight.grad = None
    assert scaler.scale_factor == 16.0


def test_dy_and_lists_are_scaled() -> None:
    weight = parameter(1.0, 2.0)
    gm, scaler = GradManager().attach(weight), GradScaler()
    with gm:
        scaler.backward(gm, [weight * 2, weight.sum()], [torch.tensor([1.0, 5.0]), torch.tensor(10.0)])
    assert weight.grad is not None and weight.grad.tolist() == [12.0, 20.0]
    weight.grad = None
    seen: list[float] = []

    def note(tensor: Tensor, gradient: Tensor) -> Tensor:
        seen.append(gradient[0].item())
        return gradient

    gm.attach(weight, callbacks=note)
    with gm:
        scaler.backward(gm, weight.sum())
    assert seen == [16.0]  # callbacks see scaled gradients, as for a sum over processes


def test_callers_of_unscale_may_pass_generators_nones_and_tensors_without_gradients() -> None:
    weight, unused = parameter(1.0), parameter(1.0)
    for value in (16.0, math.inf):
        scaler = GradScaler()
        given(weight, value)
        scaler.unscale(tensor for tensor in (weight, None, unused))
        assert (weight.grad is None) == (value == math.inf) == scaler.found_non_finite
        weight.grad = None


def test_low_gradients_are_unscaled_too() -> None:
    weight = nn.Parameter(torch.ones(2).half())
    for value in (32.0, math.inf):
        scaler = GradScaler()
        weight.grad = torch.tensor([value, 16.0]).half()
        scaler.unscale([weight])
        assert weight.grad is None if value == math.inf else weight.grad.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("zeros", [{"growth_interval": 0}, {"growth_factor": 0}])
def test_zeros_make_a_scale_that_stays_and_still_drops_bad_steps(zeros: dict[str, Any]) -> None:
    weight, scaler = parameter(1.0), GradScaler(**zeros)
    for value, kept in ((16.0, True), (math.nan, False), (16.0, True)):
        given(weight, value)
        scaler.unscale([weight]).update()
        assert (weight.grad is not None) == kept and scaler.scale_factor == 16.0
        weight.grad = None
    with pytest.warns(UserWarning, match=r"update\(new_scale=4\) does nothing.*set scaler.scale_factor"):
        scaler.update(4)
    scaler.scale_factor = 4
    assert scaler.scale_factor == 4.0
    assert scaler.state_dict()["growth_interval"] == zeros.get("growth_interval", 2000)


# ---------------------------------------------------------------------- wrong orders and wrong numbers


def test_unscaling_twice_is_refused() -> None:
    weight, scaler = parameter(1.0), GradScaler()
    given(weight, 16.0)
    scaler.unscale([weight])
    with pytest.raises(ScaleError, match=r"shape \(1,\) has been unscaled already.*once for each step"):
        scaler.unscale([weight])
    assert weight.grad is not None and weight.grad.item() == 1.0


def test_going_backward_onto_unscaled_gradients_is_refused() -> None:
    weight = parameter(1.0)
    gm, scaler = GradManager().attach(weight), GradScaler()
    with gm:
        scaler.backward(gm, weight.sum())
    with gm, pytest.raises(ScaleError, match="clear_grad.*unscale_grad=False"):
        scaler.backward(gm, weight.sum())
    with gm:
        gm.backward(weight.sum(), torch.tensor(16.0))
    with pytest.raises(ScaleError, match="unscaled already"):
        scaler.unscale([weight])
    SGD([weight], lr=1.0).clear_grad()
    with gm:
        scaler.backward(gm, weight.sum())
    assert weight.grad is not None and weight.grad.item() == 1.0


def test_a_step_with_scaled_gradients_is_refused() -> None:
    weight = parameter(1.0)
    gm, scaler, opt = GradManager().attach(weight), GradScaler(), SGD([weight], lr=1.0)
    with gm:
        scaler.backward(gm, weight.sum(), unscale_grad=False)
    with pytest.raises(ScaleError, match=r"still scaled.*scaler.unscale\(gm.attached_tensors\(\)\)"):
        opt.step()
    scaler.unscale([weight])
    assert opt.step().clear_grad() is opt and weight.tolist() == [0.0]


def test_an_update_without_unscaling_is_explained() -> None:
    scaler = GradScaler()
    for _ in range(2):
        with pytest.raises(ScaleError, match=r"scaler.unscale\(gm.attached_tensors\(\)\) first"):
            scaler.update()
        scaler.unscale([]).update()


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0}, {"init_scale": -1.0}, {"init_scale": math.inf}, {"init_scale": "16"},
        {"growth_factor": 0.5}, {"growth_factor": -2.0}, {"backoff_factor": 0.0}, {"backoff_factor": 2.0},
        {"growth_interval": -1}, {"growth_interval": 2.5},
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused_and_change_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScaleError, match="must be .* and is|give a positive scale"):
        GradScaler(**wrong)
    scaler = GradScaler()
    (name, value), state = next(iter(wrong.items())), scaler.state_dict()
    with pytest.raises(ScaleError):
        setattr(scaler, "scale_factor" if name == "init_scale" else name, value)
    assert scaler.state_dict() == state


def test_update_scale_is_one_of_three() -> None:
    with pytest.raises(ScaleError, match="'if_unscale_grad'"):
        GradScaler().backward(GradManager(), None, update_scale="always")  # type: ignore[arg-type]


def test_checkpoints_have_megengines_keys() -> None:
    scaler = GradScaler(growth_interval=7)
    scaler.unscale([]).update()
    state = scaler.state_dict()
    assert state == {
        "scale_factor": 16.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 1,
    }  # fmt: skip
    other = GradScaler(4.0)
    with pytest.raises(ScaleError, match="'_growth_tracker' missing"):
        other.load_state_dict({k: v for k, v in state.items() if k != "_growth_tracker"})
    with pytest.raises(ScaleError, match="growth"):
        other.load_state_dict({**state, "growth_factor": -1})
    assert other.scale_factor == 4.0
    other.load_state_dict(state)
    assert other.state_dict() == state and "growth_interval=7" in repr(other)


def test_the_scaler_is_halfsteps_under_a_preset() -> None:
    core = GradScaler()._core
    assert type(core) is hs.GradScaler and core.rule == hs.GradScaler(rule="megengine").rule


@pytest.mark.parametrize("how", ["set", "update", "load", "another manager's overflow"])
@pytest.mark.parametrize("last", ["backward", "unscale"])
def test_gradients_that_wait_to_be_unscaled_follow_when_the_scale_moves(how: str, last: str) -> None:
    x, other, scaler = parameter(3.0), parameter(1.0), GradScaler(init_scale=1024.0)
    gm, gm_other = GradManager().attach(x), GradManager().attach(other)
    with gm:
        scaler.backward(gm, x * x, unscale_grad=False)
    if how == "set":
        scaler.scale_factor = 16.0
    elif how == "update":
        scaler.update(48.0)
    elif how == "load":
        scaler.load_state_dict(GradScaler(init_scale=2.0).state_dict())
    else:
        with gm_other:
            scaler.backward(gm_other, other * math.inf)
        assert scaler.scale_factor == 512.0
    if last == "backward":
        with gm:
            scaler.backward(gm, x * x)
    else:
        scaler.unscale(gm.attached_tensors())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([12.0 if last == "backward" else 6.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("first", ["plain", "scaled"])
def test_scaled_and_plain_gradients_are_never_added(first: str) -> None:
    x, scaler = parameter(3.0), GradScaler(init_scale=1024.0)
    gm = GradManager().attach(x)
    with gm:
        if first == "plain":
            gm.backward(x * x)
        else:
            scaler.backward(gm, x * x, unscale_grad=False)
    assert x.grad is not None
    before = x.grad.clone()
    with pytest.raises(
        (ScaleError, StepError), match="was never scaled" if first == "plain" else "waits to be unscaled"
    ):
        with gm:
            if first == "plain":
                scaler.backward(gm, x * x, unscale_grad=False)
            else:
                gm.backward(x * x)
    assert torch.equal(x.grad, before)
