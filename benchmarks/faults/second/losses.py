"""List A of the second set, faults of the forward pass inside losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import (
    ALL,
    BF16,
    FULL,
    MIXED,
    TORCH,
    Case,
    at,
    case,
    fault,
    labels,
    model_of,
    normal,
    tokens,
)

# ------------------------------------------------------------------ contrastive losses


class NtXent(nn.Module):
    """A loss that is a module, outside of the model."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        every = F.normalize(torch.cat([a, b]), dim=-1)
        similarity = every @ every.T / 0.07
        weights = torch.exp(similarity)  # FAULT simclr_loss
        others = weights.sum(-1) - weights.diagonal()
        partner = similarity.diagonal(len(a)).repeat(2)
        return (torch.log(others) - partner).mean()


@fault("overflow", "exp", seed=321, step=1, also=("NtXent",), cures=("op fp32", "bf16"))
def simclr_loss() -> Case:
    """SimCLR's loss as papers print it: exp(1 / 0.07) of a sample with itself is 1.6e6."""
    model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 8))
    criterion = NtXent()
    return case(
        model,
        lambda k: (x := normal(k, 5, 2, 12), x + 0.1 * normal(k + 40, 5, 2, 12)),
        lambda m, a, b: criterion(m(a), m(b)),
        policy=TORCH.replace(scale=1.0),
    )


