"""List B of the second set: faults that stay finite, each with an effect measured by brute force."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import (
    BF16,
    TORCH,
    UNSCALED,
    Case,
    Fault,
    case,
    classify,
    fault,
    labels,
    model_of,
    normal,
    run,
    tokens,
)
from benchmarks.faults.quiet import gradient_error, output_error, unmoved_share

# ------------------------------------------------------------------ underflow


def dense_forward(self: Any, x: Tensor) -> Any:
    return self.head(self.body(x))


@fault(
    "underflow",
    "conv2d",
    "body.0",
    seed=401,
    role="gradient",
    parameter="body.0.weight",
    effect=(gradient_error, 0.5),
    also=("body.0.bias", "body.2", "body.2.weight", "body.2.bias"),
)
def mean_over_pixels() -> Case:
    """A loss averaged over 18432 pixels, at a loss scale of 1: what reaches the first layer is below 2**-24."""
    model = model_of(
        dense_forward,
        body=nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1), nn.Tanh()),
        head=nn.Conv2d(6, 1, 1),
    )
    with torch.no_grad():
        model.head.weight.mul_(0.004)
        model.body[2].weight.mul_(0.3)
    return case(
        model,
        lambda k: (normal(k, 2, 1, 96, 96),),
        lambda m, x: F.binary_cross_entropy_with_logits(m(x), (x > 0).to(x.dtype)),
        policy=UNSCALED,
        steps=2,
    )


class Schedule(nn.Module):
    seen: Tensor
    beta: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.linspace(1e-4, 0.05, 800))

    def forward(self, low: Tensor) -> Any:
        alpha = (1 - self.beta).to(low.dtype)
        left = torch.cumprod(alpha, 0)  # FAULT signal_that_is_left
        self.seen = left.detach()
        return left


def diffusion_forward(self: Any, x: Tensor, noise: Tensor, t: Tensor) -> Any:
    h = self.enter(noise)
    left = self.schedule(h)[t][:, None].to(x.dtype)
    return self.out(torch.tanh(self.enter(left.sqrt() * x + (1 - left).sqrt() * noise)))


def lost_signal(fault: Fault) -> float:
    """Return the share of the schedule that is 0 in fp16; none is in fp32."""
    case = fault.build()
    next(run(case))
    return float((case.model.schedule.seen == 0).double().mean())  # type: ignore[union-attr]


@fault("underflow", "cumprod", "schedule", seed=402, role="activation", effect=(lost_signal, 0.05))
def signal_that_is_left() -> Case:
    """A diffusion schedule's running product in fp16: for the last tenth of the times no signal is left at all."""
    model = model_of(diffusion_forward, schedule=Schedule(), enter=nn.Linear(8, 16), out=nn.Linear(16, 8))

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 16, 8), normal(step + 30, 16, 8), tokens(step, (16,), 800)

    return case(model, batch, lambda m, x, noise, t: F.mse_loss(m(x, noise, t), noise), policy=TORCH, steps=2)


