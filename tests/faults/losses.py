"""List A, faults of losses and of formulas written by hand: poles, 0/0, temperatures, probabilities that round to 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from tests.faults.case import Case, fault, generator

MIXED = hs.Policy.of("mixed", dtype="fp16", scale=128.0)
TORCH = hs.Policy.of("torch", dtype="fp16", scale=128.0)
BF16 = hs.Policy.of("mixed", dtype="bf16")
FULL = hs.Policy.of("O0")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(step))


def labels(step: int, count: int, kinds: int = 4) -> Tensor:
    return torch.randint(0, kinds, (count,), generator=generator(step + 500))


def mlp(inputs: int, outputs: int, *, hidden: int = 16, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


# ------------------------------------------------------------------ temperatures


def contrast(model: Any, a: Tensor, b: Tensor) -> Tensor:
    left, right = F.normalize(model(a), dim=-1), F.normalize(model(b), dim=-1)
    similarity = left @ right.T
    logits = similarity / 1e-5  # FAULT contrastive_temperature
    return F.cross_entropy(logits, torch.arange(len(a)))


@fault("A", kind="overflow", op="div", module="", phase="forward", step=1, cures=("op fp32", "bf16"))
def contrastive_temperature() -> Case:
    """A temperature of 1e-5 for cosine similarities in fp16: 1 / 1e-5 is out of range."""
    model = mlp(8, 8, seed=21)
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=contrast,
        batch=lambda k: (x := normal(k, 6, 8), x + 0.1 * normal(k + 50, 6, 8)),
        policy=MIXED.replace(scale=1.0),
        steps=1,
    )


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Embedding(20, 8)
        self.log_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        return self.log_scale.exp() * (image @ text.T)  # FAULT learned_temperature


@fault("A", kind="overflow", op="mul", module="", phase="forward", step=3, cures=("op fp32", "bf16"))
def learned_temperature() -> Case:
    """A learned temperature without a bound has run away to exp(13)."""
    torch.manual_seed(22)
    model = Clip()

    def run_away(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model.log_scale.fill_(13.0)

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x, y), torch.arange(len(x))),
        batch=lambda k: (normal(k, 6, 12), labels(k, 6, 20)),
        policy=MIXED.replace(scale=2.0**-6),
        steps=3,
        before=run_away,
    )


# ------------------------------------------------------------------ logarithms of what has rounded to zero


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(model(x)[:, 0])
    right = torch.where(y > 0, p, 1 - p)
    surprise = -torch.log(right)  # FAULT focal_loss
    return ((1 - right) ** 2 * surprise).mean()


@fault("A", kind="invalid", op="log", module="", phase="forward", step=2, cures=("bf16",))
def focal_loss() -> Case:
    """A focal loss by hand: in fp16 a probability below 2**-25 is 0, and its logarithm -inf."""
    model = mlp(8, 1, seed=23)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 8)
        return x * (20.0 if step == 2 else 1.0), torch.ones(8)

    def push(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[2].bias.fill_(-25.0)  # type: ignore[operator]

    return Case(model=model, optimizer=adam(model), loss_fn=focal, batch=batch, policy=MIXED, steps=2, before=push)


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        hidden, _ = self.lstm(x)
        return torch.softmax(self.out(hidden[:, -1]), -1)


def nll_of_softmax(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(torch.log(model(x)), y)  # FAULT log_of_softmax


# torch alone has no fp16 LSTM on a CPU without the units for it
@fault(
    "A", kind="invalid", op="log", module="", phase="forward", step=3, cures=("op fp32: softmax", "bf16"), plain=False
)
def log_of_softmax() -> Case:
    """An LSTM classifier that returns probabilities: softmax gives 0 in fp16 and the loss takes its logarithm."""
    torch.manual_seed(24)
    model = Pointer()

    def sharpen(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                model.out.bias.copy_(torch.tensor([20.0, 0.0, 0.0, 0.0, 0.0]))

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=nll_of_softmax,
        batch=lambda k: (normal(k, 6, 7, 6), torch.arange(6) % 5),
        policy=MIXED,
        steps=3,
        before=sharpen,
    )


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actions = mlp(6, 12, seed=25), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        return torch.softmax(self.actions(torch.tanh(self.body(x))), -1)


def policy_loss(model: Any, x: Tensor, a: Tensor) -> Any:
    p = model(x)
    chosen = p.gather(1, a[:, None]).float()
    plogp = p * torch.log(p)  # FAULT entropy_bonus
    return -(torch.log(chosen + 1e-6).mean() - 0.01 * plogp.sum(-1).mean())


@fault("A", kind="invalid", op="log", module="", phase="forward", step=2, cures=("op fp32: softmax", "bf16"))
def entropy_bonus() -> Case:
    """Reinforcement learning's entropy as p log p: for an action that became impossible it is 0 * -inf."""
    model = Policy()

    def decide(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.actions.bias.copy_(torch.tensor([0.0, 1.0, -30.0]))

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=policy_loss,
        batch=lambda k: (normal(k, 8, 6), torch.arange(8) % 2),
        policy=MIXED,
        steps=2,
        before=decide,
    )


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 9, seed=26)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        weight, mean, width = self.body(x).chunk(3, -1)
        density = torch.exp(-0.5 * ((y - mean) / (F.softplus(width) + 0.01)) ** 2)
        likelihood = torch.log((weight.softmax(-1) * density).sum(-1))  # FAULT mixture_density
        return -likelihood.mean()


