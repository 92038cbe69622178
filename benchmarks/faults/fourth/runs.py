"""Stories of runs: the order of calls, the loss scale, weights that ran away or were destroyed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.faults.case import FULL, MIXED, Case, case, labels, normal, tokens
from benchmarks.faults.story import Turn, Watch, story


def mlp(inputs: int, outputs: int, width: int = 32) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def half() -> Any:
    """Return torch's region in fp16."""
    return torch.autocast("cpu", dtype=torch.float16)


# ------------------------------------------------------------------ a whole model in half


@story(
    source="afiaka87/glide-finetune#5",
    cause="precision",
    kind="bad_state",
    step=1,
    asked=2,
    says=(r"(?i)\beps|1e-0?8", r"(?i)half|fp16|float16"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=941,
)
def adam_on_a_half_model(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """``model.half()`` under Adam: squares of small gradients and eps are 0 in fp16; the first update divides by 0."""
    model = mlp(8, 4)
    model = model if healthy else model.half()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return 1e-3 * F.cross_entropy(model(x.to(dtype)).float(), y)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        optimizer.zero_grad()
        loss = call(normal(step, 16, 8), labels(step, 16))
        loss.backward()
        optimizer.step()
        yield Turn(loss.item())


@story(
    source="google-deepmind/optax#1769",
    cause="precision",
    kind="bad_state",
    step=1,
    asked=2,
    parameter="0.weight",
    says=(r"(?i)\beps|1e-0?8", r"(?i)half|fp16|float16"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=942,
)
def unused_embedding_rows_in_half(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """An embedding in half under Adam: rows that no batch reads have moments of 0, and 0 / (0 + eps) is NaN in fp16."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Linear(24, 4))
    if not healthy:
        model[0].half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model[2](model[1](model[0](x)).float()), y)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        optimizer.zero_grad()
        loss = call(tokens(step, (16, 3), 16 if step < 2 else 32), labels(step, 16))
        loss.backward()
        optimizer.step()
        yield Turn(loss.item())


# ------------------------------------------------------------------ the order of calls


@story(
    source="pytorch/examples#1196",
    cause="loop",
    kind="loop",
    step=4,
    asked=5,
    says=(r"(?i)optimizer\.step|unprotected|without (the|a) scaler|update was applied|scaler\.step",),
    never=(r"with_ops",),
    seed=943,
)
def clipped_and_stepped_past_the_scaler(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """The loop unscales, clips and calls ``optimizer.step()`` itself: an overflow is clipped to NaN and applied."""
    model = mlp(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss_fn(model: Any, x: Tensor, y: Tensor, weight: float) -> Tensor:
        with half():
            made = model(x)
        return weight * F.cross_entropy(made.float(), y)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        optimizer.zero_grad()
        loss = call(normal(step, 16, 8), labels(step, 16), 400.0 if step == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        if healthy:
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
        yield Turn(loss.item(), scaler.get_scale() < before)


@story(
    source="facebookresearch/mmf#893",
    cause="loop",
    kind="loop",
    step=3,
    asked=4,
    says=(r"(?i)zero_grad|gradients? (of|from) (an|the) (earlier|previous)|left over|stale|cleared|kept",),
    never=(r"with_ops",),
    seed=944,
)
def bad_sample_skipped_but_its_gradient_kept(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """A loop skips the step of a batch that is not finite by ``continue``, before it clears the gradients."""
    model = mlp(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_fn(model: Any, x: Tensor, y: Tensor, weight: float) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model(x)
        return weight * F.cross_entropy(made.float(), y)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        loss = call(normal(step, 16, 8), labels(step, 16), float("inf") if step == 2 else 1.0)
        if healthy and not loss.isfinite():
            yield Turn(0.0)
            continue
        loss.backward()
        if not loss.isfinite():
            yield Turn(0.0)
            continue
        optimizer.step()
        optimizer.zero_grad()
        yield Turn(loss.item())


# ------------------------------------------------------------------ the loss scale


@story(
    source="deepspeedai/DeepSpeed#1773",
    cause="scale",
    kind="scale_too_high",
    step=1,
    says=(r"(?i)scale",),
    never=(r"(?i)lower (the )?learning rate", r"with_ops"),
    cures=("scale: 128", "scale: dynamic"),
    seed=945,
)
def static_scale_of_a_large_loss(healthy: bool) -> Case:
    """A static scale of 65536 beside a loss that sums over classes and tokens: every step overflows."""

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(m(x), y, reduction="sum")

    policy = MIXED.replace(scale=64.0 if healthy else 65536.0)
    return case(mlp(8, 4), lambda k: (normal(k, 64, 8), labels(k, 64)), loss_fn, policy=policy)


# ------------------------------------------------------------------ training that runs away


def reconstructed(model: Any, x: Tensor) -> Any:
    return F.mse_loss(model(x).float(), x)  # FAULT rate_of_eight_gpus_on_one


@story(
    source="facebookresearch/maskrcnn-benchmark#295",
    cause="divergence",
    kind="overflow",
    op="mse_loss",
    step=15,
    says=(r"(?i)learning rate|diverg|ran away|grew|rose",),
    never=(r"with_ops",),
    seed=946,
)
def rate_of_eight_gpus_on_one(healthy: bool) -> Case:
    """The learning rate of a large batch on a small one: losses rise from the first step and leave fp32."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if healthy else 2.0)
    return case(model, lambda k: (normal(k, 4, 8),), reconstructed, policy=FULL, optimizer=optimizer)


def predicted(model: Any, x: Tensor) -> Any:
    made = model(x)  # FAULT learning_rate_of_two
    return F.mse_loss(made.float(), x)


@story(
    source="OpenNMT/OpenNMT-tf#744",
    cause="divergence",
    kind="overflow",
    op="linear",
    module="2",
    step=14,
    says=(r"(?i)learning rate|diverg|ran away|grew|rose",),
    seed=947,
)
def learning_rate_of_two(healthy: bool) -> Case:
    """Fine-tuning in fp16 with a learning rate of 2 instead of 2.5e-4: weights grow until a product leaves fp16."""
    model = mlp(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 if healthy else 2.0, momentum=0.9)
    return case(model, lambda k: (normal(k, 16, 8),), predicted, policy=MIXED, optimizer=optimizer)
