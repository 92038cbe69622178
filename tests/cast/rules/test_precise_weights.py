"""The rule "fp32" of a module holds for the products that other code computes with its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs

WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, h: F.linear(h, m.head.weight),
    "matmul": lambda m, h: h @ m.head.weight.T,
    "mm": lambda m, h: torch.mm(h, m.head.weight.t()),
    "einsum": lambda m, h: torch.einsum("bi,oi->bo", h, m.head.weight),
    "addmm": lambda m, h: torch.addmm(torch.zeros(64), h, m.head.weight.t()),
    "rows": lambda m, h: F.linear(h, m.head.weight[:32]),
    "chunks": lambda m, h: torch.cat([F.linear(h, w) for w in m.head.weight.chunk(4)], -1),
    "detached": lambda m, h: F.linear(h, m.head.weight.detach()) + 0 * h.sum(),
    "checkpoint": lambda m, h: checkpoint(lambda h: F.linear(h, m.head.weight), h, use_reentrant=False),
    "loss": lambda m, h: hs.linear_cross_entropy(h, m.head.weight, torch.arange(4)),
}


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, way: Callable[[Any, Tensor], Tensor]) -> Tensor:
        return way(self, self.body(x))


@pytest.mark.parametrize("name", ["torch", "mixed", "O1", "O2", "pure"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("place", ["loss", "forward", "tied"])
def test_a_product_with_the_weight_of_an_fp32_module_is_in_fp32(name: str, way: Any, place: str) -> None:
    torch.manual_seed(0)
    model, x = Model(tied=place == "tied"), torch.randn(4, 16)
    policy = hs.Policy.of(name, dtype="bf16").with_modules({"head": "fp32"})
    seen: list[Tensor] = []

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        h = net.body(x)
        out = net(x, way) if place == "forward" else way(net, h)
        seen[:] = h, out
        loss: Tensor = out.float().square().mean()
        return loss

    hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.0), loss_fn, policy=policy)(x)
    hidden, found = seen
    wanted = way(model, hidden.detach().float().requires_grad_())
    assert hidden.dtype is torch.bfloat16 and torch.equal(found.float(), wanted)


@pytest.mark.parametrize("before", [False, True])
def test_weights_of_other_modules_stay_low(before: bool) -> None:
    model, mixed = Model(), hs.Policy.of("mixed", dtype="bf16")
    if before:
        hs.unprepare(hs.prepare(model, policy=mixed.with_modules({"embed": "fp32", "head": "fp32", "body": "fp32"})))
    hs.prepare(model, policy=mixed.with_modules({"body": "fp32"}))
    with torch.no_grad():
        for weight in (model.embed.weight, model.head.weight):
            by_hand = model(torch.randn(4, 16), lambda m, h, w=weight: F.linear(h, w))
            assert torch.equal(by_hand, by_hand.bfloat16().float())