@fault("A", kind="invalid", op="log", module="", phase="forward", step=3)
def mixture_density() -> Case:
    """A mixture density network in fp32: an outlier is so unlikely that its density is 0."""
    model = Mixture()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: m(x, y),
        batch=lambda k: (normal(k, 8, 4), normal(k + 9, 8, 1) * (300.0 if k == 3 else 1.0)),
        policy=FULL,
        steps=3,
    )


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: Tensor, noise: Tensor) -> Any:
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + noise * torch.exp(0.5 * logvar.clamp(max=10.0))
        return self.decoder(z), mean, logvar


def elbo(model: Any, x: Tensor, noise: Tensor) -> Any:
    image, mean, logvar = model(x, noise)
    variance = torch.exp(logvar)  # FAULT kl_of_a_vae
    return F.mse_loss(image, x) - 1e-3 * (1 + logvar - mean * mean - variance).mean()


@fault("A", kind="overflow", op="exp", module="", phase="forward", step=2, cures=("op fp32", "bf16"))
def kl_of_a_vae() -> Case:
    """The KL term of a VAE: the variance of one latent is exp(12), where torch's CPU lists keep exp in fp16."""
    torch.manual_seed(27)
    model = Vae()

    def widen(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.encoder[2].bias[5] = 12.0  # type: ignore[operator]

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=elbo,
        batch=lambda k: (normal(k, 8, 12), normal(k + 77, 8, 4)),
        policy=TORCH,
        steps=2,
        before=widen,
    )


# ------------------------------------------------------------------ 0 / 0


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(5, 4, seed=28)

    def forward(self, x: Tensor) -> Any:
        x = (x - x.mean(0)) / x.std(0)  # FAULT constant_feature
        return self.body(x)


@fault("A", kind="invalid", op="div", module="", phase="forward", step=3)
def constant_feature() -> Case:
    """A feature is the same in all rows of one batch; standardising it divides 0 by 0 in every format."""
    model = Standardised()

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 5)
        if step == 3:
            x[:, 2] = 1.0
        return x, labels(step, 8)

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x), y),
        batch=batch,
        policy=BF16,
        steps=3,
    )


class UnitRows(nn.Module):
    def forward(self, h: Tensor) -> Any:
        length = h.abs().amax(-1, keepdim=True)
        return h / (length + 1e-8)  # FAULT vanishing_eps


