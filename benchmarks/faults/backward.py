"""List A, faults of the backward pass: the loss is finite, a gradient is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import BF16, FULL, TORCH, UNSCALED, Case, at, case, fault, labels, model_of, normal

# ------------------------------------------------------------------ poles of derivatives


def distance(model: Any, a: Tensor, b: Tensor) -> Tensor:
    gap = (model(a) - model(b)).float().pow(2).sum(-1)
    return torch.sqrt(gap).mean()  # FAULT distance_of_twins


@fault("invalid", "sqrt", seed=61, phase="backward", step=3)
def distance_of_twins() -> Case:
    """The distance of two equal embeddings is 0, the derivative of sqrt there infinite, and infinity times 0 NaN."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def batch(step: int) -> tuple[Any, ...]:
        a, b = normal(step, 5, 6), normal(step + 30, 5, 6)
        if step == 3:
            b[1] = a[1]
        return a, b

    return case(model, batch, distance, policy=BF16)


class LogOfPresent(nn.Module):
    def forward(self, h: Tensor, present: Tensor) -> Any:
        h = h.abs() * present
        logs = torch.log(h)  # FAULT where_hides_the_log
        return torch.where(present > 0, logs, 0.0)


def counts_forward(self: Any, x: Tensor, present: Tensor) -> Any:
    return self.out(self.log(self.fc(x), present))


@fault("invalid", "log", "log", seed=62, phase="backward", step=2)
def where_hides_the_log() -> Case:
    """where() hides -inf in the forward pass; backward, its gradient 0 meets the pole of the logarithm: 0 / 0."""
    model = model_of(counts_forward, fc=nn.Linear(6, 12), log=LogOfPresent(), out=nn.Linear(12, 4))

    def batch(step: int) -> tuple[Any, ...]:
        present = torch.ones(8, 12)
        if step == 2:
            present[3, 4:] = 0.0
        return normal(step, 8, 6), present, labels(step, 8)

    return case(model, batch, lambda m, x, present, y: F.cross_entropy(m(x, present), y), policy=BF16)


def angle(model: Any, a: Tensor, b: Tensor) -> Tensor:
    u, v = F.normalize(model(a).float(), dim=-1), F.normalize(model(b).float(), dim=-1)
    cosine = torch.round((u * v).sum(-1), decimals=5).detach() + 0 * (u * v).sum(-1)
    return torch.acos(cosine).mean()  # FAULT angle_of_equals


@fault("invalid", "acos", seed=63, phase="backward", step=2)
def angle_of_equals() -> Case:
    """The angle between a sample and itself: acos(1) is 0 and its derivative infinite."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    return case(model, lambda k: (normal(k, 5, 6), normal(k + (0 if k == 2 else 20), 5, 6)), angle, policy=FULL)


def whitened_forward(self: Any, x: Tensor) -> Any:
    h = self.fc(x).float()
    covariance = h.T.float().matmul(h).float() / len(h) + 1e-3 * torch.eye(3)
    values, axes = torch.linalg.eigh(covariance)  # FAULT equal_eigenvalues
    return h @ (axes * values.rsqrt())


@fault("invalid", "linalg.eigh", "white", seed=64, phase="backward", step=2)
def equal_eigenvalues() -> Case:
    """Whitening a batch of silence: all eigenvalues are equal, and the derivative of the axes divides by their gaps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.white, self.out = model_of(whitened_forward, fc=nn.Linear(6, 3, bias=False)), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.white(x))

    model = Net()
    return case(
        model,
        lambda k: (normal(k, 8, 6) * (0.0 if k == 2 else 1.0), labels(k, 8)),
        lambda m, x, y: F.cross_entropy(m(x), y),
        policy=BF16,
    )


def critic_forward(self: Any, x: Tensor) -> Any:
    return self.body(x)


def penalised_critic(model: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    score = model(x).float().sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    norms = (gradient * gradient).sum(-1).sqrt()  # FAULT gradient_penalty
    return score / len(x) + (norms - 1).pow(2).mean()


@fault("invalid", "sqrt", seed=65, phase="backward", step=2)
def gradient_penalty() -> Case:
    """A GAN's gradient penalty where the critic is flat: the norm of a zero gradient is differentiated again."""
    model = model_of(critic_forward, body=nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))

    return case(
        model,
        lambda k: (normal(k, 6, 6),),
        penalised_critic,
        policy=FULL,
        before=at(2, lambda: model.body[0].bias.fill_(-50.0)),
    )


# ------------------------------------------------------------------ gradients too large for fp16


