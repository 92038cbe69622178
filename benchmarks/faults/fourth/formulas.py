"""Stories of formulas and batches: values that no format has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import FULL, Case, case, labels, model_of, normal
from benchmarks.faults.fourth.formats import mlp
from benchmarks.faults.story import story

DYNAMIC = hs.Policy.of("mixed", dtype="fp16")
NAN = float("nan")


# ------------------------------------------------------------------ formulas without a value


def face(self: Any, x: Tensor, y: Tensor) -> Any:
    cosine = F.normalize(x) @ F.normalize(self.centres).T
    square = 1.0 - cosine.pow(2)
    sine = torch.sqrt(square.clamp(min=1e-6) if self.fixed else square.clamp(min=0))  # FAULT face_on_its_centre
    return torch.where(F.one_hot(y, 4).bool(), cosine * 0.9 - sine * 0.4, cosine) * 8


def face_loss(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(model(x, y), y)


@story(
    source="ronghuaiyang/arcface-pytorch#91",
    cause="model",
    kind="invalid",
    op="sqrt",
    phase="backward",
    step=1,
    says=(r"sqrt", r"(?i)\beps|inside the root|derivative|\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=921,
)
def face_on_its_centre(healthy: bool) -> Case:
    """ArcFace: an embedding that points at the centre of its class has sine 0, whose root has no derivative."""
    model = model_of(face)
    model.centres = nn.Parameter(torch.eye(4, 8))
    model.fixed = healthy

    def batch(step: int) -> tuple[Any, ...]:
        y = labels(step, 8)
        x = F.one_hot(y, 8).float() + 0.2 * normal(step, 8, 8)
        x[3] = F.one_hot(y[3:4], 8).float()[0] if step == 1 else x[3]
        return x, y

    return case(model, batch, face_loss, policy=FULL)


def spread(self: Any, x: Tensor) -> Any:
    h = self.body(x)
    wide = ((h - h.mean(0)).square().float().mean(0) + self.least).sqrt()  # FAULT feature_that_never_varies
    return self.head(torch.cat((h, wide.mean().expand(len(h), 1)), 1))


@story(
    source="pytorch/pytorch#4320",
    cause="model",
    kind="invalid",
    op="sqrt",
    phase="backward",
    step=1,
    says=(r"sqrt", r"(?i)derivative|\beps|\b0(\.0)?\b|zero|constant"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=922,
)
def feature_that_never_varies(healthy: bool) -> Case:
    """A discriminator adds the batch's standard deviation; a feature that is 0 in all samples has no gradient there."""
    model = model_of(spread, body=nn.Linear(8, 16), head=nn.Linear(17, 4))
    model.least = 1e-6 if healthy else 0.0
    with torch.no_grad():
        model.body.weight[5] = model.body.bias[5] = 0.0

    return case(model, lambda k: (normal(k, 16, 8), labels(k, 16)), policy=DYNAMIC)


def contrast(model: Any, x: Tensor, y: Tensor, fixed: bool) -> Any:
    z = model(x).float()
    logits = (F.normalize(z) if fixed else 30 * z) @ (F.normalize(z) if fixed else 30 * z).T / 0.5
    logits = logits - logits.max(1, keepdim=True).values.detach()
    others = 1 - torch.eye(len(x))
    positive = (y[:, None] == y).float() * others
    log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))  # FAULT contrast_without_unit_length
    return -((positive * log_prob).sum(1) / positive.sum(1).clamp(min=1)).mean()


