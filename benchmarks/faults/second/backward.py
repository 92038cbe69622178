"""List A of the second set, faults of the backward pass: the loss is finite, a gradient is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.faults.case import ALL, BF16, FULL, MIXED, Case, at, case, fault, labels, model_of, normal

# ------------------------------------------------------------------ poles of derivatives


class Gem(nn.Module):
    """Generalised mean pooling with a learned exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Any:
        mean = x.float().pow(self.p).mean((2, 3))
        return mean.pow(1 / self.p)  # FAULT gem_pooling


def retrieval_forward(self: Any, x: Tensor) -> Any:
    return self.head(self.pool(self.features(x)))


@fault("invalid", "pow", "pool", seed=341, phase="backward", step=3)
def gem_pooling() -> Case:
    """GeM pooling without eps: a channel that ReLU has silenced has mean 0, where the root has no derivative."""
    model = model_of(
        retrieval_forward, features=nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU()), pool=Gem(), head=nn.Linear(6, 4)
    )
    return case(
        model,
        lambda k: (normal(k, 3, 1, 6, 6), labels(k, 3)),
        policy=BF16,
        before=at(3, lambda: model.features[0].bias[2:3].fill_(-20.0)),
    )


class GroupDeviation(nn.Module):
    def forward(self, x: Tensor) -> Any:
        groups = x.unflatten(1, (2, -1)).float()
        centred = groups - groups.mean((2, 3, 4), keepdim=True)
        deviation = torch.sqrt(centred.square().mean((2, 3, 4), keepdim=True))  # FAULT group_deviation
        return (centred / (deviation + 1e-5)).flatten(1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), GroupDeviation()

    def forward(self, x: Tensor) -> Any:
        return x + self.norm(F.relu(self.conv(x)))


def group_net_forward(self: Any, x: Tensor) -> Any:
    x = self.stem(x)
    for stage in self.stages:
        x = checkpoint(stage, x, use_reentrant=False)
    return self.head(x.mean((2, 3)))


@fault("invalid", "sqrt", "stages.1.norm", seed=342, phase="backward", step=2)
def group_deviation() -> Case:
    """GroupNorm by hand, eps outside of the root, in a checkpointed block: one group of channels is constant."""
    model = model_of(
        group_net_forward,
        stem=nn.Conv2d(1, 4, 3),
        head=nn.Linear(4, 4),
        stages=nn.ModuleList(Residual(4) for _ in range(3)),
    )
    conv: Any = model.stages[1].conv

    def flatten() -> None:
        conv.weight[:2] = 0.0
        conv.bias[:2] = 1.0

    return case(model, lambda k: (normal(k, 3, 1, 8, 8), labels(k, 3)), before=at(2, flatten))


class Focal(nn.Module):
    def forward(self, p: Tensor, y: Tensor) -> Any:
        right = torch.where(y > 0, p, 1 - p)
        focus = (1 - right) ** 0.5  # FAULT focal_power
        return (focus * -torch.log(right.float() + 1e-6)).mean()


def detector_forward(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.criterion(torch.sigmoid(self.body(x)[:, 0]), y)


@fault("invalid", "pow", "criterion", seed=343, phase="backward", step=3, cures=("op fp32: sigmoid",))
def focal_power() -> Case:
    """A focal loss with a power of a half: a probability of 0.99995 is 1 in fp16, and 0 ** 0.5 has no derivative."""
    model = model_of(
        detector_forward, body=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), criterion=Focal()
    )
    return case(
        model,
        lambda k: (normal(k, 8, 8), torch.ones(8)),
        lambda m, x, y: m(x, y),
        before=at(3, lambda: model.body[2].bias.fill_(10.0)),
    )


class Direction(torch.autograd.Function):
    """x / |x|, with the gradient that its author thought of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (grads[0] * x) / (x.abs() * x.abs())  # FAULT straight_through


direction: Any = Direction.apply


class Binary(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return direction(x)


def binary_net_forward(self: Any, x: Tensor) -> Any:
    return self.out(self.quant(F.relu(self.enter(x)) - 0.01))


@fault("invalid", "div", "quant", seed=344, phase="backward", step=2)
def straight_through() -> Case:
    """A binary layer's own backward divides by what it was given; one unit is exactly 0."""
    model = model_of(binary_net_forward, enter=nn.Linear(6, 12), quant=Binary(), out=nn.Linear(12, 4))

    def cancel() -> None:
        model.enter.weight[3] = 0.0
        model.enter.bias[3] = 0.01

    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=FULL, before=at(2, cancel))


# ------------------------------------------------------------------ gradients too large for fp16


def tower_forward(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.fc(x))
    return self.out(self.norm(h))  # FAULT norm_of_padding


def towers_forward(self: Any, x: Tensor) -> Any:
    return self.head(torch.cat([tower(x) for tower in self.towers], -1))


@fault("overflow", "layer_norm", "towers.1.norm", seed=345, phase="backward", step=3, cures=("bf16", "scale"))
def norm_of_padding() -> Case:
    """LayerNorm with an eps of 1e-12 on rows that are all zero: backward multiplies by a million."""
    model = model_of(
        towers_forward,
        towers=nn.ModuleList(
            model_of(tower_forward, fc=nn.Linear(8, 8), norm=nn.LayerNorm(8, eps=1e-12), out=nn.Linear(8, 8))
            for _ in range(2)
        ),
        head=nn.Linear(16, 4),
    )

    def silence() -> None:
        fc: Any = model.towers[1].fc
        fc.weight.zero_()
        fc.bias.zero_()

    return case(
        model, lambda k: (normal(k, 4, 8), labels(k, 4)), policy=MIXED.replace(scale=64.0), before=at(3, silence)
    )


def embedder_forward(self: Any, x: Tensor) -> Any:
    h = self.project(torch.relu(self.body(x)))
    return F.normalize(h, dim=-1)  # FAULT collapsed_embedding


def alignment(model: Any, a: Tensor, b: Tensor) -> Any:
    return (model(a) - model(b)).square().sum(-1).mean()


@fault("overflow", "normalize", seed=346, phase="backward", step=2, cures=("bf16", "scale"))
def collapsed_embedding() -> Case:
    """Embeddings that have collapsed to a length of 1e-6: normalising them multiplies the gradient by a million."""
    model = model_of(embedder_forward, body=nn.Linear(6, 12), project=nn.Linear(12, 6))

    def collapse() -> None:
        model.project.weight.mul_(2e-6)
        model.project.bias.zero_()

    return case(model, lambda k: (normal(k, 4, 6), normal(k + 30, 4, 6)), alignment, before=at(2, collapse))


def audio_forward(self: Any, x: Tensor) -> Any:
    for name, layer in self.layers.items():
        x = layer(x)  # FAULT long_audio
        if name != "mix":
            x = torch.tanh(x)
    return x


@fault("overflow", "conv1d", "layers.mix", seed=347, phase="backward", step=2, cures=(*ALL, "scale"))
def long_audio() -> Case:
    """A sum over samples instead of a mean: a recording of 8192 samples takes the last bias's gradient past 65504."""
    model = model_of(
        audio_forward,
        layers=nn.ModuleDict(
            {"low": nn.Conv1d(1, 4, 5, padding=2), "high": nn.Conv1d(4, 4, 5, padding=2), "mix": nn.Conv1d(4, 1, 1)}
        ),
    )
    return case(
        model,
        lambda k: (normal(k, 2, 1, 8192 if k == 2 else 64),),
        lambda m, x: F.l1_loss(m(x), x + 8.0, reduction="sum"),
        policy=MIXED.replace(scale=8.0),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
    )
