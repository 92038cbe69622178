"""Optimizers that take scale and flag themselves: torch's fused form, when it is left, and torch's older protocol."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.scale import GradScaler
from halfstep.scale.fused import keep_working_form, takes_scaler, use_working_form
from tests.scale.loops import INF, OPTIMIZERS, backward, one_step, parameters


@pytest.mark.parametrize("unscale", [False, True])
def test_a_preset_grad_scale_is_honoured_and_used_up(unscale: bool) -> None:
    runs = []
    for make in (torch.amp.GradScaler, GradScaler):
        scaler, params = make("cpu", init_scale=16.0), parameters()
        optimizer = OPTIMIZERS["sgd-fused"](params)
        backward(scaler, params)
        if unscale:
            scaler.unscale_(optimizer)
        optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        runs.append([p.tolist() for p in params])
    assert runs[0] == runs[1]


def test_attributes_are_put_back_when_step_raises() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = OPTIMIZERS["sgd-fused"](params)
    seen: list[Any] = []

    def hook(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append((opt.grad_scale.item(), opt.found_inf.item()))
        raise KeyError("hook")

    handle = optimizer.register_step_pre_hook(hook)
    preset = optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    backward(scaler, params)
    for _ in range(2):  # and it can be tried again
        with pytest.raises(KeyError):
            scaler.step(optimizer)
        assert vars(optimizer)["grad_scale"] is preset and "found_inf" not in vars(optimizer)
    assert seen == [(2.0**17, 0.0)] * 2
    handle.remove()
    scaler.step(optimizer)
    assert "grad_scale" not in vars(optimizer) and "found_inf" not in vars(optimizer)


def test_a_step_that_raises_can_be_repeated() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = OPTIMIZERS["sgd"](params)

    def hook(*_: Any) -> None:
        raise KeyError("hook")

    handle = optimizer.register_step_pre_hook(hook)
    backward(scaler, params)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    handle.remove()
    scaler.step(optimizer)
    scaler.update()

    other = parameters()
    plain = OPTIMIZERS["sgd"](other)
    backward(GradScaler(enabled=False), other)
    plain.step()
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))  # 2**16 is a power of two: exact


def test_a_skipped_first_step_leaves_fused_momentum_alone() -> None:
    """Torch calls the kernel, which leaves the momentum it has just allocated unfilled."""
    scaler: Any
    for make in (torch.amp.GradScaler, GradScaler):
        scaler, params = make("cpu"), parameters()
        optimizer = OPTIMIZERS["sgd-fused"](params)
        one_step(scaler, optimizer, bad=True)
        assert bool(optimizer.state) is (make is torch.amp.GradScaler)
    one_step(scaler, optimizer)
    reads = scaler.host_reads
    one_step(scaler, optimizer, bad=True)
    assert scaler.host_reads == reads == 2  # from the first good step on nothing is read
    one_step(scaler, optimizer)

    fresh, other = GradScaler("cpu"), parameters()
    same = OPTIMIZERS["sgd-fused"](other)
    for _ in range(2):
        one_step(fresh, same)
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def trained(front_end: str, dtype: torch.dtype, fused: bool, momentum: float) -> Tensor:
    """Return the weight of a model in `dtype` after three steps of a user's SGD."""
    torch.manual_seed(0)
    model, x = nn.Linear(24, 24).to(dtype), torch.randn(8, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum, fused=fused or None)
    policy: Any = hs.Policy.of("O3", dtype="fp16" if dtype is torch.float16 else "bf16")
    if front_end == "TrainStep":
        step = hs.TrainStep(model, optimizer, loss_of, policy=policy)
        for _ in range(3):
            step(x)
        return model.weight.detach().float()
    scaler: Any = torch_amp.GradScaler("cpu", init_scale=4.0, enabled=front_end != "disabled scaler")
    if front_end == "prepare":
        hs.prepare(model, optimizer, policy=policy)
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [
            {**group, "fused": fused or None} for group in optimizer.state_dict()["param_groups"]
        ]})  # fmt: skip
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, x if front_end == "prepare" else x.to(dtype))
        if front_end == "prepare":
            torch.autograd.backward(loss)
            optimizer.step()
        else:
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
    return model.weight.detach().float()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("front_end", ["TrainStep", "prepare", "scaler", "disabled scaler"])
