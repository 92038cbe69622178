"""List B: faults that stay finite. Each has an effect, measured by brute force, and the least size that counts.

Where the effect is measured against exact arithmetic, the same program runs in fp64 without halfstep.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import (
    BF16,
    FULL,
    UNSCALED,
    Case,
    Fault,
    Measure,
    case,
    classify,
    fault,
    generator,
    labels,
    model_of,
    normal,
    run,
    tokens,
)

# ------------------------------------------------------------------ ways to measure


def exact(value: Any) -> Any:
    """Return a batch in fp64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def gradients(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (parameter -> gradient at the first call, under the policy; the same in fp64), both unscaled."""
    model = copy.deepcopy(case.model).double()
    case.loss_fn(model, *map(exact, case.batch(1))).backward()
    reference = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found: dict[str, Tensor] = {}
    scale = case.policy.scale if isinstance(case.policy.scale, float) else 1.0

    def keeping(name: str) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.double() / scale

        return keep

    for name, parameter in case.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(keeping(name))
    next(run(case))
    return found, reference


def lost_share(fault: Fault) -> float:
    """Return the share of a parameter's gradient elements that are 0 and are not in fp64."""
    name = fault.truth.parameter
    found, reference = gradients(fault.build())
    return float(((found[name] == 0) & (reference[name] != 0)).double().mean() / (reference[name] != 0).double().mean())


def gradient_error(fault: Fault) -> float:
    """Return the relative error of a parameter's gradient against fp64, in the 2-norm."""
    name = fault.truth.parameter
    found, reference = gradients(fault.build())
    return float((found[name] - reference[name]).norm() / reference[name].norm())


def unmoved_share(fault: Fault) -> float:
    """Return the share of a parameter's elements that training has left bit for bit, and in fp32 has not."""
    name = fault.truth.parameter

    def moved(policy: hs.Policy | None) -> Tensor:
        case = fault.build()
        chosen = case.policy if policy is None else policy
        before = None
        for number, (step, result) in enumerate(run(case, chosen)):
            assert not result.skipped
            if number == 0:
                before = step.model.get_parameter(name).detach().clone()
        assert before is not None
        return case.model.get_parameter(name).detach() != before

    low, full = moved(None), moved(FULL)
    return float((full & ~low).double().sum() / full.double().sum())


def output_error(of: Callable[[Any], Tensor]) -> Measure:
    """Return the relative error, in the 2-norm, of something that a forward pass leaves in the model, against fp64."""

    def measure(fault: Fault) -> float:
        case = fault.build()
        model = copy.deepcopy(case.model).double()
        case.loss_fn(model, *map(exact, case.batch(1)))
        for _ in run(case):
            break
        found, reference = of(case.model).double(), of(model).double()
        return float((found - reference).norm() / reference.norm())

    return measure


# ------------------------------------------------------------------ underflow of gradients


@fault("underflow", "linear", "0", seed=201, role="gradient", parameter="0.weight", effect=(lost_share, 0.3))
def deep_sigmoid_net() -> Case:
    """Each sigmoid divides the gradient by four: after eight of them it is 0 in fp16 at a loss scale of 1."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(16, 16), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    policy = UNSCALED
    return case(model, lambda k: (normal(k, 64, 16), labels(k, 64)), policy=policy, steps=3)


def words_forward(self: Any, x: Tensor) -> Any:
    return self.out(torch.tanh(self.fc(self.embed(x) * 1e-2)))


@fault("underflow", "embedding", "embed", seed=202, role="gradient", parameter="embed.weight", effect=(lost_share, 0.3))
def embedding_gradient() -> Case:
    """An embedding scaled by 0.01 under a loss scale that is too low: its rows' gradients are 0 in fp16."""
    model = model_of(words_forward, embed=nn.Embedding(40, 16), fc=nn.Linear(16, 16), out=nn.Linear(16, 40))
    return case(
        model,
        lambda k: (tokens(k, (64, 64), 40),),
        lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.roll(1, 1).flatten()),
        policy=hs.Policy.of("O2", dtype="fp16", scale=2.0**-6),
        steps=2,
    )


def two_tasks_forward(self: Any, x: Tensor) -> Any:
    h = self.body(x)
    return self.main(h), self.side(h)


@fault("underflow", "linear", "side", seed=203, role="gradient", parameter="side.weight", effect=(lost_share, 0.5))
def lightly_weighted_loss() -> Case:
    """A second loss of weight 1e-7: it trains nothing, since its gradients are below fp16's smallest number."""
    model = model_of(
        two_tasks_forward, body=nn.Sequential(nn.Linear(8, 16), nn.ReLU()), main=nn.Linear(16, 4), side=nn.Linear(16, 4)
    )

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        main, side = model(x)
        return F.cross_entropy(main, y) + 1e-7 * F.cross_entropy(side, y)

    return case(model, lambda k: (normal(k, 32, 8), labels(k, 32)), loss_fn, policy=UNSCALED, steps=2)


