"""Labels and indices out of range: the error names input, sample and range, and is of the kinds torch's own has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import BatchError

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 7, 2, -100])
IDS = torch.tensor([[0, 1], [2, 3], [9, 10], [10, 0]])


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def embed(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).float().square().mean()  # type: ignore[no-any-return]


def binary(model: nn.Module, x: Tensor, *, wanted: Tensor) -> Tensor:
    return F.binary_cross_entropy(model(x).float().sigmoid(), wanted)


def step_of(model: nn.Module, loss_fn: Any) -> hs.TrainStep:
    return hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, policy="mixed")


def test_a_label_out_of_range() -> None:
    step = step_of(nn.Linear(6, 4), classify)
    with pytest.raises(BatchError) as raised:
        step(X, LABELS)
    text = "input 1 holds 7 in sample 5, and cross_entropy of 4 classes takes labels from 0 to 3, and -100 for none"
    assert str(raised.value) == f"{text}. torch says: Target 7 is out of bounds."
    assert isinstance(raised.value, IndexError) and isinstance(raised.value.__cause__, IndexError)
    assert step(X, LABELS.clamp(0, 3)).host().updated


def test_an_index_out_of_range() -> None:
    step = step_of(nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4)), embed)
    with pytest.raises(
        IndexError, match=r"^input 0 holds 10 in sample 2 at \[1\] \(2 such values\), and the embedding"
    ):
        step(IDS)


def test_a_target_that_is_no_probability() -> None:
    step = step_of(nn.Linear(6, 1), binary)
    wanted = torch.zeros(8, 1).index_fill(0, torch.tensor([3]), 255.0)
    with pytest.raises(RuntimeError, match=r"^input 1 \(wanted\) holds 255 in sample 3 at \[0\], and binary_cross_ent"):
        step(X, wanted=wanted)


def test_other_errors_pass_as_they_are() -> None:
    def beyond(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, 9].mean()  # type: ignore[no-any-return]

    with pytest.raises(IndexError) as raised:
        step_of(nn.Linear(6, 4), beyond)(X)
    assert type(raised.value) is IndexError