def hardest_triplet(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model(x).float()
    squares = (h * h).sum(-1)
    gram = h @ h.T
    distance = torch.sqrt(squares[:, None] - 2 * gram + squares + 1e-2)  # FAULT expanded_distance
    same = y[:, None] == y
    return F.relu(distance.masked_fill(~same, 0.0).amax(-1) - distance.masked_fill(same, 1e4).amin(-1) + 0.3).mean()


@fault("invalid", "sqrt", seed=322, step=2, cures=("op fp32: matmul",))
def expanded_distance() -> Case:
    """Triplets by |a|^2 - 2ab + |b|^2: the product is rounded to bf16, the squares are not, and the sum is negative."""
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    return case(
        model,
        lambda k: (normal(k, 8, 6), torch.arange(8) // 2),
        hardest_triplet,
        policy=BF16,
        before=at(2, lambda: model[2].bias.copy_(3.0 + 0.37 * torch.arange(8))),
    )


# ------------------------------------------------------------------ sequences


def recogniser_forward(self: Any, x: Tensor) -> Any:
    return self.out(F.relu(self.conv(x)).permute(2, 0, 1)).log_softmax(-1)


def transcribe(model: Any, rows: dict[str, Tensor]) -> Tensor:
    frames = model(rows["audio"])
    lengths = torch.full((frames.shape[1],), len(frames))
    return F.ctc_loss(frames, rows["text"], lengths, rows["lengths"])  # FAULT text_longer_than_audio


@fault("invalid", "ctc_loss", seed=323, step=3)
def text_longer_than_audio() -> Case:
    """CTC with a transcript that does not fit into the frames that striding has left: its probability is 0."""
    model = model_of(recogniser_forward, conv=nn.Conv1d(4, 8, 3, stride=2, padding=1), out=nn.Linear(8, 6))

    def batch(step: int) -> tuple[Any, ...]:
        text = tokens(step, (3, 7), 5) + 1
        lengths = torch.tensor([2, 3, 7 if step == 3 else 2])
        return ({"audio": normal(step, 3, 4, 10), "text": text, "lengths": lengths},)

    return case(model, batch, transcribe)


def student_forward(self: Any, x: Tensor, allowed: Tensor) -> Any:
    return self.out(self.embed(x)).masked_fill(~allowed, float("-inf"))


def distil(model: Any, x: Tensor, allowed: Tensor, teacher: Tensor) -> Tensor:
    ours = F.log_softmax(model(x, allowed), -1)
    theirs = F.log_softmax(teacher.masked_fill(~allowed, float("-inf")), -1)
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")  # FAULT distilled_mask


@fault("invalid", "kl_div", seed=324, step=2)
def distilled_mask() -> Case:
    """Distillation over a vocabulary of which student and teacher may not use all: 0 * (-inf - -inf)."""
    model = model_of(student_forward, embed=nn.Embedding(12, 8), out=nn.Linear(8, 12))

    def batch(step: int) -> tuple[Any, ...]:
        allowed = torch.arange(12) < (9 if step == 2 else 12)
        return tokens(step, (6,), 12), allowed, normal(step, 6, 12)

    return case(model, batch, distil, policy=BF16)


def actor_forward(self: Any, x: Tensor) -> Any:
    return self.actions(torch.tanh(self.body(x))).log_softmax(-1)


def importance(model: Any, x: Tensor, action: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = torch.exp(model(x).gather(-1, action[..., None])[..., 0] - old)
    trajectory = ratio.prod(-1)  # FAULT trajectory_ratio
    return -(trajectory * advantage).mean()


@fault("overflow", "prod", seed=325, step=3)
def trajectory_ratio() -> Case:
    """Off-policy weights of whole trajectories: 200 ratios of about 3 multiply past fp32 too."""
    model = model_of(actor_forward, body=nn.Linear(5, 12), actions=nn.Linear(12, 3))

    def batch(step: int) -> tuple[Any, ...]:
        length = 200 if step == 3 else 10
        return normal(step, 4, length, 5), tokens(step, (4, length), 3), torch.tensor(-2.2), normal(step, 4)

    return case(model, batch, importance, policy=BF16)


def ray_forward(self: Any, x: Tensor) -> Any:
    density, colour = self.field(x).unbind(-1)
    light = torch.cumprod(torch.exp(-F.softplus(density)), -1)
    seen = light[..., :-1] - light[..., 1:]
    hits = seen / (1 - light[..., -1:])  # FAULT empty_ray
    return (hits * torch.sigmoid(colour[..., 1:])).sum(-1)


@fault("invalid", "div", seed=326, step=2)
def empty_ray() -> Case:
    """A radiance field's ray through nothing: no light is lost on its way, and its weights are normalised by that."""
    model = model_of(ray_forward, field=nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)))
    return case(
        model,
        lambda k: (normal(k, 4, 16, 3), normal(k + 20, 4).sigmoid()),
        lambda m, x, y: F.mse_loss(m(x), y),
        policy=BF16,
        before=at(2, lambda: model.field[2].bias[:1].fill_(-60.0)),
    )


# ------------------------------------------------------------------ several losses, learned weights


def perception_forward(self: Any, x: Tensor) -> Any:
    h = self.body(x)
    return {name: head(h) for name, head in self.heads.items()}


def uncertain(model: Any, x: Tensor, depth: Tensor, kind: Tensor) -> Any:
    out = model(x)
    each = torch.stack([F.l1_loss(out["depth"][:, 0], depth), F.cross_entropy(out["kind"], kind)])
    weights = torch.exp(-model.log_variance)  # FAULT uncertainty_weights
    return (weights * each + model.log_variance).sum()


@fault("overflow", "exp", seed=327, step=3)
def uncertainty_weights() -> Case:
    """Losses weighted by learned uncertainty: a task solved exactly has driven its log-variance to -90."""
    model = model_of(
        perception_forward,
        body=nn.Sequential(nn.Linear(6, 16), nn.GELU()),
        heads=nn.ModuleDict({"depth": nn.Linear(16, 1), "kind": nn.Linear(16, 4)}),
        log_variance=nn.Parameter(torch.zeros(2)),
    )
    return case(
        model,
        lambda k: (normal(k, 8, 6), normal(k + 1, 8), labels(k, 8)),
        uncertain,
        before=at(3, lambda: model.log_variance[:1].fill_(-90.0)),
    )


def adapted_forward(self: Any, x: Tensor) -> Any:
    return torch.tanh(self.body(x))


def adapt(model: Any, x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
    h = model(x)
    inner = F.cross_entropy(model.head(h), y)
    (gradient,) = torch.autograd.grad(inner, model.head.weight, create_graph=True)
    fast = model.head.weight - rate * gradient
    logits = F.linear(h, fast)  # FAULT inner_loop
    return F.cross_entropy(logits, y)


@fault("overflow", "linear", seed=328, step=2, cures=ALL)
def inner_loop() -> Case:
    """Meta-learning: an inner learning rate of 1e7 makes weights that only fp32 holds, and the product takes fp16."""
    model = model_of(adapted_forward, body=nn.Linear(5, 8), head=nn.Linear(8, 3))
    return case(
        model,
        lambda k: (normal(k, 6, 5), labels(k, 6, 3), torch.tensor(1e7 if k == 2 else 0.1)),
        adapt,
        policy=MIXED.replace(scale=2.0**-10),
    )


def critic_forward(self: Any, x: Tensor) -> Any:
    return self.body(x)[:, 0]


def critic_loss(model: Any, real: Tensor, made: Tensor) -> Any:
    real = real.half().requires_grad_()
    score = model(real).float()
    (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    penalty = (gradient * gradient).flatten(1).sum(-1, dtype=torch.float32)  # FAULT penalty_of_half_images
    return F.softplus(model(made)).mean() + F.softplus(-score).mean() + 1e-6 * penalty.mean()


@fault("overflow", "mul", seed=331, step=3, cures=("op fp32",))
def penalty_of_half_images() -> Case:
    """A critic's gradient penalty: its images come in half, so the slopes do, and the square of 300 is infinite."""
    model = model_of(
        critic_forward, body=nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
    )
    return case(
        model,
        lambda k: (normal(k, 3, 1, 6, 6), normal(k + 80, 3, 1, 6, 6)),
        critic_loss,
        policy=MIXED.replace(scale=1.0),
        before=at(3, lambda: model.body[3].weight.fill_(400.0)),
    )


def quantile_forward(self: Any, x: Tensor) -> Any:
    return self.body(x)[:, 0]


def percentage(model: Any, x: Tensor, y: Tensor) -> Any:
    predicted = model(x)
    error = (predicted - y.to(predicted.dtype)) / y.to(predicted.dtype)  # FAULT percentage_error
    return error.abs().float().mean()


@fault("invalid", "div", seed=329, step=5, cures=("module fp32", "bf16"))
def percentage_error() -> Case:
    """A relative error in fp16, accumulated over micro-batches of three; the second of the second window sold 1e-9."""
    model = model_of(quantile_forward, body=nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1)))

    def batch(step: int) -> tuple[Any, ...]:
        y = normal(step + 4, 6).abs() + 1.0
        if step == 5:
            y[2] = 1e-9
        return normal(step, 6, 4), y

    return case(
        model, batch, percentage, policy=MIXED.replace(scale=1.0), steps=6, options={"accumulate": 3, "clip_norm": 10.0}
    )


def sinkhorn_forward(self: Any, a: Tensor, b: Tensor) -> Any:
    cost = torch.cdist(self.fc(a), self.fc(b)).float()
    kernel = torch.exp(-cost / 0.05)
    rows = torch.ones(len(a))
    for _ in range(3):
        columns = 1 / (kernel.T @ rows).float()  # FAULT sinkhorn_kernel
        rows = 1 / (kernel @ columns).float()
    return (rows[:, None] * kernel * columns * cost).sum()


@fault("invalid", "reciprocal", seed=330, step=2, also=("div", "rtruediv"))
def sinkhorn_kernel() -> Case:
    """Optimal transport outside of log space: the kernel of a far point is 0 to all others, and 1 / 0 follows."""
    model = model_of(sinkhorn_forward, fc=nn.Linear(6, 6))

    def batch(step: int) -> tuple[Any, ...]:
        b = normal(step + 60, 5, 6) * 0.1
        if step == 2:
            b[1] = 60.0
        return normal(step, 5, 6) * 0.1, b

    return case(model, batch, lambda m, a, b: m(a, b), policy=FULL)
