"""The check for a library, and the scaler that checks gradients in every format."""

from __future__ import annotations

import pytest
import torch

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking, need


def test_an_absent_library_is_a_sentence_with_its_remedy() -> None:
    with pytest.raises(
        IntegrationError, match=r"no_such_library 1\.2 or newer is needed .*pip install 'halfstep\[some\]'"
    ) as raised:
        need("no_such_library", "1.2", extra="some")
    assert isinstance(raised.value, ImportError)


def test_an_old_library_is_a_sentence_with_both_versions() -> None:
    with pytest.raises(IntegrationError, match=r"torch 2\.\S+ is too old; 99\.0 or newer .*'torch>=99\.0'"):
        need("torch", "99.0")
    assert need("torch", "2.10") is torch


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_that_is_not_finite_is_skipped_in_every_format(dtype: str) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=hs.Policy.of("mixed", dtype=dtype))
    scaler, before = checking(scaler), model.weight.detach().clone()
    scaler.scale(model(torch.full((3, 4), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    assert bool(scaler.skipped(optimizer)) and torch.equal(before, model.weight)
    assert scaler.culprits(optimizer)[0].endswith("(8 of 8 values)")
