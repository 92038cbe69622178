"""NativeScaler: timm's call over halfstep's scaler. Two tests need timm itself; the others its published signature."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking
from halfstep.integrations.timm import NativeScaler
from tests.examples.loading import load

POLICIES = [(name, dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")]
CALL = {
    "clip_grad": None,
    "clip_mode": "norm",
    "parameters": None,
    "create_graph": False,
    "need_update": True,
}
"""Arguments of timm 1.0's NativeScaler after loss and optimizer, with their defaults."""


def made(name: str, dtype: str, **fields: Any) -> tuple[nn.Module, torch.optim.Optimizer, hs.GradScaler]:
    """Return a prepared model, its optimizer and scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return hs.prepare(model, optimizer, policy=hs.Policy.of(name, dtype=dtype, **fields))


def losses(model: nn.Module, count: int = 4, *, bad: int | None = None) -> Any:
    """Iterate over losses of `count` batches; that of index `bad` is not finite."""
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        x = torch.randn(6, 4, generator=generator)
        if i == bad:
            x[0, 0] = torch.inf
        yield F.cross_entropy(model(x), torch.arange(6) % 3)


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same fp32 weights, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def value(parameters: Any, limit: float) -> None:
    """Clip values."""
    nn.utils.clip_grad_value_(parameters, limit)


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
@pytest.mark.parametrize(("mode", "clip"), [("norm", nn.utils.clip_grad_norm_), ("value", value), ("none", None)])
def test_the_bits_are_those_of_a_loop_by_hand(
    name: str, dtype: str, mode: str, clip: Callable[..., Any] | None
) -> None:
    model, optimizer, scaler = made(name, dtype)
    scaler = checking(scaler)
    for i, loss in enumerate(losses(model, 5)):
        scaler.scale(loss).backward()
        if i % 2 == 0:
            if clip is not None:
                scaler.unscale_(optimizer)
                clip(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    other, optimizer, scaler = made(name, dtype)
    loss_scaler = NativeScaler(scaler)
    options: dict[str, Any] = {} if clip is None else {"clip_grad": 0.05, "clip_mode": mode}
    for i, loss in enumerate(losses(other, 5)):
        if clip is not None:
            options["parameters"] = other.parameters()  # a generator, as timm's model_parameters returns
        loss_scaler(loss, optimizer, **options, need_update=i % 2 == 0)
        if i % 2 == 0:
            optimizer.zero_grad()
    assert equal(model, other) and not loss_scaler.skipped


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
def test_a_skipped_step_changes_nothing_and_is_reported(
    name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, scaler = made(name, dtype)
    loss_scaler = NativeScaler(scaler)
    seen: list[tuple[bool, bool]] = []
    for loss in losses(model, 3, bad=1):
        before = copy.deepcopy(model)
        with caplog.at_level(logging.WARNING, "halfstep"):
            if dtype == "bf16" and len(seen) == 1:
                with pytest.warns(UserWarning, match=r"static loss scale 1\.0.*Look for inf or NaN in the batch"):
                    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            else:
                loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        seen.append((loss_scaler.skipped, equal(before, model)))
    assert seen == [(False, False), (True, True), (False, False)]
    assert caplog.text.count("AdamW: step skipped, gradients are not finite: 0.weight (") == 1


def test_factors_are_clipped_by_timm() -> None:
    pytest.importorskip("timm")
    model, optimizer, scaler = made("O2", "fp16")
    before = [p.detach().float().norm(dim=-1) for p in model.parameters()]
    loss_scaler = NativeScaler(scaler)
    loss_scaler(next(losses(model)), optimizer, clip_grad=0.01, clip_mode="agc", parameters=model.parameters())
    for p, norms in zip(model.parameters(), before, strict=True):
        assert p.grad is not None and p.grad.dtype is torch.float32
        assert (p.grad.norm(dim=-1) <= 0.0101 * norms.clamp(min=1e-3)).all()


def test_state_is_saved_under_timms_key_and_torchs_is_loaded() -> None:
    model, optimizer, scaler = made("mixed", "fp16")
    loss_scaler = NativeScaler(scaler)
    for loss in losses(model, 2, bad=1):
        loss_scaler(loss, optimizer)
    checkpoint = {loss_scaler.state_dict_key: loss_scaler.state_dict()}
    assert checkpoint["amp_scaler"]["scale"] == 2.0**15
    other = NativeScaler(made("mixed", "fp16")[2])
    other.load_state_dict(checkpoint["amp_scaler"])
    assert other.state_dict() == loss_scaler.state_dict()
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0)
    other.load_state_dict(torchs.state_dict())
    assert other.scaler.get_scale() == 64.0


def test_a_graph_of_gradients_is_made_where_it_is_wanted() -> None:
    model, optimizer, scaler = made("mixed", "bf16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True")  # of torch, once a process
        NativeScaler(scaler)(next(losses(model)), optimizer, create_graph=True, need_update=False)
    assert all(p.grad is not None and p.grad.requires_grad for p in model.parameters())
    optimizer.zero_grad()


def test_errors_name_what_is_wrong_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IntegrationError, match=r"scaler='cuda'; expected the scaler of model, optimizer, scaler = "):
        NativeScaler("cuda")  # type: ignore[arg-type]  # timm's argument
    model, optimizer, scaler = made("O2", "bf16")
    loss_scaler = NativeScaler(scaler)
    with pytest.raises(IntegrationError, match="parameters=None"):
        loss_scaler(next(losses(model)), optimizer, clip_grad=1.0)
    with pytest.raises(IntegrationError, match="clip_mode='norms'"):
        loss_scaler(next(losses(model)), optimizer, clip_grad=1.0, clip_mode="norms", parameters=model.parameters())
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(IntegrationError, match=r"timm 0\.9\.16 or newer is needed and is not installed: pip install"):
        loss_scaler(next(losses(model)), optimizer, clip_grad=1.0, clip_mode="agc", parameters=model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_signature_is_timms() -> None:
    mine = inspect.signature(NativeScaler.__call__).parameters
    assert list(mine)[:3] == ["self", "loss", "optimizer"]
    assert {name: p.default for name, p in list(mine.items())[3:]} == CALL
    assert NativeScaler.state_dict_key == "amp_scaler"


def test_the_signature_is_that_of_the_timm_that_is_installed() -> None:
    timm = pytest.importorskip("timm")
    theirs = inspect.signature(timm.utils.NativeScaler.__call__).parameters
    mine = inspect.signature(NativeScaler.__call__).parameters
    assert [(n, p.default, p.kind) for n, p in theirs.items()] == [(n, p.default, p.kind) for n, p in mine.items()]
    assert timm.utils.NativeScaler.state_dict_key == NativeScaler.state_dict_key


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_the_bits_are_those_of_timm(mode: str) -> None:
    timm = pytest.importorskip("timm")
    if "device" not in inspect.signature(timm.utils.NativeScaler).parameters:
        pytest.skip("this version of timm scales on CUDA only")

    def run(kind: Callable[[hs.GradScaler], Any]) -> nn.Module:
        model, optimizer, scaler = made("mixed", "fp16")
        loss_scaler = kind(scaler)
        for loss in losses(model, 3):
            loss_scaler(loss, optimizer, clip_grad=0.01, clip_mode=mode, parameters=model.parameters())
            optimizer.zero_grad()
        return model

    assert equal(run(NativeScaler), run(lambda scaler: timm.utils.NativeScaler(device="cpu")))


# ------------------------------------------------------------------ the example


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
def test_the_example_trains_within_the_noise_of_fp32(name: str, dtype: str) -> None:
    seeds = _fp32()
    loss = load("frameworks/timm_loop").train(hs.Policy.of(name, dtype=dtype))
    assert abs(loss - seeds[0]) <= max(seeds) - min(seeds)


_SEEDS: list[float] = []


def _fp32() -> list[float]:
    """Return the losses of four runs in fp32 that differ in their seed."""
    if not _SEEDS:
        _SEEDS.extend(load("frameworks/timm_loop").train("O0", seed=seed) for seed in range(4))
    return _SEEDS