@fault("A", kind="invalid", op="div", module="unit", phase="forward", step=2, cures=("bf16", "module fp32: fc"))
def vanishing_eps() -> Case:
    """1e-8 is 0 in fp16: where ReLU has silenced a row, it no longer protects the division."""
    torch.manual_seed(29)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unit, self.out = nn.Linear(6, 16), UnitRows(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.unit(F.relu(self.fc(x))))

    model = Net()

    def silence(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.fc.bias.fill_(-20.0)

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x), y),
        batch=lambda k: (normal(k, 8, 6), labels(k, 8)),
        policy=MIXED,
        steps=2,
        before=silence,
    )


def cosine_by_hand(model: Any, a: Tensor, b: Tensor) -> Any:
    u, v = model(a), model(b)
    cosine = (u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1))  # FAULT cosine_of_zeros
    return (1 - cosine).mean()


@fault("A", kind="invalid", op="div", module="", phase="forward", step=3)
def cosine_of_zeros() -> Case:
    """Cosine similarity by hand: an empty document is the zero vector, and a layer without bias keeps it so."""
    torch.manual_seed(30)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def batch(step: int) -> tuple[Any, ...]:
        a = normal(step, 5, 8)
        if step == 3:
            a[2] = 0.0
        return a, normal(step + 60, 5, 8)

    return Case(model=model, optimizer=adam(model), loss_fn=cosine_by_hand, batch=batch, policy=BF16, steps=3)


def masked_mean(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * mask).sum() / mask.sum()  # FAULT empty_mask


@fault("A", kind="invalid", op="div", module="", phase="forward", step=2)
def empty_mask() -> Case:
    """A batch in which no token counts: the mean over none."""
    torch.manual_seed(31)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def batch(step: int) -> tuple[Any, ...]:
        x = torch.randint(0, 12, (10,), generator=generator(step))
        return x, x.roll(1), torch.full((10,), 0.0 if step == 2 else 1.0)

    return Case(model=model, optimizer=adam(model), loss_fn=masked_mean, batch=batch, policy=MIXED, steps=2)


def ignored(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)  # FAULT all_ignored


@fault("A", kind="invalid", op="cross_entropy", module="", phase="forward", step=3)
def all_ignored() -> Case:
    """F.cross_entropy whose labels are all ignore_index."""
    torch.manual_seed(32)
    model = nn.Sequential(nn.Embedding(12, 8), nn.GELU(), nn.Linear(8, 12))

    def batch(step: int) -> tuple[Any, ...]:
        x = torch.randint(1, 12, (2, 6), generator=generator(step))
        return x, torch.zeros_like(x) if step == 3 else x.flip(1)

    return Case(model=model, optimizer=adam(model), loss_fn=ignored, batch=batch, policy=BF16, steps=3)


class HandLogSumExp(nn.Module):
    def forward(self, scores: Tensor) -> Any:
        top = scores.amax(-1, keepdim=True)
        shifted = scores - top  # FAULT inf_minus_inf
        return top + torch.log(torch.exp(shifted).sum(-1, keepdim=True))


@fault("A", kind="invalid", op="sub", module="pool", phase="forward", step=2)
def inf_minus_inf() -> Case:
    """A logsumexp by hand over candidates that are all masked: -inf - -inf."""
    torch.manual_seed(33)

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.pool = nn.Linear(6, 1), HandLogSumExp()

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            scores = self.score(x)[..., 0].masked_fill(~mask, float("-inf"))
            return self.pool(scores)

    model = Ranker()

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 4, 5, 6), torch.arange(5) < torch.tensor([[5], [2], [3], [0 if step == 2 else 1]])

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, mask: m(x, mask).mean(),
        batch=batch,
        policy=MIXED,
        steps=2,
    )


# ------------------------------------------------------------------ bf16 and fp32 overflow


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        energy = h * h  # FAULT bf16_square
        return self.out(energy) * 1e-30


