"""Units: which formats a device computes in, from capabilities given as data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halfstep.errors import PolicyError
from halfstep.policy.resolve import Units, cpu_units, cuda_units, default_device_types, hip_units, units

CPUS = [
    # machine, capabilities, bf16, fp16
    ("x86_64", {"avx2": True, "avx512_f": True}, False, False),
    ("x86_64", {"avx512_bf16": True, "avx512_fp16": False}, True, False),
    ("x86_64", {"amx_bf16": True}, True, False),
    ("x86_64", {"avx512_bf16": True, "avx512_fp16": True}, True, True),
    ("x86_64", {"amx_bf16": True, "amx_fp16": True}, True, True),
    ("AMD64", {"f16c": True, "l1d_cache_size": 1}, False, False),  # f16c only converts
    ("aarch64", {"fp16_arith": True, "bf16": True}, True, True),
    ("arm64", {"neon": True, "fp16_arith": True}, False, True),
    ("arm64", {"neon": True, "fp16_arith": False}, False, False),
    ("arm64", {}, False, True),
]


@pytest.mark.parametrize(("machine", "capabilities", "bf16", "fp16"), CPUS)
def test_cpu(machine: str, capabilities: dict[str, object], bf16: bool, fp16: bool) -> None:
    found = cpu_units(capabilities, machine)
    assert (found.bf16, found.fp16) == (bf16, fp16)
    assert ("no bf16 units" in found.reason, "no fp16 units" in found.reason) == (not bf16, not fp16)


@pytest.mark.parametrize(
    ("capabilities", "bf16"),
    [([(7, 0)], False), ([(7, 5)], False), ([(8, 0)], True), ([(9, 0)], True), ([(9, 0), (7, 5)], False)],
)
def test_cuda_is_as_able_as_its_oldest_gpu(capabilities: list[tuple[int, int]], bf16: bool) -> None:
    found = cuda_units(capabilities)
    assert (found.bf16, found.fp16) == (bf16, True)
    oldest = min(capabilities)
    assert f"{oldest[0]}.{oldest[1]}" in found.reason


@pytest.mark.parametrize(
    ("architectures", "bf16"),
    [
        (["gfx942:sramecc+:xnack-"], True),
        (["gfx90a", "gfx1100"], True),
        (["gfx906:sramecc+"], False),  # torch calls its compute capability (9, 0), as gfx90a's
        (["gfx1030"], False),
        (["gfx1201", "gfx1032"], False),
    ],
)
def test_amds_gpus_are_known_by_their_architecture(architectures: list[str], bf16: bool) -> None:
    found = hip_units(architectures)
    assert (found.device, found.bf16, found.fp16) == ("cuda", bf16, True)
    assert ("none for bf16" in found.reason) is not bf16 and ":" not in found.reason


def test_on_amds_gpus_torchs_compute_capability_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName="gfx906"))
    assert not units.__wrapped__("cuda").bf16


@pytest.mark.parametrize("bf16", [True, False])
def test_a_device_that_is_here_is_asked_about_bf16(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """torch_npu's function takes no arguments, torch.xpu's has one."""
    for function in (lambda: bf16, lambda including_emulation=True: bf16 and not including_emulation):
        module = SimpleNamespace(is_available=lambda: True, is_bf16_supported=function)
        monkeypatch.setattr(torch, "xpu", module)
        found = units.__wrapped__("xpu")
        assert found.bf16 is bf16 and found.reason == f"torch.xpu.is_bf16_supported() is {bf16}"


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "hpu", "mtia"])
def test_answers_for_every_device_torch_can_autocast(device: str) -> None:
    found = units(device)
    assert isinstance(found, Units)
    assert found.device == device
    assert found.reason
    assert units(device) is found, "asked once"


@pytest.mark.parametrize(("wrong", "hint"), [("gpu", ""), ("meta", ""), ("cudaa", "did you mean 'cuda'"), (3, "")])
def test_refuses_what_torch_cannot_autocast(wrong: object, hint: str) -> None:
    with pytest.raises(PolicyError, match=f"device type {wrong!r} has no torch.autocast.*{hint}"):
        units(wrong)


def test_default_device_types_end_with_the_cpu() -> None:
    found = default_device_types()
    assert found[-1] == "cpu"
    assert len(found) == (2 if torch.accelerator.is_available() else 1)
