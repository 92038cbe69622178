"""Optimizers that skip on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.scale import GradScaler
from tests.scale.loops import OPTIMIZERS, backward, one_step, parameters


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
