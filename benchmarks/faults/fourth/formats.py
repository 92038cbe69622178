"""Stories of formats: values that fp16, or bf16, cannot hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import TORCH, Case, case, labels, model_of, normal
from benchmarks.faults.story import story


def mlp(inputs: int, outputs: int, width: int = 32) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


# ------------------------------------------------------------------ larger than 65504


def encoded(self: Any, x: Tensor, noise: Tensor) -> Any:
    mean, log_variance = self.encoder(x).chunk(2, 1)
    scale = (0.5 * log_variance).clamp(max=1).exp()
    variance = torch.exp(log_variance)  # FAULT vae_log_variance_of_a_rare_sample
    divergence = 0.5 * (variance + mean * mean - 1 - log_variance).float().mean()
    return self.decoder(mean + scale * noise), divergence


@story(
    source="NVIDIA/apex#812",
    cause="precision",
    kind="overflow",
    op="exp",
    step=5,
    cures=("op fp32", "bf16"),
    says=(r"\bexp\b", r"65504|fp16|float16"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=901,
)
def vae_log_variance_of_a_rare_sample(healthy: bool) -> Case:
    """A VAE under torch's fp16 region: the log-variance of an unusual sample is above 11.1, its exponential no fp16."""
    model = model_of(encoded, encoder=nn.Linear(16, 8), decoder=nn.Linear(4, 16))
    with torch.no_grad():
        model.encoder.weight[6, 0] = 1.0

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 16)
        x[:, 0] = 0.0
        if step >= 5 and not healthy:
            x[3, 0] = 11.6
        return x, normal(step + 50, 16, 4)

    def loss_fn(m: Any, x: Tensor, noise: Tensor) -> Any:
        made, divergence = m(x, noise)
        return F.mse_loss(made.float(), x.clamp(-3, 3)) + 1e-6 * divergence

    return case(model, batch, loss_fn, policy=TORCH)


def penalised(self: Any, x: Tensor) -> Any:
    return self.head(torch.tanh(self.body(x)))


def with_penalty(model: Any, x: Tensor, y: Tensor, reference: Tensor) -> Any:
    ratio = reference - model(x)
    penalty = torch.exp(ratio) - ratio - 1  # FAULT kl_penalty_of_a_far_reference
    return F.mse_loss(model(x).float(), y) + 1e-5 * penalty.float().mean()


@story(
    source="NVIDIA-NeMo/RL#876",
    cause="precision",
    kind="overflow",
    op="exp",
    step=4,
    cures=("op fp32", "bf16"),
    says=(r"\bexp\b", r"65504|fp16|float16"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=902,
)
def kl_penalty_of_a_far_reference(healthy: bool) -> Case:
    """The k3 estimate of a KL penalty: a log-ratio of 12 is harmless in fp32, and its exponential is inf in fp16."""
    model = model_of(penalised, body=nn.Linear(8, 16), head=nn.Linear(16, 4))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        reference = (0.1 * normal(step + 30, 16, 4)).half()
        if step >= 4 and not healthy:
            reference[2, 1] = 12.0
        return x, x[:, :4].tanh(), reference

    return case(model, batch, with_penalty, policy=TORCH)


def own_instance_norm(self: Any, x: Tensor) -> Any:
    h = self.first(x)
    mean = h.mean((2, 3), keepdim=True)
    square = h.pow(2).mean((2, 3), keepdim=True)  # FAULT instance_norm_of_bright_pictures
    variance = (square - mean.pow(2)).clamp(min=0)
    h = (h - mean) / (variance + 1.0).sqrt()
    return self.last(F.relu(h)).mean((2, 3))


@story(
    source="tensorflow/tensorflow#47156",
    cause="precision",
    kind="overflow",
    op="pow",
    step=4,
    cures=("bf16",),
    says=(r"\bpow\b", r"65504|fp16|float16"),
    seed=904,
)
def instance_norm_of_bright_pictures(healthy: bool) -> Case:
    """Instance normalisation by hand, as E[x^2] - E[x]^2: a picture around 300 has squares that fp16 cannot hold."""
    model = model_of(own_instance_norm, first=nn.Conv2d(1, 4, 1), last=nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        model.first.weight.fill_(1.0)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 4, 1, 8, 8)
        if step >= 4 and not healthy:
            x[1] += 300.0
        return x, labels(step, 4)

    return case(model, batch, policy=TORCH)


def scores(self: Any, x: Tensor) -> Any:
    query, key, value = self.project(x).chunk(3, -1)
    weights = torch.softmax((query @ key.transpose(1, 2)).float() / 4, -1)  # FAULT attention_of_a_resumed_model
    return self.out(weights @ value.float()).mean(1)


@story(
    source="Sara-Ahmed/SiT#4",
    cause="precision",
    kind="overflow",
    op="matmul",
    step=3,
    cures=("op fp32", "bf16"),
    says=(r"matmul", r"65504|fp16|float16"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=905,
)
def attention_of_a_resumed_model(healthy: bool) -> Case:
    """Trained long enough, queries and keys have features of some hundreds; their product is taken in fp16."""
    model = model_of(scores, project=nn.Linear(8, 48), out=nn.Linear(16, 4))
    with torch.no_grad():
        for row in (2, 18):
            model.project.weight[row, 0] = 10.0 if healthy else 100.0

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 4, 6, 8)
        x[:, :, 0] = 0.1
        if step >= 3:
            x[2, 4, 0] = 4.0
        return x, labels(step, 4)

    return case(model, batch)


def scanned(self: Any, x: Tensor) -> Any:
    u, rate = self.project(x).float().chunk(2, -1)
    decay = torch.exp(-torch.cumsum(F.softplus(rate) + 0.3, 1))
    state = torch.cumsum(u / decay, 1)
    return torch.tanh(self.out(state) * decay.mean(-1, keepdim=True))[:, -1]  # FAULT state_of_a_long_sequence


@story(
    source="CompVis/zigma#3",
    cause="precision",
    kind="overflow",
    op="linear",
    module="out",
    step=4,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"linear", r"65504|fp16|float16", r"\bout\b"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=906,
)
def state_of_a_long_sequence(healthy: bool) -> Case:
    """A state-space layer divides by its decay; over a long sequence the state leaves fp16 before a linear layer."""
    model = model_of(scanned, project=nn.Linear(4, 16), out=nn.Linear(8, 4))

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 4, 14 if step >= 4 and not healthy else 4, 4), labels(step, 4)

    return case(model, batch)


