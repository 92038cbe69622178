"""Devices without float64: the choice of a format, and integers in its place; `test_fake_cuda` has one that refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from halfstep.formats import widest_dtype
from halfstep.kernels.reference.exponents import TOP, _as_float64


def test_mps_and_some_xpu_devices_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {0: True, 1: False}
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda d: SimpleNamespace(has_fp64=units[d.index]))
    found = {name: widest_dtype(torch.device(name)) for name in ("cpu", "cuda", "mps", "xpu:0", "xpu:1")}
    assert [name for name, dtype in found.items() if dtype is torch.float32] == ["mps", "xpu:1"]


def test_bits_of_float64_are_made_by_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64)
    edges = torch.tensor([0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000, -(2**31)])
    x = torch.cat([bits, edges, 2 ** torch.arange(31)]).to(torch.int32).view(torch.float32)
    found, wanted = _as_float64(x), x.double().abs().view(torch.int64)
    assert torch.equal(found[~x.isnan()], wanted[~x.isnan()]) and bool((found[x.isnan()] > TOP).all())
