"""What is asked of devices, answered by modules as torch has them for devices that are not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfstep import accelerators
from halfstep.step.parts import record
from halfstep.torch_private.fake import FakeTensorMode

COPIES = accelerators.copies_behind_events.__wrapped__  # without its cache
GENERATORS = (torch.Generator(), torch.Generator())


def become(monkeypatch: pytest.MonkeyPatch, device_type: str, **functions: Any) -> None:
    """Let a device be the accelerator, with a module of `functions`."""
    module = SimpleNamespace(**functions)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(device_type)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert (accelerators.type_here(), accelerators.default_generators()) == ("", ())


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_generators_are_those_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    become(monkeypatch, device_type, is_initialized=lambda: True, default_generators=GENERATORS)
    assert accelerators.default_generators() == GENERATORS and accelerators.type_here() == device_type
    become(monkeypatch, device_type, is_initialized=lambda: False, default_generators=GENERATORS)
    assert accelerators.default_generators() == ()


def test_apples_has_one_generator_and_no_copies_behind_events(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, "mps", _get_default_mps_generator=lambda: GENERATORS[0], Event=object)
    assert accelerators.default_generators() == GENERATORS[:1]
    assert not COPIES("mps")


@pytest.mark.parametrize(("functions", "expected"), [({"Event": object, "current_stream": object}, True), ({}, False)])
def test_copies_need_events(monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any], expected: bool) -> None:
    become(monkeypatch, "xpu", **functions)
    assert COPIES("xpu") is expected


def test_a_module_without_a_function_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, "xpu")
    accelerators.empty_cache("xpu")
    accelerators.initialise("xpu")
    called: list[str] = []
    become(monkeypatch, "xpu", empty_cache=lambda: called.append("cache"), init=lambda: called.append("init"))
    accelerators.empty_cache("xpu")
    accelerators.initialise("xpu")
    assert called == ["cache", "init"]


def test_no_device_but_cuda_captures() -> None:
    assert not accelerators.capturing("cpu") and not accelerators.capturing("npu")


def test_types_are_torchs_and_the_one_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerators.types() == accelerators.TYPES
    monkeypatch.setattr(accelerators, "get_privateuse1_backend_name", lambda: "npu")
    assert accelerators.types() == (*accelerators.TYPES, "npu")


class Event:
    """An event that belongs to the device it was recorded on first, as one of CUDA."""

    def __init__(self) -> None:
        self.device: Any = None

    def record(self, stream: torch.device) -> None:
        assert self.device in {None, stream}, "the event's device does not match the stream's"
        self.device = stream

    def query(self) -> bool:
        return True


def test_flags_land_from_the_device_they_are_on_and_from_another_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, "cuda", Event=Event, current_stream=lambda device: device)
    monkeypatch.setattr(accelerators, "capturing", lambda device_type: False)
    landing = accelerators.Landing()
    with FakeTensorMode():
        for device in ("cuda:1", "cuda:1", "cuda:0"):
            landing.send([torch.zeros((), device=device)])
            assert landing.there() and landing._event.device == torch.device(device)


def test_states_of_a_replay_are_those_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the second device draws from its generator while the first one is current."""
    own = tuple(torch.Generator().manual_seed(seed) for seed in (1, 2))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(record, "default_generators", lambda: own)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    states = record.random_states()
    assert set(states) == {"cpu", "xpu:0", "xpu:1"}
    drawn = [torch.rand(3, generator=one) for one in own]
    record.put_random(states | {"xpu:2": states["cpu"]})  # evidence of a machine with more devices
    assert all(torch.equal(torch.rand(3, generator=one), was) for one, was in zip(own, drawn, strict=True))