@fault("overflow", "linear", "0", seed=66, phase="backward", step=2, cures=("module fp32", "bf16", "scale"))
def summed_loss() -> Case:
    """A loss summed over 4096 rows instead of averaged: the weight gradient of the first layer leaves fp16."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        predicted = model(x)  # FAULT summed_loss
        return F.l1_loss(predicted, y, reduction="sum")

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 4096, 2).abs() * (2000.0 if step == 2 else 1.0)
        return x, torch.full((4096, 1), 3.0)

    def gentle(step: int) -> None:
        with torch.no_grad():
            model[0].weight.copy_(1e-5 * torch.ones(4, 2))  # type: ignore[operator]
            model[2].weight.copy_(0.1 * torch.ones(1, 4))  # type: ignore[operator]

    return case(
        model, batch, loss_fn, policy=UNSCALED, optimizer=torch.optim.SGD(model.parameters(), lr=1e-12), before=gentle
    )


def dense_forward(self: Any, x: Tensor) -> Any:
    h = self.features(x)
    return self.head(h)  # FAULT pixel_sum


@fault("overflow", "conv2d", "head", seed=67, phase="backward", step=2, cures=("op fp32", "bf16", "scale"))
def pixel_sum() -> Case:
    """A segmentation loss summed over pixels: large images bring the head's bias gradient past 65504."""
    model = model_of(
        dense_forward, features=nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid()), head=nn.Conv2d(4, 1, 1)
    )

    def batch(step: int) -> tuple[Any, ...]:
        side = 96 if step == 2 else 8
        return normal(step, 2, 1, side, side), torch.zeros(2, 1, side, side)

    def bias(step: int) -> None:
        with torch.no_grad():
            model.head.bias.fill_(1.0)
            model.head.weight.fill_(0.01)

    return case(
        model,
        batch,
        lambda m, x, y: 4 * F.l1_loss(m(x), y, reduction="sum"),
        policy=UNSCALED,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        before=bias,
    )


def ratio_forward(self: Any, x: Tensor) -> Any:
    numerator, denominator = self.top(x), self.bottom(x)
    return numerator / denominator  # FAULT small_denominator


@fault("overflow", "div", "ratio", seed=68, phase="backward", step=2, cures=("bf16",))
def small_denominator() -> Case:
    """A quotient of fp16 numbers is 1000, its derivative by the denominator a million."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ratio, self.out = model_of(ratio_forward, top=nn.Linear(6, 8), bottom=nn.Linear(6, 8)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.ratio(x))

    model = Net()

    def shrink(step: int) -> None:
        with torch.no_grad():
            for layer, value in ((model.ratio.top, 0.2), (model.ratio.bottom, 2e-4 if step == 2 else 1.0)):
                layer.weight.zero_()
                layer.bias.fill_(value)
            model.out.weight.fill_(0.2)

    return case(
        model,
        lambda k: (normal(k, 2, 6), torch.zeros(2, 3)),
        lambda m, x, y: F.l1_loss(m(x), y),
        policy=UNSCALED,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        before=shrink,
    )


def nll_by_hand(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(model(x), -1).gather(1, y[:, None])
    return -torch.log(p).mean()  # FAULT log_of_tiny


@fault("overflow", "log", seed=69, phase="backward", step=2, cures=("bf16", "scale"))
def log_of_tiny() -> Case:
    """The logarithm of a probability of 1e-6 is -14, its derivative a million: the gradient leaves fp16."""
    model: Any = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3))

    return case(
        model,
        lambda k: (torch.arange(4), torch.ones(4, dtype=torch.long)),
        nll_by_hand,
        policy=TORCH.replace(scale=1.0),
        before=at(2, lambda: model[1].bias.copy_(torch.tensor([14.0, 0.0, 0.0]))),
    )


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        low = grads[0].to(torch.float16)
        return (low * 1e5).to(grads[0].dtype)  # FAULT function_backward


amplify: Any = Amplify.apply


def reversed_forward(self: Any, x: Tensor) -> Any:
    return self.out(amplify(self.fc(x)))


@fault("overflow", "mul", seed=70, phase="backward", step=1)
def function_backward() -> Case:
    """A custom autograd.Function whose backward computes in fp16 by hand; forward it does nothing."""
    model = model_of(reversed_forward, fc=nn.Linear(5, 8), out=nn.Linear(8, 3))
    return case(
        model, lambda k: (normal(k, 6, 5), labels(k, 6, 3)), lambda m, x, y: 1e2 * F.cross_entropy(m(x), y), policy=BF16
    )


def chain_forward(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = layer(x)  # FAULT exploding_gradient
    return x


@fault("overflow", "linear", "layers.1", seed=71, phase="backward", step=2, cures=("bf16", "scale"))
def exploding_gradient() -> Case:
    """Large weights and tiny inputs: forward all is small, backward each layer multiplies the gradient by 100."""
    model = model_of(chain_forward, layers=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4)))

    def explode() -> None:
        for layer in model.layers:
            layer.weight.copy_(100 * torch.eye(4))

    return case(
        model,
        lambda k: (1e-5 * normal(k, 4, 4).abs(), torch.full((4, 4), 2000.0)),
        lambda m, x, y: F.l1_loss(m(x), y, reduction="sum"),
        policy=UNSCALED,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        before=at(2, explode),
    )
