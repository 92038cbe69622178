"""List A of the second set, faults of the backward pass: the loss is finite, a gradient is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.faults.case import Case, fault
from tests.faults.second.common import ALL, BF16, FULL, MIXED, adam, at, classify, labels, normal

# ------------------------------------------------------------------ poles of derivatives


class Gem(nn.Module):
    """Generalised mean pooling with a learned exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Any:
        mean = x.float().pow(self.p).mean((2, 3))
        return mean.pow(1 / self.p)  # FAULT gem_pooling


class Retrieval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())
        self.pool, self.head = Gem(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.pool(self.features(x)))


@fault("A", kind="invalid", op="pow", module="pool", phase="backward", step=3)
def gem_pooling() -> Case:
    """GeM pooling without eps: a channel that ReLU has silenced has mean 0, where the root has no derivative."""
    torch.manual_seed(341)
    model = Retrieval()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 3, 1, 6, 6), labels(k, 3)),
        policy=BF16,
        steps=3,
        before=at(3, lambda: model.features[0].bias[2:3].fill_(-20.0)),  # type: ignore[index]
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


class GroupNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)
        self.stages = nn.ModuleList(Residual(4) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


@fault("A", kind="invalid", op="sqrt", module="stages.1.norm", phase="backward", step=2)
def group_deviation() -> Case:
    """GroupNorm by hand, eps outside of the root, in a checkpointed block: one group of channels is constant."""
    torch.manual_seed(342)
    model = GroupNet()
    conv: Any = model.stages[1].conv

    def flatten() -> None:
        conv.weight[:2] = 0.0
        conv.bias[:2] = 1.0

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 3, 1, 8, 8), labels(k, 3)),
        policy=MIXED,
        steps=2,
        before=at(2, flatten),
    )


class Focal(nn.Module):
    def forward(self, p: Tensor, y: Tensor) -> Any:
        right = torch.where(y > 0, p, 1 - p)
        focus = (1 - right) ** 0.5  # FAULT focal_power
        return (focus * -torch.log(right.float() + 1e-6)).mean()


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.criterion = Focal()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.criterion(torch.sigmoid(self.body(x)[:, 0]), y)


@fault("A", kind="invalid", op="pow", module="criterion", phase="backward", step=3, cures=("op fp32: sigmoid",))
def focal_power() -> Case:
    """A focal loss with a power of a half: a probability of 0.99995 is 1 in fp16, and 0 ** 0.5 has no derivative."""
    torch.manual_seed(343)
    model = Detector()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: m(x, y),
        batch=lambda k: (normal(k, 8, 8), torch.ones(8)),
        policy=MIXED,
        steps=3,
        before=at(3, lambda: model.body[2].bias.fill_(10.0)),  # type: ignore[operator]
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


class BinaryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.quant, self.out = nn.Linear(6, 12), Binary(), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.quant(F.relu(self.enter(x)) - 0.01))


@fault("A", kind="invalid", op="div", module="quant", phase="backward", step=2)
def straight_through() -> Case:
    """A binary layer's own backward divides by what it was given; one unit is exactly 0."""
    torch.manual_seed(344)
    model = BinaryNet()

    def cancel() -> None:
        model.enter.weight[3] = 0.0
        model.enter.bias[3] = 0.01

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=FULL,
        steps=2,
        before=at(2, cancel),
    )


# ------------------------------------------------------------------ gradients too large for fp16


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.fc(x))
        return self.out(self.norm(h))  # FAULT norm_of_padding


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers, self.head = nn.ModuleList(Tower() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.cat([tower(x) for tower in self.towers], -1))


@fault(
    "A",
    kind="overflow",
    op="layer_norm",
    module="towers.1.norm",
    phase="backward",
    step=3,
    cures=("bf16", "scale"),
)
def norm_of_padding() -> Case:
    """LayerNorm with an eps of 1e-12 on rows that are all zero: backward multiplies by a million."""
    torch.manual_seed(345)
    model = Towers()

    def silence() -> None:
        fc: Any = model.towers[1].fc
        fc.weight.zero_()
        fc.bias.zero_()

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 4, 8), labels(k, 4)),
        policy=MIXED.replace(scale=64.0),
        steps=3,
        before=at(3, silence),
    )


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Any:
        h = self.project(torch.relu(self.body(x)))
        return F.normalize(h, dim=-1)  # FAULT collapsed_embedding


def alignment(model: Any, a: Tensor, b: Tensor) -> Any:
    return (model(a) - model(b)).square().sum(-1).mean()


@fault("A", kind="overflow", op="normalize", module="", phase="backward", step=2, cures=("bf16", "scale"))
def collapsed_embedding() -> Case:
    """Embeddings that have collapsed to a length of 1e-6: normalising them multiplies the gradient by a million."""
    torch.manual_seed(346)
    model = Embedder()

    def collapse() -> None:
        model.project.weight.mul_(2e-6)
        model.project.bias.zero_()

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=alignment,
        batch=lambda k: (normal(k, 4, 6), normal(k + 30, 4, 6)),
        policy=MIXED,
        steps=2,
        before=at(2, collapse),
    )


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"low": nn.Conv1d(1, 4, 5, padding=2), "high": nn.Conv1d(4, 4, 5, padding=2), "mix": nn.Conv1d(4, 1, 1)}
        )

    def forward(self, x: Tensor) -> Any:
        for name, layer in self.layers.items():
            x = layer(x)  # FAULT long_audio
            if name != "mix":
                x = torch.tanh(x)
        return x


@fault("A", kind="overflow", op="conv1d", module="layers.mix", phase="backward", step=2, cures=(*ALL, "scale"))
def long_audio() -> Case:
    """A sum over samples instead of a mean: a recording of 8192 samples takes the last bias's gradient past 65504."""
    torch.manual_seed(347)
    model = Audio()
    return Case(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        loss_fn=lambda m, x: F.l1_loss(m(x), x + 8.0, reduction="sum"),
        batch=lambda k: (normal(k, 2, 1, 8192 if k == 2 else 64),),
        policy=MIXED.replace(scale=8.0),
        steps=2,
    )