# ------------------------------------------------------------------ underflow, overflow and saturation of activations


class Fourth(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        energy = h * h  # FAULT small_squares
        self.seen = energy.detach()
        return self.out(energy * 1000.0)


def zero_squares(fault: Fault) -> float:
    case = fault.build()
    next(run(case))
    return float((case.model.seen == 0).double().mean())  # type: ignore[union-attr]


@fault("underflow", "mul", seed=204, role="activation", effect=(zero_squares, 0.3))
def small_squares() -> Case:
    """Activations of 1e-4 are fp16 numbers, their squares are not: they become 0 before they are scaled up."""
    model = Fourth()
    with torch.no_grad():
        model.fc.weight.mul_(1e-3)
        model.fc.bias.zero_()
    return case(model, lambda k: (normal(k, 32, 8) * 0.3, labels(k, 32)), policy=UNSCALED, lr=1e-6, steps=2)


class SilentNorm(nn.Module):
    seen: Tensor

    def forward(self, x: Tensor) -> Any:
        squares = x * x  # FAULT norm_that_silences
        self.seen = squares.detach()
        return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)


def silenced(fault: Fault) -> float:
    case = fault.build()
    next(run(case))
    return float(torch.isinf(case.model[1].seen).any(-1).double().mean())  # type: ignore[index]


@fault("overflow", "mul", "1", seed=205, role="activation", effect=(silenced, 0.8))
def norm_that_silences() -> Case:
    """RMSNorm by hand: squares are inf in fp16, and x / inf is 0: nothing is NaN, and nothing is learned."""
    model = nn.Sequential(nn.Linear(16, 32), SilentNorm(), nn.Linear(32, 4))
    return case(model, lambda k: (normal(k, 8, 16) * 600, labels(k, 8)), policy=UNSCALED, steps=2)


