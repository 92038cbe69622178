"""The check for a library, and the scaler that checks gradients in every format."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import BindError, IntegrationError
from halfstep.integrations.shared import checking, forward_in_class, need


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


def test_a_forward_on_the_instance_goes_into_a_class() -> None:
    """As TRL sets one; what accelerate has set stays, and `hs.prepare` refuses it."""
    model: Any = nn.Linear(2, 2)
    hooked: Any = nn.Linear(2, 2)
    for each in (model, hooked):
        each.forward = MethodType(lambda self, x: nn.Linear.forward(self, x) + 1, each)
    x = torch.ones(1, 2)
    expected = model(x)
    forward_in_class(model)
    hs.prepare(model, policy="O0")
    assert torch.equal(model(x), expected) and type(model).__name__ == "Linear"
    hooked._old_forward = hooked.forward
    forward_in_class(hooked)
    with pytest.raises(BindError, match="forward of its own"):
        hs.prepare(hooked, policy="O0")