class Diffusivity(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.flow = nn.Linear(6, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Any:
        flow = self.flow(torch.tanh(self.fc(x)))  # FAULT weights_in_si_units
        self.seen = flow.detach()
        return flow.float() * 1e8


@fault(
    "underflow",
    "linear",
    "flow",
    seed=403,
    role="weight",
    parameter="flow.weight",
    effect=(output_error(lambda m: m.seen), 0.3),
)
def weights_in_si_units() -> Case:
    """Diffusivities of 1e-8 as weights: a scale behind the layer is too late, in fp16 they are 0 or 2**-24."""
    model = Diffusivity()
    with torch.no_grad():
        model.flow.weight.copy_(2.5e-8 * normal(3, 2, 8))
    return case(
        model,
        lambda k: (normal(k, 16, 6), normal(k + 20, 16, 2)),
        lambda m, x, y: F.l1_loss(m(x), y),
        policy=hs.Policy.of("mixed", dtype="fp16", scale=2.0**-10),
        lr=1e-12,
        steps=2,
    )


# ------------------------------------------------------------------ rounding


class FromMask(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.out = nn.Embedding(9, 8), nn.Embedding(700, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        counted = mask.to(torch.bfloat16).cumsum(-1, dtype=torch.bfloat16)  # FAULT positions_from_mask
        self.seen = counted.detach()
        h = self.embed(x) + self.place(counted.long())
        return self.out((h * mask[..., None]).mean(1))


def wrong_positions(fault: Fault) -> float:
    """Return the share of positions that are another token's."""
    case = fault.build()
    next(run(case))
    return float((case.model.seen.long() != torch.arange(1, 601)).double().mean())  # type: ignore[operator]


@fault("rounding", "cumsum", seed=404, role="activation", effect=(wrong_positions, 0.25))
def positions_from_mask() -> Case:
    """Positions counted along a bf16 mask: from 256 on, neighbours share a position."""
    model = FromMask()

    def batch(step: int) -> tuple[Any, ...]:
        return tokens(step, (2, 600), 9), torch.ones(2, 600), labels(step, 2)

    return case(model, batch, lambda m, x, mask, y: F.cross_entropy(m(x, mask), y), policy=BF16, steps=2)


class Moments(nn.Module):
    seen: Tensor

    def forward(self, h: Tensor) -> Any:
        mean, squares = h.mean(0), (h * h).mean(0)
        variance = squares - mean * mean  # FAULT variance_by_moments
        self.seen = variance.detach()
        return (h - mean) * torch.rsqrt(variance.clamp(min=0) + 0.05)


@fault(
    "rounding",
    "sub",
    "1",
    seed=405,
    role="activation",
    effect=(output_error(lambda m: m[1].seen), 0.5),
    also=("mul", "mean"),
)
def variance_by_moments() -> Case:
    """E[h^2] - E[h]^2 in bf16 around a mean of 12: clamped and protected by eps it is no NaN, only wrong."""
    model = nn.Sequential(nn.Linear(8, 16), Moments(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(12.0)  # type: ignore[operator]
    return case(model, lambda k: (normal(k, 64, 8), labels(k, 64)), policy=BF16, steps=2)


# ------------------------------------------------------------------ saturation


class SlowCell(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.write = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        both = torch.cat([x, h], -1)
        keep = torch.sigmoid(self.keep(both))  # FAULT saturated_gate
        self.seen = keep.detach()
        return keep * h + (1 - keep) * torch.tanh(self.write(both))


def slow_net_forward(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.enter(x[:, 0]))
    for now in x.unbind(1):
        h = self.cell(now.to(h.dtype), h)
    return self.out(h)


def closed_gates(fault: Fault) -> float:
    """Return the share of gates that are exactly 1 in the last step of time."""
    case = fault.build()
    next(run(case))
    return float((case.model.cell.seen == 1).double().mean())  # type: ignore[union-attr]


@fault("saturation", "sigmoid", "cell", seed=406, role="activation", effect=(closed_gates, 0.9))
def saturated_gate() -> Case:
    """A gate initialised to remember over thousands of steps: sigmoid(8) is 1 in bf16, and nothing is written ever."""
    model = model_of(slow_net_forward, enter=nn.Linear(4, 8), cell=SlowCell(), out=nn.Linear(8, 4))
    with torch.no_grad():
        model.cell.keep.bias.fill_(8.0)
    return case(model, lambda k: (normal(k, 8, 12, 4), labels(k, 8)), policy=BF16, steps=2)


# ------------------------------------------------------------------ updates, state


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.gamma * torch.tanh(self.fc(x))


@fault(
    "swallowed_update",
    "",
    "2",
    seed=407,
    role="update",
    parameter="2.gamma",
    phase="update",
    step=2,
    effect=(unmoved_share, 0.5),
    also=("1.gamma",),
)
def gains_of_one() -> Case:
    """Learned gains of 1 in fp16 without masters: SGD's steps of 1e-4 are below half of 2**-10."""
    model = nn.Sequential(nn.Linear(6, 8), Scaled(), Scaled(), nn.Linear(8, 4))
    return case(
        model,
        lambda k: (normal(k, 16, 6), labels(k, 16)),
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.5),
        steps=6,
    )


class Vocabulary(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.register_buffer("seen", torch.full((1,), 2040.0, dtype=torch.float16))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen += 1  # FAULT counter_in_half
        warm = (self.seen.float() / 4000).clamp(max=1)
        return self.fc(x) * warm


def uncounted(fault: Fault) -> float:
    """Return which share of the steps a counter has not counted."""
    case = fault.build()
    for _ in run(case):
        pass
    return 1 - float(case.model[1].seen - 2040.0) / case.steps  # type: ignore[index]


@fault(
    "swallowed_update",
    "add_",
    "1",
    seed=408,
    role="state",
    parameter="1.seen",
    step=30,
    effect=(uncounted, 0.5),
    also=("add", "__iadd__"),
)
def counter_in_half() -> Case:
    """A warm-up counter in an fp16 buffer, resumed at 2040: 2048 + 1 is 2048, and the warm-up never ends."""
    model = nn.Sequential(nn.Linear(5, 6), Vocabulary(), nn.Linear(8, 4))
    return case(model, lambda k: (normal(k, 8, 5), labels(k, 8)))


def stopped_average(fault: Fault) -> float:
    """Return the share of RMSprop's averages that are after all steps what they were after the first."""
    case = fault.build()
    early = None
    for number, _ in enumerate(run(case)):
        average = case.optimizer.state[case.model[0].weight]["square_avg"]  # type: ignore[index]
        if number == 0:
            assert average.dtype is torch.bfloat16
            early = average.clone()
    assert early is not None
    return float((average == early).double().mean())


@fault(
    "low_state",
    "",
    "0",
    seed=409,
    role="state",
    parameter="0.weight",
    phase="update",
    step=40,
    effect=(stopped_average, 0.9),
    also=("0.bias", "3.weight", "3.bias"),
)
def average_of_rmsprop() -> Case:
    """RMSprop's average of squares in bf16: 0.999 of it rounds back to it, so one large gradient damps for ever."""
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(36, 4))
    return case(
        model,
        lambda k: (normal(k, 16, 2, 8), labels(k, 16), torch.tensor(20.0 if k == 1 else 0.01)),
        lambda m, x, y, size: size * classify(m, x, y),
        policy=hs.Policy.of("O3", dtype="bf16"),
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.999),
    )
