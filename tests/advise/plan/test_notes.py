"""Notes of a plan: what it does not count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 8)  # type: ignore[call-arg, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_on_a_cpu_is_told_to_hold_more(kind: type[nn.RNNBase]) -> None:
    plan = hs.plan(Tagger(kind), (torch.empty(3, 2, 4),), loss_fn, sgd, device="cpu")
    assert any("nn.LSTM, nn.GRU and nn.RNN on a CPU hold more" in note for note in plan.notes)


def test_other_models_are_not() -> None:
    plan = hs.plan(nn.Linear(4, 4), (torch.empty(2, 4),), loss_fn, sgd, device="cpu")
    assert not any("RNN" in note for note in plan.notes)
