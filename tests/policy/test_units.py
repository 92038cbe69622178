"""Units: which formats a device computes in, from capabilities given as data."""

from __future__ import annotations

import pytest
import torch

from halfstep.errors import PolicyError
from halfstep.policy.resolve import Units, cpu_units, cuda_units, default_device_types, units

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