class Sharp(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        weights = torch.softmax(scores, -1)  # FAULT sharp_attention
        self.seen = weights.detach()
        return self.out((weights @ self.value(x)).mean(1))


def hard_weights(fault: Fault) -> float:
    case = fault.build()
    next(run(case))
    return float((case.model.seen == 0).double().mean())  # type: ignore[union-attr]


@fault("saturation", "softmax", seed=206, role="activation", effect=(hard_weights, 0.5))
def sharp_attention() -> Case:
    """Unscaled attention logits: most probabilities are 0 in fp16, and no gradient reaches the keys."""
    model = Sharp()
    with torch.no_grad():
        model.query.weight.mul_(8)
        model.key.weight.mul_(8)
    return case(model, lambda k: (normal(k, 8, 12, 8), labels(k, 8)), steps=2)


# ------------------------------------------------------------------ rounding


class Positions(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        place = torch.arange(x.shape[1], dtype=torch.bfloat16)
        rate = 1e4 ** (-torch.arange(8) / 8)
        waves = torch.sin(place[:, None] * rate.to(place.dtype))  # FAULT positions_in_bf16
        self.seen = waves.detach()
        return self.out(F.gelu(self.fc(x + waves)).mean(1))


def wrong_waves(fault: Fault) -> float:
    case = fault.build()
    next(run(case))
    place, rate = torch.arange(512).double(), 1e4 ** (-torch.arange(8).double() / 8)
    true = torch.sin(place[:, None] * rate)
    return float((case.model.seen.double() - true).norm() / true.norm())  # type: ignore[operator]


@fault("rounding", "mul", seed=207, role="activation", effect=(wrong_waves, 0.05), also=("sin", "arange"))
def positions_in_bf16() -> Case:
    """Positional encodings computed in bf16: from 256 on positions round to even ones and phases to anything."""
    model = Positions()
    return case(model, lambda k: (normal(k, 2, 512, 8), labels(k, 2)), policy=BF16, steps=2)


class Denoiser(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time, self.fc, self.out = nn.Linear(2, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        angle = t.to(torch.float16)[:, None] * torch.tensor([1.0, 0.9], dtype=torch.float16)
        clock = torch.sin(angle)  # FAULT timestep_embedding
        self.seen = clock.detach()
        return self.out(torch.tanh(self.fc(x) + self.time(clock)))


def wrong_clock(fault: Fault) -> float:
    case = fault.build()
    next(run(case))
    true = torch.sin(case.batch(1)[1].double()[:, None] * torch.tensor([1.0, 0.9]).double())
    return float((case.model.seen.double() - true).norm() / true.norm())  # type: ignore[operator]


@fault("rounding", "mul", seed=208, role="activation", effect=(wrong_clock, 0.3), also=("sin", "to"))
def timestep_embedding() -> Case:
    """A diffusion model's time in fp16: above 2048 odd timesteps do not exist, and their sines are other numbers."""
    model = Denoiser()
    return case(
        model,
        lambda k: (normal(k, 64, 8), torch.randint(2100, 9999, (64,), generator=generator(k))),
        lambda m, x, t: F.mse_loss(m(x, t), x),
        steps=2,
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        branch = self.fc(x) * 1e-3
        return x + branch  # FAULT residual_stream


class Stream(nn.Module):
    seen: Tensor
    enter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Small() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        self.enter = x.detach()
        for block in self.blocks:
            x = block(x)
        self.seen = (x - self.enter).detach()
        return self.head(x)


@fault(
    "rounding",
    "add",
    "blocks.0",
    seed=209,
    role="activation",
    effect=(output_error(lambda m: m.seen), 0.5),
    also=("blocks.1", "blocks.2", "blocks.3"),
)
def residual_stream() -> Case:
    """A residual stream in bf16: branches of 0.004 are half an ulp of a stream of 4 and are rounded away."""
    model = Stream()
    return case(
        model, lambda k: (normal(k, 16, 16) + 4.0, labels(k, 16)), policy=hs.Policy.of("O2", dtype="bf16"), steps=2
    )


def window_error(fault: Fault) -> float:
    """Return the error of the last bias's gradient summed over a window of 256, against the sum of its parts."""
    case = fault.build()
    parts: list[Tensor] = []
    last: list[Tensor] = []
    bias = case.model.get_parameter("2.bias")
    bias.register_hook(lambda g: parts.append(g.detach().double()))
    bias.register_post_accumulate_grad_hook(lambda p: last.append(p.grad.detach().double().clone()))
    for _ in run(case):
        pass
    total = torch.stack(parts).sum(0)
    return float((last[-1] - total).norm() / total.norm())


@fault("rounding", "", "2", seed=210, role="gradient", parameter="2.bias", step=256, effect=(window_error, 0.05))
def accumulated_in_bf16() -> Case:
    """The gradients of 256 micro-batches are summed in bf16: late ones are too small beside the sum."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return case(
        model,
        lambda k: (normal(k, 4, 8), normal(k + 7, 4, 1) + 3.0),
        lambda m, x, y: F.mse_loss(m(x), y),
        policy=hs.Policy.of("pure", dtype="bf16", grads="param"),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        options={"accumulate": 256},
    )


def loss_of_low(model: Any, x: Tensor, y: Tensor) -> Any:
    predicted = model(x)
    error = predicted - y.to(predicted.dtype)  # FAULT error_in_bf16
    model.seen = error.detach()
    return error.float().pow(2).mean()


class Regressor(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


@fault(
    "rounding",
    "sub",
    seed=211,
    role="activation",
    effect=(output_error(lambda m: m.seen), 0.5),
    also=("to", "linear", "fc"),
)
def error_in_bf16() -> Case:
    """A regression of numbers around 300 in bf16, whose step there is 2: the error that is left is rounding."""
    model = Regressor()
    with torch.no_grad():
        model.fc.bias.fill_(300.0)
    return case(
        model,
        lambda k: (normal(k, 64, 8) * 0.1, 300.0 + 0.3 * normal(k + 1, 64, 1)),
        loss_of_low,
        policy=hs.Policy.of("mixed", dtype="bf16", outputs="keep"),
        steps=2,
    )


class RunningMean(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), 10.0, dtype=torch.float16))

    def forward(self, h: Tensor) -> Any:
        if self.training:
            now = h.detach().mean(0).to(self.mean.dtype)
            self.mean.add_((now - self.mean) * 1e-3)  # FAULT running_statistics
        return h - self.mean


def stuck_statistics(fault: Fault) -> float:
    """Return which share of the way of an fp64 average a running mean has not gone."""
    case = fault.build()
    for _ in run(case):
        pass
    went = case.model[1].mean.double() - 10.0  # type: ignore[index]
    should = 3.0 * (1 - 0.999**case.steps)
    return float(1 - went.mean() / should)


@fault(
    "swallowed_update",
    "add",
    "1",
    seed=212,
    role="state",
    parameter="1.mean",
    step=30,
    effect=(stuck_statistics, 0.9),
    also=("add_",),
)
def running_statistics() -> Case:
    """Running statistics in an fp16 buffer: each update is less than half an ulp, and the mean stays where it began."""
    model = nn.Sequential(nn.Linear(4, 8), RunningMean(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(13.0)  # type: ignore[operator]
        model[0].weight.mul_(0.01)  # type: ignore[operator]
    return case(model, lambda k: (normal(k, 32, 4), labels(k, 32)), lr=1e-5)


class Codebook(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.register_buffer("average", torch.ones(4, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        nearest = torch.cdist(h.float(), self.average.float()).argmin(-1)
        code = self.average[nearest]
        if self.training:
            self.average.lerp_(h.detach().mean(0).to(self.average.dtype), 1e-3)  # FAULT ema_in_bf16
        return h, code


def frozen_average(fault: Fault) -> float:
    case = fault.build()
    for _ in run(case):
        pass
    return float((case.model.average == 1).double().mean())  # type: ignore[union-attr]


@fault(
    "swallowed_update",
    "lerp",
    seed=213,
    role="state",
    parameter="average",
    step=20,
    effect=(frozen_average, 0.9),
    also=("lerp_",),
)
def ema_in_bf16() -> Case:
    """A moving average with a rate of 0.001 in a bf16 buffer: each update is below half an ulp, none arrives."""
    model = Codebook()

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        h, code = model(x)
        return F.mse_loss(h.float(), code.float())

    return case(model, lambda k: (normal(k, 16, 6),), loss_fn, policy=BF16, lr=1e-5)


# ------------------------------------------------------------------ updates and optimizer state


@fault(
    "swallowed_update",
    "",
    "0",
    seed=214,
    role="update",
    parameter="0.weight",
    phase="update",
    step=2,
    effect=(unmoved_share, 0.9),
    also=("2.weight",),
)
def small_learning_rate() -> Case:
    """bf16 weights without masters and a learning rate of 0.001: updates are below half an ulp of the weights."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() * (0.5 + parameter.abs()))
    return case(
        model,
        lambda k: (normal(k, 16, 8) * 0.3, labels(k, 16)),
        policy=hs.Policy.of("O3", dtype="bf16"),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        steps=6,
    )


@fault(
    "swallowed_update",
    "",
    "0",
    seed=215,
    role="update",
    parameter="0.weight",
    phase="update",
    step=2,
    effect=(unmoved_share, 0.99),
    also=("2.weight",),
)
def weight_decay() -> Case:
    """Weight decay times learning rate is 1e-4 of a weight, half an ulp of bf16 1/512 of it or more: no decay."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return case(
        model,
        lambda k: (normal(k, 8, 8),),
        lambda m, x: 0.0 * m(x).sum(),
        policy=hs.Policy.of("O3", dtype="bf16"),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=1e-2),
        steps=10,
    )


@fault(
    "swallowed_update",
    "",
    "1",
    seed=216,
    role="update",
    parameter="1.weight",
    phase="update",
    step=2,
    effect=(unmoved_share, 0.4),
)
def norm_weights() -> Case:
    """LayerNorm's weights are 1, Adam's steps 0.001: bf16 has nothing between 0.996, 1 and 1.008."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].weight.fill_(1.0)  # type: ignore[operator]
    return case(
        model,
        lambda k: (normal(k, 16, 8), labels(k, 16)),
        policy=hs.Policy.of("pure", dtype="bf16", master="none"),
        steps=6,
    )


def undecayed_moment(fault: Fault) -> float:
    """Return the share of second moments that are after all steps what they were after the first."""
    case = fault.build()
    first = None
    for number, _ in enumerate(run(case)):
        moment = case.optimizer.state[case.model[0].weight]["exp_avg_sq"]  # type: ignore[index]
        if number == 0:
            assert moment.dtype is torch.bfloat16
            first = moment.clone()
    assert first is not None
    return float((moment == first).double().mean())


@fault(
    "low_state",
    "",
    "0",
    seed=217,
    role="state",
    parameter="0.weight",
    phase="update",
    step=40,
    effect=(undecayed_moment, 0.9),
    also=("0.bias", "2.weight", "2.bias"),
)
def second_moment_in_bf16() -> Case:
    """Adam's second moment in bf16: times 0.999 it rounds back to itself, and one large gradient is kept for ever."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return case(
        model,
        lambda k: (normal(k, 16, 8), labels(k, 16), torch.tensor(10.0 if k == 1 else 0.01)),
        lambda m, x, y, size: size * classify(m, x, y),
        policy=hs.Policy.of("O3", dtype="bf16"),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999)),
    )


def vanished_moment(fault: Fault) -> float:
    case = fault.build()
    for _ in run(case):
        pass
    state = case.optimizer.state[case.model[0].weight]  # type: ignore[index]
    return float(((state["exp_avg_sq"] == 0) & (state["exp_avg"] != 0)).double().mean())


@fault(
    "low_state",
    "",
    "0",
    seed=218,
    role="state",
    parameter="0.weight",
    phase="update",
    step=3,
    effect=(vanished_moment, 0.5),
    also=("0.bias", "2.weight", "2.bias"),
)
def second_moment_in_fp16() -> Case:
    """Adam's second moment in fp16: squares of gradients of 1e-4 are 0, and only a large eps keeps the step finite."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return case(
        model,
        lambda k: (normal(k, 16, 8), labels(k, 16)),
        lambda m, x, y: 1e-2 * classify(m, x, y),
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4),
    )