def test_a_users_fused_sgd_moves_low_parameters(front_end: str, dtype: torch.dtype, momentum: float) -> None:
    fused, usual = (trained(front_end, dtype, choice, momentum) for choice in (True, False))
    assert torch.equal(fused, usual)


def test_precise_weights_keep_the_form_of_their_optimizer() -> None:
    model = nn.Linear(24, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
    assert optimizer.param_groups[0]["fused"] and not use_working_form(optimizer)


def test_only_groups_that_need_it_change() -> None:
    wide, low = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([{"params": [wide]}, {"params": [low]}], lr=0.5, fused=True)
    assert use_working_form(optimizer) and [group["fused"] for group in optimizer.param_groups] == [True, None]
    assert not use_working_form(optimizer) and not use_working_form(torch.optim.RMSprop([low]))
    adam = torch.optim.Adam([low], fused=True)
    keep_working_form(adam, [low])
    assert adam.param_groups[0]["fused"] is True


def test_a_parameter_with_gaps_is_stepped_right() -> None:
    """Under the front-end that would choose the fused form by itself, and under one where the user did."""
    starts = torch.linspace(-1.0, 1.0, 48).reshape(4, 12)

    def weights(**form: Any) -> Tensor:
        model: Any = nn.Module()
        model.weight = nn.Parameter(starts.clone()[:, ::2])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **form)

        def loss(m: Any, x: Tensor) -> Tensor:
            total: Tensor = (m.weight * x).square().sum()
            return total

        step = hs.TrainStep(model, optimizer, loss, policy="O0")
        for _ in range(3):
            step(torch.arange(24.0).reshape(4, 6))
        result: Tensor = model.weight.detach()
        return result

    usual = weights(foreach=False)
    assert torch.allclose(weights(), usual, atol=1e-6) and torch.allclose(weights(fused=True), usual, atol=1e-6)


class Unscales(torch.optim.Optimizer):
    """Unscales through the scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


class Checks(Unscales):
    """Reads scale and flag, as Apex's capturable optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        factor = torch.ones(())
        if grad_scaler is not None:
            assert grad_scaler._found_inf_per_device(self) == {}
            found = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
            factor = (1 - found) / grad_scaler._get_scale_async()
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.nan_to_num(p.grad, 0.0, 0.0, 0.0) * factor)


class ReadsScale(Unscales):
    """Reads the scale only."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        scale = 1.0 if grad_scaler is None else grad_scaler.get_scale()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / scale)


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("kind", [Unscales, Checks])
def test_it_steps_as_under_torch(kind: type[Unscales], make: Any) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer, scaler = kind([p]), make("cpu", init_scale=1024.0)
    for factor in (1.0, INF if kind is Checks else 1.0, 1.0):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(p.sum() * factor))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch announces the end of the protocol
            scaler.step(optimizer)
        scaler.update()
    assert p.tolist() == ([-2.0, -2.0] if kind is Checks else [-3.0, -3.0])
    assert scaler.get_scale() == (512.0 if kind is Checks else 1024.0)


def test_the_scale_answers_one_that_asks_for_no_verdict() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer, scaler = ReadsScale([p]), GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    assert scaler._get_scale_async() is None
    torch.autograd.backward(scaler.scale(p.sum()))
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0] and not scaler.skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    optimizer.zero_grad()
    assert scaler.step(optimizer) is None  # no gradients: not called


def test_gradients_that_come_after_unscale_are_unscaled_for_it() -> None:
    p, q = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer, scaler = ReadsScale([p, q]), GradScaler("cpu", init_scale=1024.0)
    torch.autograd.backward(scaler.scale(p.sum()))
    scaler.unscale_(optimizer)
    torch.autograd.backward(scaler.scale(q.sum()))
    scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1 / 1024] * 2  # it divides by the scale itself, always


@pytest.mark.parametrize("kind", [Unscales, Checks, ReadsScale])
def test_inside_a_step_it_gets_unscaled_gradients(kind: type[Unscales]) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    policy = hs.Policy.of("O0", scale=1024.0)
    step = hs.TrainStep(model, kind(model.parameters()), lambda m, x: m(x).sum(), policy=policy)
    step(torch.ones(1, 2))
    assert model.weight.tolist() == [[-1.0, -1.0]]


def test_who_takes_the_scaler() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    assert takes_scaler(Unscales(p))
    others = (torch.optim.SGD(p, lr=1.0), torch.optim.Adam(p, fused=True), hs.Lion(p, lr=0.1))
    assert not any(map(takes_scaler, others))
