"""hs.mismatch: log-probabilities of a trainer and a sampler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import AuditError


class Actor(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        h: Tensor = self.embed(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        logits: Tensor = self.head(self.norm(h))
        return logits


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def actor(scale: float = 8.0) -> Actor:
    torch.manual_seed(0)
    model = Actor()
    with torch.no_grad():
        model.head.weight *= scale  # logits of some size, as trained models have
    return model


TOKENS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(0))


def test_a_sampler_that_computes_as_the_trainer_has_a_ratio_of_1() -> None:
    model = hs.prepare(actor(), policy=hs.Policy.of("mixed", dtype="bf16"))
    found = hs.mismatch(model, (TOKENS,), log_probs, hs.Policy.of("mixed", dtype="bf16"))
    assert (found.mean, found.largest, found.ratio, found.effective) == (0.0, 0.0, (1.0, 1.0, 1.0), 1.0)
    assert found.trainer_error == found.sampler_error > 0.0 and found.tokens == 88


def test_fp16_is_closer_than_bf16_and_an_fp32_head_than_a_low_one() -> None:
    model = hs.prepare(actor(), policy=hs.Policy.of("mixed", dtype="fp32"))
    low = {name: hs.mismatch(model, (TOKENS,), log_probs, name) for name in ("bf16", "fp16")}
    assert low["bf16"].mean > 4 * low["fp16"].mean > 0.0
    head = hs.mismatch(model, (TOKENS,), log_probs, hs.Policy.of("O3", dtype="bf16").with_modules({"head": "fp32"}))
    without = dict(low["bf16"].without)
    assert head.mean == pytest.approx(without["head"]) and head.mean < low["bf16"].mean
    assert set(without) == {"embed", "layers.*", "norm", "head"} and [*without.values()] == sorted(without.values())
    assert f"with {[*without][0]} of the sampler in fp32" in str(low["bf16"])


def test_numbers_are_those_of_the_formulas_and_nothing_is_changed() -> None:
    model = actor()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, tokens: -log_probs(model, tokens).mean(),
        policy=hs.Policy.of("O2", dtype="bf16"),
    )
    own = copy.deepcopy(actor()).bfloat16()
    before = copy.deepcopy(model.state_dict())
    found = hs.mismatch(step, (TOKENS,), log_probs, own, clip=0.05)
    with torch.no_grad():
        difference = (log_probs(model.eval(), TOKENS) - log_probs(own, TOKENS)).double()
    ratio = difference.exp()
    assert found.mean == pytest.approx(float(difference.abs().mean()), rel=1e-5)
    assert found.kl == pytest.approx(float((ratio - 1 - difference).mean()), rel=1e-3, abs=1e-9)
    assert found.clipped == pytest.approx(float(((ratio - 1).abs() > 0.05).double().mean()))
    assert found.without == () and abs(float(difference[found.place])) == pytest.approx(found.largest, rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_refused() -> None:
    model = actor()
    with pytest.raises(AuditError, match="trainer must be"):
        hs.mismatch("model", (TOKENS,), log_probs)  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="log_probs must return a tensor"):
        hs.mismatch(model, (TOKENS,), lambda model, tokens: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(hs.HalfstepError, match="bf61"):
        hs.mismatch(model, (TOKENS,), log_probs, "bf61")
    with pytest.raises(AuditError, match="tokens of the sampler"):
        hs.mismatch(
            model, (TOKENS,), lambda m, t: log_probs(m, t)[: 1 + 7 * isinstance(m, Actor)], nn.Sequential(actor())
        )
