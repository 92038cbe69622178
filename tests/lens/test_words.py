"""Remedies of verdicts, told on programs as users write them: what is said is true and what helps comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.lens import Cure, Verdict


def told(model: nn.Module, loss_fn: Callable[..., Any], *batches: tuple[Tensor, ...]) -> Verdict:
    box = hs.BlackBox(model, loss_fn, torch.optim.Adam(model.parameters()))
    for batch in batches:
        model.zero_grad()
        box(*batch).backward()
    return box.explain()


def rows(count: int = 8, width: int = 16) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def layer(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, width)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.log_variance, self.decoder = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Any:
        deviation = torch.exp(0.5 * self.log_variance(x))
        return self.decoder(self.mean(x) + deviation)


def test_a_log_variance_is_named_where_a_layer_shows_it() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with hs.autocast(policy=hs.Policy.of("mixed", dtype="fp16")):
            return F.mse_loss(model(x).float() * 1e-6, x)

    verdict = told(Encoder(), loss_fn, (rows(),), (rows() * 30,))
    assert verdict.op == "linear" and "comes from exp at test_words.py:" in verdict.what
    assert any(cure.text.startswith("clamp the argument of exp at test_words.py:") for cure in verdict.cures)


def test_a_target_of_nan_gets_where_also_in_an_error_by_hand() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        known = ~y.isnan()
        return ((model(x) - y).square() * known).sum() / known.sum()

    y = rows(8, 4)
    y[2, 1] = torch.nan
    verdict = told(layer(4), loss_fn, (rows(), rows(8, 4)), (rows(), y))
    assert verdict.cause == "data" and "torch.where(mask, target, 0)" in verdict.cures[0].text


def test_a_mean_of_nothing_gets_no_eps_and_blames_no_loader() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        out = model(x).squeeze(1)
        return F.mse_loss(out[y == 1], x[:, 0][y == 1]) + out.square().mean()

    chosen = torch.tensor([0, 1] * 4)
    verdict = told(layer(1), loss_fn, (rows(), chosen), (rows(), chosen * 0))
    words = " ".join(cure.text for cure in verdict.cures)
    assert verdict.cures[0].text.startswith("divide the sum by the count, at least 1")
    assert "eps" not in words and "loaded" not in words


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_a_last_batch_of_one_gets_drop_last() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return ((out - out.mean(0)) / out.std(0)).square().mean() + (1 - out.std(0)).relu().mean()

    verdict = told(layer(4), loss_fn, (rows(),), (rows(1),))
    assert "drop_last=True" in verdict.cures[0].text and "drop_last=True" in verdict.headline


def test_a_scale_of_a_flow_is_clamped() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        scale, shift = model(x[:, :16]).chunk(2, 1)
        return (x[:, :4] * scale.exp() + shift).square().mean() - scale.mean()

    verdict = told(layer(8), loss_fn, (rows(),), (rows() * 1000,))
    assert verdict.op == "exp" and verdict.remedy.startswith("clamp the argument")


def test_no_number_of_a_headline_is_cut_to_another_one() -> None:
    cure = Cure(policy=None, text="do " + "this and that " * 9, verified=False)
    for size in range(1, 90):
        because = "x" * size + " the format ends at 65504 and no later"
        verdict = Verdict(kind="overflow", op="linear", module="m" * 30, phase="forward", detail=because, cures=(cure,))
        numbers = [word.strip(".") for word in verdict.headline.split() if word.strip(".").isdigit()]
        assert set(numbers) <= {"65504"} and len(verdict.headline) <= 160
