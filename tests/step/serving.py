"""Small networks for tests of `hs.lowered` and `hs.exported`, with norms that matter and inputs for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs


class Attending(nn.Module):
    """A transformer block over tokens: embedding, LayerNorm, attention by hand, a residual stream, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        out: Tensor = self.head(x + self.out(F.softmax(q @ k.mT / 4, -1) @ v))
        return out


class Convolving(nn.Module):
    """A residual block over images with BatchNorm, and a head with the outputs as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.m, self.n, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        x = F.relu(x + self.n(self.b(F.relu(self.m(self.a(x))))))
        return {"logits": self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))}


class RootMeanSquare(nn.Module):
    """A norm written by hand, as in Llama: fp32 inside, a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class MyNorm(RootMeanSquare):
    """The same under a name by which policies know norms."""


def gated() -> nn.Sequential:
    """Return a network with a norm written by hand and one of torch."""
    return nn.Sequential(nn.Linear(6, 16), MyNorm(), nn.Linear(16, 16), nn.GELU(), nn.RMSNorm(16), nn.Linear(16, 3))


def networks() -> dict[str, tuple[Any, Any]]:
    """Return name -> (a network in evaluation, with values as after a training, an input)."""
    torch.manual_seed(0)
    made: dict[str, tuple[Any, Any]] = {
        "attending": (Attending(), torch.randint(0, 50, (2, 7))),
        "convolving": (Convolving(), torch.randn(2, 3, 8, 8)),
        "gated": (gated(), torch.randn(5, 6)),
    }
    made["convolving"][0](torch.randn(8, 3, 8, 8))  # running statistics
    for net, _ in made.values():
        net.eval()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def prepared(net: Any, policy: hs.Policy) -> Any:
    """Return a prepared copy of `net`."""
    return hs.prepare(copy.deepcopy(net), policy=policy)


def logits(out: Any) -> Tensor:
    """Return the tensor in what a network of this file returns."""
    found: Tensor = out["logits"] if isinstance(out, dict) else out
    return found