@fault("A", kind="overflow", op="mul", module="", phase="forward", step=2)
def bf16_square() -> Case:
    """The square of 1e20 is too large for bf16, which has fp32's range; fp32 does not help."""
    torch.manual_seed(34)
    model = Energy()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.mse_loss(m(x)[:, 0], y),
        batch=lambda k: (normal(k, 6, 4) * (1e20 if k == 2 else 1.0), normal(k + 1, 6)),
        policy=BF16,
        steps=2,
    )


def low_mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y.to(torch.float16))  # FAULT loss_in_fp16


# torch.autocast never computes a loss in fp16
@fault("A", kind="overflow", plain=False, op="mse_loss", module="", phase="forward", step=2, cures=("op fp32", "bf16"))
def loss_in_fp16() -> Case:
    """O3 computes the loss in fp16 as well: the square of an error of 400 is infinite."""
    model = mlp(6, 1, seed=35)
    return Case(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=low_mse,
        batch=lambda k: (normal(k, 8, 6), normal(k + 1, 8, 1) * (400.0 if k == 2 else 1.0)),
        policy=hs.Policy.of("O3", dtype="fp16"),
        steps=2,
    )


# ------------------------------------------------------------------ structure: graphs, recurrence, reuse, recomputation


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Linear(inputs, outputs)

    def forward(self, adjacency: Tensor, h: Tensor) -> Any:
        gathered = adjacency @ self.weight(h)  # FAULT graph_hub
        return F.relu(gathered / adjacency.sum(-1, keepdim=True).clamp(min=1))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConv(4, 8), GraphConv(8, 3)

    def forward(self, adjacency: Tensor, x: Tensor) -> Any:
        return self.conv2(adjacency, self.conv1(adjacency, x))


@fault("A", kind="overflow", op="matmul", module="conv2", phase="forward", step=2, cures=("op fp32", "module fp32"))
def graph_hub() -> Case:
    """A graph with a hub of 200 neighbours: their messages are summed in fp16 before they are averaged."""
    torch.manual_seed(36)
    model = Graph()

    def batch(step: int) -> tuple[Any, ...]:
        adjacency = torch.eye(200)
        if step == 2:
            adjacency[0] = 1.0
        return adjacency, torch.full((200, 4), 2.0) + 0.1 * normal(step, 200, 4), labels(step, 200, 3)

    def grow(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.conv2.weight.bias.fill_(1000.0)
                model.conv2.weight.weight.mul_(0.1)

    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, a, x, y: F.cross_entropy(m(a, x), y),
        batch=batch,
        policy=MIXED.replace(scale=1.0),
        steps=2,
        before=grow,
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.keep, self.out = nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.enter(x[:, 0]))
        for t in range(1, x.shape[1]):
            carried = self.keep(h)  # FAULT exploding_state
            h = torch.relu(carried + 1e-3 * self.enter(x[:, t]))
        return self.out(h)


@fault("A", kind="overflow", op="linear", module="keep", phase="forward", step=2, cures=("bf16",))
def exploding_state() -> Case:
    """A recurrent net that doubles its state at each step of time: a sequence of 24 is too long for fp16."""
    torch.manual_seed(37)
    model = Recurrent()
    with torch.no_grad():
        model.keep.weight.copy_(2 * torch.eye(8))
        model.out.weight.mul_(1e-3)
    return Case(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x) * 1e-3, y),
        batch=lambda k: (normal(k, 4, 24 if k == 2 else 6, 4) + 1.0, labels(k, 4, 3)),
        policy=MIXED.replace(scale=2.0**-8),
        steps=2,
    )


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        gated = self.gate(x) * self.value(x)  # FAULT checkpointed_gate
        return self.out(gated)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Gated() for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False))
        return self.head(x)


@fault("A", kind="overflow", op="mul", module="blocks.0", phase="forward", step=3, cures=("module fp32", "bf16"))
def checkpointed_gate() -> Case:
    """A gated layer under activation checkpointing: gate times value of a heavy batch."""
    torch.manual_seed(38)
    model = Recomputing()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x), y),
        batch=lambda k: (normal(k, 8, 8) * (800.0 if k == 3 else 1.0), labels(k, 8)),
        policy=MIXED,
        steps=3,
    )


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)  # FAULT second_call