@story(
    source="emadeldeen24/TS-TCC#25",
    cause="model",
    kind="invalid",
    op="log",
    step=1,
    says=(r"\blog\b", r"\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=923,
)
def contrast_without_unit_length(healthy: bool) -> Case:
    """Supervised contrast of features without unit length: e^logits of the other rows are 0, and so is their sum."""
    return case(mlp(8, 16), lambda k: (normal(k, 8, 8), labels(k, 8), healthy), contrast, policy=FULL)


def decomposed(self: Any, x: Tensor) -> Any:
    weight = self.base + self.up @ self.down
    length = weight.norm(dim=1, keepdim=True)
    weight = self.size * weight / (length + 1e-6 if self.fixed else length)  # FAULT pruned_row_of_dora
    return F.linear(x, weight)


@story(
    source="KohakuBlueleaf/LyCORIS#166",
    cause="model",
    kind="invalid",
    op="div",
    step=1,
    says=(r"\bdiv\b", r"\b0(\.0)?\b|zero|0 ?/ ?0"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=924,
)
def pruned_row_of_dora(healthy: bool) -> Case:
    """DoRA divides each row of a weight by its length; a row that was pruned to 0 has none."""
    model = model_of(decomposed)
    model.fixed = healthy
    base = torch.randn(4, 8)
    base[2] = 0.0
    model.register_buffer("base", base)
    model.up, model.down = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.randn(2, 8))
    model.size = nn.Parameter(torch.ones(4, 1))
    return case(model, lambda k: (normal(k, 16, 8), labels(k, 16)), policy=FULL)


def mixture(model: Any, x: Tensor, y: Tensor, fixed: bool) -> Any:
    scores = -8 * (model(x).float() - y[:, None]).square()
    if fixed:
        return -torch.logsumexp(scores, 1).mean()
    return -torch.log(torch.exp(scores).sum(1)).mean()  # FAULT likelihood_of_a_far_point


@story(
    source="mlberkeley/scae-pytorch#4",
    cause="model",
    kind="invalid",
    op="log",
    step=1,
    says=(r"\blog\b", r"\b0(\.0)?\b|zero|logsumexp"),
    seed=925,
)
def likelihood_of_a_far_point(healthy: bool) -> Case:
    """A mixture's likelihood by log(sum(exp)): a point 4 away from all centres has likelihood 0 in any format."""

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        y = x[:, 0].clamp(-1, 1).clone()
        y[4] = 5.0
        return x, y, healthy

    return case(mlp(8, 5), batch, mixture, policy=FULL)


def turned(self: Any, x: Tensor) -> Any:
    a, b = F.relu(self.body(x)).float().chunk(2, 1)
    if self.fixed:
        b = b + 1e-3
    return self.head(torch.atan(a / b))  # FAULT angle_of_nothing


@story(
    source="tensorflow/tensorflow#6095",
    cause="model",
    kind="invalid",
    op="div",
    step=1,
    says=(r"\bdiv\b", r"\b0(\.0)?\b|zero|0 ?/ ?0"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=926,
)
def angle_of_nothing(healthy: bool) -> Case:
    """The angle of a vector by atan(a / b), where a ReLU made both parts 0."""
    model = model_of(turned, body=nn.Linear(8, 16), head=nn.Linear(8, 4))
    model.fixed = healthy
    return case(model, lambda k: (normal(k, 16, 8), labels(k, 16)), policy=DYNAMIC)


# ------------------------------------------------------------------ batches


def attended(self: Any, x: Tensor, hidden: Tensor) -> Any:
    query, key, value = self.project(x).float().chunk(3, -1)
    energy = (query @ key.transpose(1, 2)).float().masked_fill(hidden[:, None], float("-inf"))
    return self.out((torch.softmax(energy, -1) @ value).mean(1))  # FAULT sentence_of_padding


def attended_loss(model: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(model(x, hidden).float(), y)


@story(
    source="pytorch/pytorch#26098",
    cause="data",
    kind="invalid",
    op="softmax",
    step=4,
    says=(r"softmax", r"(?i)mask|-inf|\brow\b|sample"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=931,
)
def sentence_of_padding(healthy: bool) -> Case:
    """A random padding mask hides every token of one sentence of a batch."""
    model = model_of(attended, project=nn.Linear(8, 24), out=nn.Linear(8, 4))

    def batch(step: int) -> tuple[Any, ...]:
        hidden = normal(step + 9, 6, 5) > 1.0
        hidden[:, 0] = False
        if step == 4 and not healthy:
            hidden[2] = True
        return normal(step, 6, 5, 8), hidden, labels(step, 6)

    return case(model, batch, attended_loss, policy=DYNAMIC)


def advantaged(model: Any, x: Tensor, actions: Tensor, advantages: Tensor) -> Any:
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # FAULT last_minibatch_of_one
    chosen = F.log_softmax(model(x).float(), -1).gather(1, actions[:, None])[:, 0]
    return -(chosen * scaled).mean()


@story(
    source="jolibrain/wheatley#93",
    cause="data",
    kind="invalid",
    op="std",
    step=5,
    says=(r"\bstd\b", r"(?i)\b(one|1|single) (sample|row|value|element)|drop_last|batch of (one|1)"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=932,
)
def last_minibatch_of_one(healthy: bool) -> Case:
    """PPO normalises the advantages of a minibatch; the last one of a rollout holds one sample, whose std is NaN."""

    def batch(step: int) -> tuple[Any, ...]:
        rows = 1 if step == 5 and not healthy else 16
        return normal(step, rows, 8), labels(step, rows), normal(step + 70, rows)

    return case(mlp(8, 4), batch, advantaged, policy=DYNAMIC)


def triplets(model: Any, x: Tensor, y: Tensor) -> Any:
    z = F.normalize(model(x).float(), dim=1)
    apart = (z[:, None] - z).square().sum(-1)
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    valid = same[:, :, None] & (y[:, None] != y)[:, None]
    losses = F.relu(apart[:, :, None] - apart[:, None] + 0.2) * valid
    return losses.sum() / valid.sum()  # FAULT batch_without_triplets


@story(
    source="KevinMusgrave/pytorch-metric-learning#107",
    cause="data",
    kind="invalid",
    op="div",
    step=4,
    says=(r"\bdiv\b", r"\b0(\.0)?\b|zero|0 ?/ ?0"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=933,
)
def batch_without_triplets(healthy: bool) -> Case:
    """The triplet loss is a mean over triplets, and in one batch all samples are of one class."""

    def batch(step: int) -> tuple[Any, ...]:
        y = torch.arange(8) % 3
        return normal(step, 8, 8), torch.zeros(8, dtype=torch.long) if step == 4 and not healthy else y

    return case(mlp(8, 8), batch, triplets, policy=DYNAMIC)


def decoded(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(model(x).float(), y)


@story(
    source="prs-eth/Marigold#111",
    cause="data",
    kind="bad_batch",
    step=6,
    says=(r"(?i)nan", r"(?i)batch|sample|\brow\b|input"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=934,
)
def depth_map_with_nan(healthy: bool) -> Case:
    """One image of a batch has NaN where its reader could not decode it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 4, 3, 8, 8)
        y = x.mean(1, keepdim=True)
        if step == 6 and not healthy:
            x[2, :, 5] = NAN
        return x, y

    return case(model, batch, decoded, policy=DYNAMIC)


def scaled_features(self: Any, x: Tensor) -> Any:
    x = x / x.amax(0)  # FAULT feature_of_zeros
    return self.body(x)


@story(
    source="evandowning/deepreflect#11",
    cause="data",
    kind="invalid",
    op="div",
    step=3,
    says=(r"\bdiv\b", r"\b0(\.0)?\b|zero|0 ?/ ?0"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=935,
)
def feature_of_zeros(healthy: bool) -> Case:
    """Counts are divided by the largest of the batch; in one batch a feature never occurs."""
    model = model_of(scaled_features, body=mlp(8, 4))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8).abs()
        if step == 3 and not healthy:
            x[:, 6] = 0.0
        return x, labels(step, 16)

    return case(model, batch, policy=FULL)


def sites(self: Any, x: Tensor) -> Any:
    h = self.body(x).float()
    h = (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()  # FAULT one_active_site
    return self.head(F.relu(h))


@story(
    source="facebookresearch/SparseConvNet#105",
    cause="data",
    kind="invalid",
    op="var",
    step=4,
    says=(r"\bvar\b", r"(?i)\b(one|1|single) (sample|row|value|element)|drop_last|batch of (one|1)"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=936,
)
def one_active_site(healthy: bool) -> Case:
    """Batch normalisation over the active sites of a sparse picture; one picture has a single one."""
    model = model_of(sites, body=nn.Linear(8, 16), head=nn.Linear(16, 4))

    def batch(step: int) -> tuple[Any, ...]:
        rows = 1 if step == 4 and not healthy else 12
        return normal(step, rows, 8), labels(step, rows)

    return case(model, batch, policy=DYNAMIC)
