"""Which tensors the tail's operators take, and what is said of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels import choose, ops
from halfstep.kernels.choose import load_kernels, norms_for
from halfstep.kernels.reference import operators as reference

REASON = load_kernels("cpu")
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

HALF = torch.float16


def test_dense_parameters_of_one_device_can_be_updated_where_there_are_kernels() -> None:
    dense = [
        torch.ones(3, 4).T,
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones((), dtype=HALF),
    ]
    assert choose.cannot_update(dense) == load_kernels("cpu")
    assert choose.cannot_update([nn.Parameter(tensor) for tensor in dense]) == load_kernels("cpu")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (torch.ones(3, 8)[:, ::2], "a parameter has gaps in memory, or shares elements with itself"),
        (torch.ones(4).expand(3, 4), "a parameter has gaps in memory, or shares elements with itself"),
        (torch.eye(3).to_sparse_coo(), "a parameter is a Tensor of torch.float32, torch.sparse_coo"),
        (torch.ones(3, dtype=torch.float64), "a parameter is a Tensor of torch.float64, torch.strided"),
        (torch.ones(3, device="meta"), "parameters are on cpu and on meta"),
    ],
)
def test_what_cannot_be_updated_is_said_in_a_sentence(odd: Tensor, reason: str) -> None:
    assert choose.cannot_update([torch.ones(2), odd]) == reason


def test_a_device_without_kernels_is_named() -> None:
    assert choose.cannot_update([torch.ones(2, device="meta")]) == "there are no kernels for the device type 'meta'"


@compiled
def test_norms_go_through_the_operator_where_memory_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(tensors: list[Tensor]) -> Tensor:
        calls.append(len(tensors))
        norms: Tensor = torch.ops.halfstep.norms.default(tensors)
        return norms

    monkeypatch.setattr(ops, "norms", counted)
    plain = [
        torch.ones(3, 4).T,
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones((), dtype=HALF),
    ]
    others = [torch.ones(3, 8)[:, ::2], torch.ones(3, dtype=torch.float64), torch.ones(0), torch.ones(4).expand(3, 4)]
    assert norms_for(plain).tolist() == pytest.approx(reference.norms(plain).tolist())
    assert calls == [3]
    for odd in others:
        assert norms_for([*plain, odd]).tolist() == pytest.approx(reference.norms([*plain, odd]).tolist())
    assert calls == [3]
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    assert norms_for(plain).tolist() == pytest.approx(reference.norms(plain).tolist())
    assert calls == [3]
