"""List A, faults that no operator is to blame for: the batch, the state of the training, the loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from tests.faults.case import Case, fault, generator

MIXED = hs.Policy.of("mixed", dtype="fp16", scale=128.0)
BF16 = hs.Policy.of("mixed", dtype="bf16")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(step))


def labels(step: int, count: int, kinds: int = 4) -> Tensor:
    return torch.randint(0, kinds, (count,), generator=generator(step + 500))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


EVERY = ("0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
"""Other parameters of `net`."""


def classify(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# ------------------------------------------------------------------ the batch


@fault("A", kind="bad_batch", step=3)
def inf_pixel() -> Case:
    """One pixel of one image is inf."""
    torch.manual_seed(81)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 3, 1, 8, 8)
        if step == 3:
            x[1, 0, 4, 4] = float("inf")
        return x, labels(step, 3)

    return Case(model=model, optimizer=adam(model), loss_fn=classify, batch=batch, policy=MIXED, steps=3)


@fault("A", kind="bad_batch", step=2)
def nan_feature() -> Case:
    """A missing value has come through as NaN, in a batch that is a dict."""
    model = net(82)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 6)
        if step == 2:
            x[5, 1] = float("nan")
        return ({"features": x, "labels": labels(step, 8)},)

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, rows: classify(m, rows["features"], rows["labels"]),
        batch=batch,
        policy=BF16,
        steps=2,
    )


@fault("A", kind="bad_batch", step=3)
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

    return Case(model=model, optimizer=adam(model), loss_fn=loss_fn, batch=batch, policy=MIXED, steps=3)


@fault("A", kind="bad_batch", step=2)
def nan_target() -> Case:
    """A regression whose target is NaN in one row."""
    torch.manual_seed(84)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def batch(step: int) -> tuple[Any, ...]:
        y = normal(step + 1, 8, 1)
        if step == 2:
            y[0] = float("nan")
        return normal(step, 8, 6), y

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.huber_loss(m(x), y),
        batch=batch,
        policy=BF16,
        steps=2,
    )


# ------------------------------------------------------------------ the state


@fault("A", kind="bad_state", parameter="3.weight", step=3)
def nan_parameter() -> Case:
    """Something outside of the training (a bad broadcast, a user's own clipping) has left a NaN in a weight."""
    model = net(85)

    def plant(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model[3].weight[1, 1] = float("nan")  # type: ignore[operator]

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=MIXED,
        steps=3,
        before=plant,
    )


# torch alone has no fp32 values behind low parameters
@fault("A", kind="bad_state", parameter="0.weight", step=3, plain=False)
def nan_master() -> Case:
    """The same in the fp32 values behind low parameters."""
    model = net(86)

    def plant(step: int) -> None:
        if step == 3:
            with hs.edit_weights(model), torch.no_grad():
                model[0].weight[0, 0] = float("nan")  # type: ignore[operator]

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=hs.Policy.of("O2", dtype="bf16"),
        steps=3,
        before=plant,
    )


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Any:
        self.stem.eval()
        return self.head(F.relu(self.stem(x)).flatten(1))


@fault("A", kind="bad_state", parameter="stem.1.running_var", step=2)
def nan_running_var() -> Case:
    """A frozen BatchNorm whose running variance was averaged with an empty batch's."""
    torch.manual_seed(87)
    model = Frozen()

    def plant(step: int) -> None:
        if step == 2:
            model.stem[1].running_var[3] = float("nan")  # type: ignore[operator]

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 3, 1, 8, 8), labels(k, 3)),
        policy=MIXED,
        steps=2,
        before=plant,
    )


@fault("A", kind="bad_state", parameter="0.bias", phase="update", step=4)
def nan_moment() -> Case:
    """A moment of the optimizer is NaN at step 3: its gradients are finite, its update makes the parameter NaN."""
    model = net(88)
    optimizer = adam(model)

    def plant(step: int) -> None:
        if step == 3:
            optimizer.state[model[0].bias]["exp_avg"][2] = float("nan")  # type: ignore[index]

    return Case(
        model=model,
        optimizer=optimizer,
        loss_fn=classify,
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=BF16,
        steps=4,
        before=plant,
    )


@fault("A", kind="bad_state", parameter="0.weight", phase="update", step=2, also=("1.weight",))
def eps_of_adam() -> Case:
    """Adam's eps of 1e-8 is 0 in fp16: where a gradient is 0, O3's update is 0 / 0."""
    torch.manual_seed(89)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    return Case(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False),
        loss_fn=classify,
        batch=lambda k: (torch.arange(6), torch.arange(6) % 4),
        policy=hs.Policy.of("O3", dtype="fp16"),
        steps=2,
    )


@fault("A", kind="bad_state", parameter="0.weight", phase="update", step=3, also=EVERY)
def learning_rate_spike() -> Case:
    """A scheduler gone wrong gives a learning rate of 1e38: the update itself makes the weights infinite."""
    model = net(90)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spike(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e38 if step == 2 else 0.1

    return Case(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda m, x, y: 1e6 * classify(m, x, y),
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=BF16,
        steps=3,
        before=spike,
    )


# ------------------------------------------------------------------ the scale


@fault("A", kind="scale_too_high", phase="backward", step=1, cures=("scale",))
def scale_too_high() -> Case:
    """A static loss scale 2**10 times larger than the largest under which this step is finite."""
    model = net(91)
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=MIXED.replace(scale=2.0**27),
        steps=1,
    )


@fault("A", kind="scale_too_high", phase="backward", step=1, cures=("scale",))
def scale_too_high_for_a_unet() -> Case:
    """The same under O2, whose gradients are fp16 from end to end, in a small convolutional net."""
    torch.manual_seed(92)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 2, stride=2),
    )
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=classify,
        batch=lambda k: (normal(k, 2, 1, 8, 8), torch.randint(0, 2, (2, 8, 8), generator=generator(k))),
        policy=hs.Policy.of("O2", dtype="fp16", scale=2.0**29),
        steps=1,
    )