def siamese(model: Any, a: Tensor, b: Tensor) -> Any:
    near, far = model(a), model(b)
    return (near.float() - far.float()).abs().mean() * 1e-3


@fault("A", kind="overflow", op="linear", module="body.2", phase="forward", step=2, cures=("bf16",))
def second_call() -> Case:
    """A siamese pair: the first call of the model is harmless, the second one, with the other image, overflows."""
    torch.manual_seed(39)
    model = Twice()
    with torch.no_grad():
        model.body[2].weight.mul_(30)  # type: ignore[operator]
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=siamese,
        batch=lambda k: (normal(k, 6, 6), normal(k + 40, 6, 6) * (10000.0 if k == 2 else 1.0)),
        policy=MIXED,
        steps=2,
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8)
        self.write = nn.ModuleDict({"shared": self.read})

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.mix(self.read(x) * 0.01)) * 60.0
        return self.write["shared"](h)  # FAULT shared_layer


@fault(
    "A", kind="overflow", op="linear", module="read", phase="forward", step=3, also=("write.shared",), cures=("bf16",)
)
def shared_layer() -> Case:
    """One layer at two places of the model; only its second use overflows."""
    torch.manual_seed(40)
    model = Tied()
    with torch.no_grad():
        model.read.weight.mul_(40)
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x) * 1e-3, y),
        batch=lambda k: (normal(k, 6, 8) * (600.0 if k == 3 else 1.0), labels(k, 6, 8)),
        policy=MIXED,
        steps=3,
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = mlp(6, 8, seed=41), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        return self.first(h), self.second(h)


def two_losses(model: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    logits, value = model(x)
    main = F.cross_entropy(logits, y)
    error = value[:, 0] - target.to(value.dtype)  # FAULT auxiliary_loss
    return main + 1e-3 * F.smooth_l1_loss(error, torch.zeros_like(error))


@fault("A", kind="overflow", op="to", module="", phase="forward", step=2, cures=("bf16",))
def auxiliary_loss() -> Case:
    """Two losses: the second one's target, 1e5, is converted to the fp16 of the prediction by hand."""
    torch.manual_seed(41)
    model = TwoHeads()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=two_losses,
        batch=lambda k: (normal(k, 6, 6), labels(k, 6), normal(k + 3, 6) + (1e5 if k == 2 else 0.0)),
        policy=MIXED,
        steps=2,
    )


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.half() * 4).float()  # FAULT function_in_half

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 4


half: Any = Half.apply


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.after(half(self.before(x).float()))


@fault("A", kind="overflow", op="mul", module="", phase="forward", step=2)
def function_in_half() -> Case:
    """A custom autograd.Function that computes in half whatever the policy says; what comes after it is NaN."""
    torch.manual_seed(42)
    model = WithFunction()
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x), y),
        batch=lambda k: (normal(k, 6, 5) * (30000.0 if k == 2 else 1.0), labels(k, 6, 3)),
        policy=BF16,
        steps=2,
    )


@fault("A", kind="overflow", op="mul", module="1", phase="forward", step=3, cures=("bf16",))
def third_micro_batch() -> Case:
    """Four micro-batches an update; only the third one is heavy."""
    torch.manual_seed(43)
    model = nn.Sequential(nn.Linear(6, 8), Interaction(), nn.Linear(8, 4))
    return Case(
        model=model,
        optimizer=adam(model),
        loss_fn=lambda m, x, y: F.cross_entropy(m(x), y),
        batch=lambda k: (normal(k, 6, 6) * (700.0 if k == 3 else 1.0), labels(k, 6)),
        policy=MIXED,
        steps=4,
        options={"accumulate": 4, "clip_norm": 1.0},
    )


class Interaction(nn.Module):
    def forward(self, h: Tensor) -> Any:
        return h * h.flip(-1)  # FAULT third_micro_batch
