"""List A of the second set, faults that no operator is to blame for: the batch, the training's state, the scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import BF16, FULL, Case, at, case, fault, labels, model_of, normal, tokens


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 12))
    return nn.Sequential(nn.Linear(6, 6), body, nn.GroupNorm(3, 12), nn.Linear(12, 4))


# ------------------------------------------------------------------ the batch


def boxes_forward(self: Any, image: Tensor, boxes: Tensor) -> Any:
    found = self.head(F.relu(self.body(image)).amax((2, 3)))
    return {"loss": F.smooth_l1_loss(found, boxes), "boxes": found}


@fault("bad_batch", seed=361, step=2)
def box_without_width() -> Case:
    """The data loader has taken the logarithm of a box's width of 0: one field of the second micro-batch of three."""
    model = model_of(boxes_forward, body=nn.Conv2d(1, 4, 3), head=nn.Linear(4, 4))

    def batch(step: int) -> tuple[Any, ...]:
        sizes = normal(step + 30, 3, 4).abs() + 0.1
        if step == 2:
            sizes[1, 2] = 0.0
        return ({"image": normal(step, 3, 1, 6, 6), "boxes": sizes.log()},)

    return case(model, batch, lambda m, rows: m(**rows)["loss"], steps=3, options={"accumulate": 3})


def visits_forward(self: Any, codes: Tensor, times: Tensor) -> Any:
    h = torch.zeros(len(codes), 8)
    for code, time in zip(codes.unbind(1), times.unbind(1), strict=True):
        h = self.gru(torch.cat([self.embed(code), time[:, None]], -1), h).float()
    return self.out(h)[:, 0]


@fault("bad_batch", seed=362, step=4)
def date_that_is_missing() -> Case:
    """Nested inputs of a recurrent net: the time of one visit is NaN."""
    model = model_of(visits_forward, embed=nn.Embedding(9, 6), gru=nn.GRUCell(7, 8), out=nn.Linear(8, 1))

    def batch(step: int) -> tuple[Any, ...]:
        times = normal(step, 4, 5).abs()
        if step == 4:
            times[3, 0] = float("nan")
        return ((tokens(step, (4, 5), 9), times), {"died": labels(step, 4, 2).float()})

    return case(
        model, batch, lambda m, visits, rows: F.binary_cross_entropy_with_logits(m(*visits), rows["died"]), policy=BF16
    )


# ------------------------------------------------------------------ buffers and parameters


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(4) / 4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.qkv = Rotary(), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(self.rotary(q)[:, None], self.rotary(k)[:, None], v[:, None])[:, 0]


class RotaryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(15, 8), nn.ModuleList(), nn.Linear(8, 15)
        for _ in range(2):
            self.layers.append(RotaryAttention())

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


@fault("bad_state", seed=363, parameter="layers.1.rotary.inv_freq", step=2)
def uninitialised_buffer() -> Case:
    """A buffer that no checkpoint holds is what the memory held before, once its layer has been moved by hand."""
    model = RotaryModel()
    buffer: Any = model.layers[1].rotary.inv_freq  # type: ignore[union-attr]
    return case(
        model,
        lambda k: (tokens(k, (3, 7), 15),),
        lambda m, x: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
        before=at(2, lambda: buffer[2:].copy_(torch.tensor([float("nan"), 1e-3]))),
    )


def weighted_forward(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.criterion(self.body(x), y)


@fault("bad_state", seed=364, parameter="criterion.weight", step=3)
def weight_of_an_absent_class() -> Case:
    """The loss is part of the model, its class weights a buffer set by counts between epochs: 0 / 0 for one class."""
    model = model_of(weighted_forward, body=nn.Linear(6, 4), criterion=nn.CrossEntropyLoss(weight=torch.ones(4)))
    counts = torch.tensor([3.0, 3.0, 0.0, 2.0])
    return case(
        model,
        lambda k: (normal(k, 8, 6), torch.arange(8) % 4),
        lambda m, x, y: m(x, y),
        before=at(3, lambda: model.criterion.weight.copy_(counts * 0 / counts + 1)),
    )


@fault("bad_state", parameter="1.2.weight", step=2)
def inf_parameter() -> Case:
    """A weight was multiplied by a factor that overflowed: it is inf, and inf times 0 or a sum of infs follows."""
    model: Any = net(365)
    return case(
        model,
        lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=BF16,
        before=at(2, lambda: model[1][2].weight[0].mul_(float("inf"))),
    )


# ------------------------------------------------------------------ the optimizer


@fault("bad_state", parameter="3.weight", phase="update", step=3)
def nan_momentum() -> Case:
    """SGD's momentum, restored from a file, has a NaN: gradients are finite, and the update of step 2 is not."""
    model = net(366)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def restore() -> None:
        optimizer.state[model[3].weight]["momentum_buffer"][1, 5] = float("nan")  # type: ignore[index]

    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), optimizer=optimizer, before=at(2, restore))


@fault("bad_state", parameter="2.weight", phase="update", step=4)
def negative_second_moment() -> Case:
    """A second moment that came back from compression a little below 0: its root is NaN, though it is finite."""
    model = net(367)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def decompress() -> None:
        optimizer.state[model[2].weight]["exp_avg_sq"][7] = -1.0  # type: ignore[index]

    return case(
        model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=BF16, optimizer=optimizer, before=at(3, decompress)
    )


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.embed(x).mean(1))


@fault("bad_state", seed=368, parameter="embed.weight", phase="update", step=2)
def eps_of_zero() -> Case:
    """Adam with eps=0, in fp32: rows of an embedding that no batch has touched are updated by 0 / 0."""
    model = Rare()
    return case(
        model,
        lambda k: (tokens(k, (4, 3), 12 if k > 1 else 8), torch.arange(4)),
        policy=FULL,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0),
    )


@fault("bad_state", seed=369, parameter="embed.weight", phase="update", step=2)
def eps_of_rmsprop() -> Case:
    """RMSprop's eps of 1e-8 is 0 in fp16, so O3 divides 0 by 0 for the rows that nothing has touched."""
    model = Rare()
    return case(
        model,
        lambda k: (tokens(k, (4, 3), 12 if k > 1 else 8), torch.arange(4)),
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False),
    )


# ------------------------------------------------------------------ the scale


@fault("scale_too_high", seed=370, phase="backward", step=1, cures=("scale",))
def scale_too_high_for_a_decoder() -> Case:
    """A static loss scale 2**10 times larger than the largest under which a small decoder's step is finite."""
    model = RotaryModel()
    return case(
        model,
        lambda k: (tokens(k, (3, 7), 15),),
        lambda m, x: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
        policy=hs.Policy.of("pure", dtype="fp16", scale=2.0**28),
    )
