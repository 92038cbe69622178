"""List A, faults that no operator is to blame for: the batch, the state of the training, the loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import BF16, MIXED, Case, at, case, classify, fault, labels, model_of, normal, tokens


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


EVERY = ("0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
"""Other parameters of `net`."""


# ------------------------------------------------------------------ the batch


@fault("bad_batch", seed=81, step=3)
def inf_pixel() -> Case:
    """One pixel of one image is inf."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 3, 1, 8, 8)
        if step == 3:
            x[1, 0, 4, 4] = float("inf")
        return x, labels(step, 3)

    return case(model, batch)


@fault("bad_batch", step=2)
def nan_feature() -> Case:
    """A missing value has come through as NaN, in a batch that is a dict."""
    model = net(82)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 6)
        if step == 2:
            x[5, 1] = float("nan")
        return ({"features": x, "labels": labels(step, 8)},)

    return case(model, batch, lambda m, rows: classify(m, rows["features"], rows["labels"]), policy=BF16)


@fault("bad_batch", step=3)
def nan_label_weights() -> Case:
    """Weights of the classes from class counts, 0 / 0 for a class that the data loader has not seen."""
    model = net(83)

    def loss_fn(model: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weight)

    def batch(step: int) -> tuple[Any, ...]:
        weight = torch.ones(4)
        if step == 3:
            weight[2] = float("nan")
        return normal(step, 8, 6), torch.arange(8) % 4, weight

    return case(model, batch, loss_fn)


@fault("bad_batch", seed=84, step=2)
def nan_target() -> Case:
    """A regression whose target is NaN in one row."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def batch(step: int) -> tuple[Any, ...]:
        y = normal(step + 1, 8, 1)
        if step == 2:
            y[0] = float("nan")
        return normal(step, 8, 6), y

    return case(model, batch, lambda m, x, y: F.huber_loss(m(x), y), policy=BF16)


# ------------------------------------------------------------------ the state


@fault("bad_state", parameter="3.weight", step=3)
def nan_parameter() -> Case:
    """Something outside of the training (a bad broadcast, a user's own clipping) has left a NaN in a weight."""
    model = net(85)

    def plant() -> None:
        model[3].weight[1, 1] = float("nan")  # type: ignore[operator]

    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), before=at(3, plant))


# torch alone has no fp32 values behind low parameters
@fault("bad_state", parameter="0.weight", step=3, plain=False)
def nan_master() -> Case:
    """The same in the fp32 values behind low parameters."""
    model = net(86)

    def plant() -> None:
        with hs.edit_weights(model), torch.no_grad():
            model[0].weight[0, 0] = float("nan")  # type: ignore[operator]

    return case(
        model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=hs.Policy.of("O2", dtype="bf16"), before=at(3, plant)
    )


def frozen_forward(self: Any, x: Tensor) -> Any:
    self.stem.eval()
    return self.head(F.relu(self.stem(x)).flatten(1))


@fault("bad_state", seed=87, parameter="stem.1.running_var", step=2)
def nan_running_var() -> Case:
    """A frozen BatchNorm whose running variance was averaged with an empty batch's."""
    model = model_of(frozen_forward, stem=nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), head=nn.Linear(144, 4))

    def plant() -> None:
        model.stem[1].running_var[3] = float("nan")

    return case(model, lambda k: (normal(k, 3, 1, 8, 8), labels(k, 3)), before=at(2, plant))


@fault("bad_state", parameter="0.bias", phase="update", step=4)
def nan_moment() -> Case:
    """A moment of the optimizer is NaN at step 3: its gradients are finite, its update makes the parameter NaN."""
    model = net(88)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def plant() -> None:
        optimizer.state[model[0].bias]["exp_avg"][2] = float("nan")  # type: ignore[index]

    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=BF16, optimizer=optimizer, before=at(3, plant))


@fault("bad_state", seed=89, parameter="0.weight", phase="update", step=2, also=("1.weight",))
def eps_of_adam() -> Case:
    """Adam's eps of 1e-8 is 0 in fp16: where a gradient is 0, O3's update is 0 / 0."""
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    return case(
        model,
        lambda k: (torch.arange(6), torch.arange(6) % 4),
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False),
    )


@fault("bad_state", parameter="0.weight", phase="update", step=3, also=EVERY)
def learning_rate_spike() -> Case:
    """A scheduler gone wrong gives a learning rate of 1e38: the update itself makes the weights infinite."""
    model = net(90)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spike(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e38 if step == 2 else 0.1

    return case(
        model,
        lambda k: (normal(k, 8, 6), labels(k, 8)),
        lambda m, x, y: 1e6 * classify(m, x, y),
        policy=BF16,
        optimizer=optimizer,
        before=spike,
    )


# ------------------------------------------------------------------ the scale


@fault("scale_too_high", phase="backward", step=1, cures=("scale",))
def scale_too_high() -> Case:
    """A static loss scale 2**10 times larger than the largest under which this step is finite."""
    model = net(91)
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=MIXED.replace(scale=2.0**27))


@fault("scale_too_high", seed=92, phase="backward", step=1, cures=("scale",))
def scale_too_high_for_a_unet() -> Case:
    """The same under O2, whose gradients are fp16 from end to end, in a small convolutional net."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 2, stride=2),
    )
    return case(
        model,
        lambda k: (normal(k, 2, 1, 8, 8), tokens(k, (2, 8, 8), 2)),
        policy=hs.Policy.of("O2", dtype="fp16", scale=2.0**29),
    )