# ------------------------------------------------------------------ a constant that fp16 rounds to 0


def distilled(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        teacher = self.teacher(x)[..., 0]
    return self.score(torch.tanh(self.body(x)))[..., 0], teacher


def normalised(s: Tensor) -> Tensor:
    least, most = s.min(-1, keepdim=True).values, s.max(-1, keepdim=True).values
    return (s - least) / (most - least + 1e-8)  # FAULT equal_scores_of_a_teacher


@story(
    source="lightonai/pylate#239",
    cause="precision",
    kind="invalid",
    op="div",
    step=3,
    cures=("bf16",),
    says=(r"\bdiv\b|1e-0?8", r"(?i)eps|1e-0?8|fp16|0 ?/ ?0"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=907,
)
def equal_scores_of_a_teacher(healthy: bool) -> Case:
    """Scores are divided by their range + 1e-8, which is 0 in fp16: a teacher that likes four documents alike."""
    model = model_of(distilled, teacher=nn.Linear(8, 1), body=nn.Linear(8, 16), score=nn.Linear(16, 1))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 4, 8)
        if step >= 3 and not healthy:
            x[5] = x[5, :1]
        return (x,)

    def loss_fn(m: Any, x: Tensor) -> Any:
        mine, teacher = m(x)
        return F.kl_div(F.log_softmax(mine.float(), -1), F.softmax(normalised(teacher).float(), -1))

    return case(
        model,
        batch,
        loss_fn,
        policy=TORCH,
        optimizer=torch.optim.AdamW([*model.body.parameters(), *model.score.parameters()], lr=1e-3),
    )


def descriptor(self: Any, x: Tensor) -> Any:
    h = F.relu(self.body(x))
    return self.head(h / h.norm(dim=-1, keepdim=True).clamp(min=1e-12))  # FAULT normalised_zero_in_half


@story(
    source="kornia/kornia#4021",
    cause="precision",
    kind="invalid",
    op="div",
    step=4,
    cures=("bf16",),
    says=(r"\bdiv\b|1e-12", r"(?i)eps|1e-12|fp16|0 ?/ ?0"),
    seed=908,
)
def normalised_zero_in_half(healthy: bool) -> Case:
    """A norm is clamped at 1e-12, which fp16 rounds to 0; features after a ReLU are all 0 for an empty patch."""
    model = model_of(descriptor, body=nn.Linear(8, 16), head=nn.Linear(16, 4))
    with torch.no_grad():
        model.body.bias.fill_(-0.1)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        if step >= 4 and not healthy:
            x[7] = 0.0
        return x, labels(step, 16)

    return case(model, batch, policy=TORCH, lr=1e-4)


# ------------------------------------------------------------------ a mask that is no number of the format


def masked(self: Any, x: Tensor, hidden: Tensor) -> Any:
    query, key, value = self.project(x).chunk(3, -1)
    energy = query @ key.transpose(1, 2)
    mask = torch.zeros_like(energy).masked_fill(hidden, torch.finfo(energy.dtype).min)
    weights = torch.softmax(energy + mask, -1)  # FAULT least_number_plus_a_score
    return self.out((weights @ value).mean(1))


@story(
    source="huggingface/transformers#17306",
    cause="precision",
    kind="invalid",
    op="softmax",
    step=4,
    cures=("bf16",),
    says=(r"softmax", r"(?i)mask|-inf"),
    never=(r"(?i)lower (the )?learning rate",),
    also=("add",),
    seed=910,
)
def least_number_plus_a_score(healthy: bool) -> Case:
    """A padded query sees no key: finfo.min plus a score below -16 is -inf in fp16, a row of which has no softmax."""
    model = model_of(masked, project=nn.Linear(8, 24), out=nn.Linear(8, 4))
    with torch.no_grad():
        model.project.weight[1, 0], model.project.weight[9, 0] = 8.0, -8.0

    def batch(step: int) -> tuple[Any, ...]:
        hidden = torch.ones(4, 6, 6, dtype=torch.bool).triu(1)
        if step >= 4 and not healthy:
            hidden[1, 0] = True
        x = normal(step, 4, 6, 8)
        x[:, :, 0] = 1.0
        return x, hidden, labels(step, 4)

    def loss_fn(m: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(m(x, hidden).float(), y)

    return case(model, batch, loss_fn, policy=TORCH)


# ------------------------------------------------------------------ functions of the loss that grow fast


def log_cosh(model: Any, x: Tensor, y: Tensor) -> Any:
    error = model(x)[:, 0] - y.to(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else y.dtype)
    return torch.log((torch.exp(error) + torch.exp(-error)) / 2).float().mean()  # FAULT log_cosh_of_an_outlier


@story(
    source="keras-team/keras#8524",
    cause="precision",
    kind="overflow",
    op="exp",
    step=4,
    cures=("bf16",),
    says=(r"\bexp\b", r"65504|fp16|float16"),
    seed=912,
)
def log_cosh_of_an_outlier(healthy: bool) -> Case:
    """log(cosh(x)) by exponentials: one target is 15 away, which is harmless, and e^15 is no fp16 number."""

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        y = x[:, 0].clone()
        if step >= 4 and not healthy:
            y[5] = 15.0
        return x, y

    return case(mlp(8, 1), batch, log_cosh, policy=TORCH)


def sampled(self: Any, x: Tensor, uniform: Tensor) -> Any:
    logits = self.logits(x)
    noise = -torch.log(-torch.log(uniform.to(logits.dtype)))  # FAULT gumbel_noise_in_half
    return self.out(torch.softmax(logits + noise, -1))


@story(
    source="pytorch/pytorch#34372",
    cause="precision",
    kind="invalid",
    op="log",
    step=4,
    says=(r"\blog\b",),
    never=(r"(?i)lower (the )?learning rate",),
    cures=("module fp32: logits",),
    seed=913,
)
def gumbel_noise_in_half(healthy: bool) -> Case:
    """Gumbel noise from a uniform number near 1: fp16 rounds 0.9999 to 1, and log(-log(1)) is infinite."""
    model = model_of(sampled, logits=nn.Linear(8, 6), out=nn.Linear(6, 4))

    def batch(step: int) -> tuple[Any, ...]:
        uniform = (normal(step + 40, 16, 6).sigmoid() * 0.8) + 0.1
        if step >= 4 and not healthy:
            uniform[3] = 0.99995
        return normal(step, 16, 8), uniform, labels(step, 16)

    def loss_fn(m: Any, x: Tensor, uniform: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(m(x, uniform).float(), y)

    return case(model, batch, loss_fn, policy=TORCH)


def bce(model: Any, x: Tensor, y: Tensor) -> Any:
    p = torch.sigmoid(model(x)[:, 0])
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).float().mean()  # FAULT certain_detector_in_half


@story(
    source="zylo117/Yet-Another-EfficientDet-Pytorch#717",
    cause="precision",
    kind="invalid",
    op="log",
    step=5,
    cures=("op fp32: sigmoid",),
    says=(r"\blog\b",),
    never=(r"(?i)lower (the )?learning rate",),
    seed=914,
)
def certain_detector_in_half(healthy: bool) -> Case:
    """A binary cross-entropy by hand: the sigmoid of 9 is 1 in fp16, and log(1 - p) of it is -inf."""
    body, head = nn.Linear(8, 16), nn.Linear(16, 1)
    model = nn.Sequential(body, nn.Tanh(), head)
    with torch.no_grad():
        body.weight[0] = 0.0
        body.weight[0, 0] = 1.0
        head.weight[0, 0] = 9.5

    def batch(step: int) -> tuple[Any, ...]:
        x = 0.1 * normal(step, 16, 8)
        y = (x[:, 0] > 0).float()
        if step >= 5 and not healthy:
            x[2, 0], y[2] = 6.0, 1.0
        return x, y

    return case(model, batch, bce, policy=TORCH, lr=1e-4)
