"""Every name that works according to docs/compat_torch.md is called, and so is torch's: the two give the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from halfstep.compat import torch_amp
from tests.compat.calls import check
from tests.compat.name_table import resolve, rows
from tests.compat.torch_amp.test_page import here

Program = Callable[[Any], Any]
"""Takes the package `amp`, torch's or ours; returns plain values."""


def stepped(amp: Any) -> Any:
    """Return a scaler's numbers at the beginning, after a good step and after a bad one."""
    scaler = amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    seen = [scaler.is_enabled(), scaler.get_scale()]
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), weight.tolist()]
    return [*seen, {key: value for key, value in scaler.state_dict().items() if key in KEYS}]


def looked_into(amp: Any) -> Any:
    """Return what optimizers that take the scaler in `step` ask it for: the scale, and flags by device."""
    scaler = amp.GradScaler("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    seen = []
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        flags = scaler._check_inf_per_device(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        seen += [{str(device): float(flag) for device, flag in each.items()} for each in (flags, found)]
    return [*seen, float(scaler._get_scale_async())]


def loaded(amp: Any) -> Any:
    scaler = amp.GradScaler("cpu")
    saved = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
    scaler.load_state_dict(saved)
    scaler.scale(torch.ones(1))
    state = scaler.state_dict()
    return [scaler.get_scale(), scaler.get_growth_factor(), {key: state[key] for key in KEYS}]


def decorated(amp: Any) -> Any:
    region = amp.autocast("cpu", dtype=torch.bfloat16)
    return importlib.import_module(amp.__name__ + ".autocast_mode").autocast_decorator(region, product)()


def product() -> Any:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")

PROGRAMS: dict[str, Program] = {
    "amp.autocast_mode.autocast_decorator": decorated,
    "amp.is_autocast_available": lambda amp: [amp.is_autocast_available(device) for device in ("cpu", "meta")],
    "amp.grad_scaler.OptState": lambda amp: [
        state.name for state in importlib.import_module(amp.__name__ + ".grad_scaler").OptState
    ],
    "amp.GradScaler._check_inf_per_device": looked_into,
    "amp.GradScaler._found_inf_per_device": looked_into,
    "amp.GradScaler._get_scale_async": looked_into,
    "amp.GradScaler.get_scale": stepped,
    "amp.GradScaler.is_enabled": stepped,
    "amp.GradScaler.state_dict": stepped,
    "amp.GradScaler.load_state_dict": loaded,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_name_does_what_torchs_does(name: str) -> None:
    check(PROGRAMS[name](torch_amp), PROGRAMS[name](torch.amp))


def test_every_name_that_works_is_called() -> None:
    works = {name for row in rows("compat_torch.md") if row.verdict == "works" for name in row.names}
    functions = {name for name in works if not isinstance(resolve(torch_amp, here(name)), ModuleType)}
    assert functions == set(PROGRAMS), functions ^ set(PROGRAMS)
