"""List A, faults of losses and of formulas written by hand: poles, 0/0, temperatures, probabilities that round to 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from benchmarks.faults.case import (
    BF16,
    FULL,
    MIXED,
    TORCH,
    Case,
    at,
    case,
    fault,
    generator,
    labels,
    model_of,
    normal,
    tokens,
)


def mlp(inputs: int, outputs: int, *, hidden: int = 16, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


# ------------------------------------------------------------------ temperatures


def contrast(model: Any, a: Tensor, b: Tensor) -> Tensor:
    left, right = F.normalize(model(a), dim=-1), F.normalize(model(b), dim=-1)
    similarity = left @ right.T
    logits = similarity / 1e-5  # FAULT contrastive_temperature
    return F.cross_entropy(logits, torch.arange(len(a)))


@fault("overflow", "div", step=1, cures=("op fp32", "bf16"))
def contrastive_temperature() -> Case:
    """A temperature of 1e-5 for cosine similarities in fp16: 1 / 1e-5 is out of range."""
    model = mlp(8, 8, seed=21)
    return case(
        model,
        lambda k: (x := normal(k, 6, 8), x + 0.1 * normal(k + 50, 6, 8)),
        contrast,
        policy=MIXED.replace(scale=1.0),
    )


def clip_forward(self: Any, x: Tensor, y: Tensor) -> Any:
    image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
    return self.log_scale.exp() * (image @ text.T)  # FAULT learned_temperature


@fault("overflow", "mul", seed=22, step=3, cures=("op fp32", "bf16"))
def learned_temperature() -> Case:
    """A learned temperature without a bound has run away to exp(13)."""
    model = model_of(
        clip_forward, image=nn.Linear(12, 8), text=nn.Embedding(20, 8), log_scale=nn.Parameter(torch.tensor(2.6))
    )

    return case(
        model,
        lambda k: (normal(k, 6, 12), labels(k, 6, 20)),
        lambda m, x, y: F.cross_entropy(m(x, y), torch.arange(len(x))),
        policy=MIXED.replace(scale=2.0**-6),
        before=at(3, lambda: model.log_scale.fill_(13.0)),
    )


# ------------------------------------------------------------------ logarithms of what has rounded to zero


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(model(x)[:, 0])
    right = torch.where(y > 0, p, 1 - p)
    surprise = -torch.log(right)  # FAULT focal_loss
    return ((1 - right) ** 2 * surprise).mean()


@fault("invalid", "log", step=2, cures=("bf16",))
def focal_loss() -> Case:
    """A focal loss by hand: in fp16 a probability below 2**-25 is 0, and its logarithm -inf."""
    model: Any = mlp(8, 1, seed=23)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 8)
        return x * (20.0 if step == 2 else 1.0), torch.ones(8)

    return case(model, batch, focal, before=at(2, lambda: model[2].bias.fill_(-25.0)))


def pointer_forward(self: Any, x: Tensor) -> Any:
    hidden, _ = self.lstm(x)
    return torch.softmax(self.out(hidden[:, -1]), -1)


def nll_of_softmax(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(torch.log(model(x)), y)  # FAULT log_of_softmax


# torch alone has no fp16 LSTM on a CPU without the units for it
@fault("invalid", "log", seed=24, step=3, cures=("op fp32: softmax", "bf16"), plain=False)
def log_of_softmax() -> Case:
    """An LSTM classifier that returns probabilities: softmax gives 0 in fp16 and the loss takes its logarithm."""
    model = model_of(pointer_forward, lstm=nn.LSTM(6, 12, batch_first=True), out=nn.Linear(12, 5))

    return case(
        model,
        lambda k: (normal(k, 6, 7, 6), torch.arange(6) % 5),
        nll_of_softmax,
        before=at(3, lambda: model.out.bias.copy_(torch.tensor([20.0, 0.0, 0.0, 0.0, 0.0]))),
    )


def policy_forward(self: Any, x: Tensor) -> Any:
    return torch.softmax(self.actions(torch.tanh(self.body(x))), -1)


def policy_loss(model: Any, x: Tensor, a: Tensor) -> Any:
    p = model(x)
    chosen = p.gather(1, a[:, None]).float()
    plogp = p * torch.log(p)  # FAULT entropy_bonus
    return -(torch.log(chosen + 1e-6).mean() - 0.01 * plogp.sum(-1).mean())


@fault("invalid", "log", step=2, cures=("op fp32: softmax", "bf16"))
def entropy_bonus() -> Case:
    """Reinforcement learning's entropy as p log p: for an action that became impossible it is 0 * -inf."""
    model = model_of(policy_forward, body=mlp(6, 12, seed=25), actions=nn.Linear(12, 3))

    return case(
        model,
        lambda k: (normal(k, 8, 6), torch.arange(8) % 2),
        policy_loss,
        before=at(2, lambda: model.actions.bias.copy_(torch.tensor([0.0, 1.0, -30.0]))),
    )


def mixture_forward(self: Any, x: Tensor, y: Tensor) -> Any:
    weight, mean, width = self.body(x).chunk(3, -1)
    density = torch.exp(-0.5 * ((y - mean) / (F.softplus(width) + 0.01)) ** 2)
    likelihood = torch.log((weight.softmax(-1) * density).sum(-1))  # FAULT mixture_density
    return -likelihood.mean()


@fault("invalid", "log", step=3)
def mixture_density() -> Case:
    """A mixture density network in fp32: an outlier is so unlikely that its density is 0."""
    model = model_of(mixture_forward, body=mlp(4, 9, seed=26))
    return case(
        model,
        lambda k: (normal(k, 8, 4), normal(k + 9, 8, 1) * (300.0 if k == 3 else 1.0)),
        lambda m, x, y: m(x, y),
        policy=FULL,
    )


def vae_forward(self: Any, x: Tensor, noise: Tensor) -> Any:
    mean, logvar = self.encoder(x).chunk(2, -1)
    z = mean + noise * torch.exp(0.5 * logvar.clamp(max=10.0))
    return self.decoder(z), mean, logvar


def elbo(model: Any, x: Tensor, noise: Tensor) -> Any:
    image, mean, logvar = model(x, noise)
    variance = torch.exp(logvar)  # FAULT kl_of_a_vae
    return F.mse_loss(image, x) - 1e-3 * (1 + logvar - mean * mean - variance).mean()


@fault("overflow", "exp", seed=27, step=2, cures=("op fp32", "bf16"))
def kl_of_a_vae() -> Case:
    """The KL term of a VAE: the variance of one latent is exp(12), where torch's CPU lists keep exp in fp16."""
    model = model_of(
        vae_forward,
        encoder=nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)),
        decoder=nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12)),
    )

    def widen() -> None:
        model.encoder[2].bias[5] = 12.0

    return case(model, lambda k: (normal(k, 8, 12), normal(k + 77, 8, 4)), elbo, policy=TORCH, before=at(2, widen))


# ------------------------------------------------------------------ 0 / 0


def standardised_forward(self: Any, x: Tensor) -> Any:
    x = (x - x.mean(0)) / x.std(0)  # FAULT constant_feature
    return self.body(x)


@fault("invalid", "div", step=3)
def constant_feature() -> Case:
    """A feature is the same in all rows of one batch; standardising it divides 0 by 0 in every format."""
    model = model_of(standardised_forward, body=mlp(5, 4, seed=28))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 5)
        if step == 3:
            x[:, 2] = 1.0
        return x, labels(step, 8)

    return case(model, batch, lambda m, x, y: F.cross_entropy(m(x), y), policy=BF16)


class UnitRows(nn.Module):
    def forward(self, h: Tensor) -> Any:
        length = h.abs().amax(-1, keepdim=True)
        return h / (length + 1e-8)  # FAULT vanishing_eps


@fault("invalid", "div", "unit", seed=29, step=2, cures=("bf16", "module fp32: fc"))
def vanishing_eps() -> Case:
    """1e-8 is 0 in fp16: where ReLU has silenced a row, it no longer protects the division."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unit, self.out = nn.Linear(6, 16), UnitRows(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.unit(F.relu(self.fc(x))))

    model = Net()

    return case(
        model,
        lambda k: (normal(k, 8, 6), labels(k, 8)),
        lambda m, x, y: F.cross_entropy(m(x), y),
        before=at(2, lambda: model.fc.bias.fill_(-20.0)),
    )


def cosine_by_hand(model: Any, a: Tensor, b: Tensor) -> Any:
    u, v = model(a), model(b)
    cosine = (u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1))  # FAULT cosine_of_zeros
    return (1 - cosine).mean()


@fault("invalid", "div", seed=30, step=3)
def cosine_of_zeros() -> Case:
    """Cosine similarity by hand: an empty document is the zero vector, and a layer without bias keeps it so."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def batch(step: int) -> tuple[Any, ...]:
        a = normal(step, 5, 8)
        if step == 3:
            a[2] = 0.0
        return a, normal(step + 60, 5, 8)

    return case(model, batch, cosine_by_hand, policy=BF16)


def masked_mean(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * mask).sum() / mask.sum()  # FAULT empty_mask


@fault("invalid", "div", seed=31, step=2)
def empty_mask() -> Case:
    """A batch in which no token counts: the mean over none."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def batch(step: int) -> tuple[Any, ...]:
        x = tokens(step, (10,), 12)
        return x, x.roll(1), torch.full((10,), 0.0 if step == 2 else 1.0)

    return case(model, batch, masked_mean)


def ignored(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)  # FAULT all_ignored


@fault("invalid", "cross_entropy", seed=32, step=3)
def all_ignored() -> Case:
    """F.cross_entropy whose labels are all ignore_index."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.GELU(), nn.Linear(8, 12))

    def batch(step: int) -> tuple[Any, ...]:
        x = torch.randint(1, 12, (2, 6), generator=generator(step))
        return x, torch.zeros_like(x) if step == 3 else x.flip(1)

    return case(model, batch, ignored, policy=BF16)


class HandLogSumExp(nn.Module):
    def forward(self, scores: Tensor) -> Any:
        top = scores.amax(-1, keepdim=True)
        shifted = scores - top  # FAULT inf_minus_inf
        return top + torch.log(torch.exp(shifted).sum(-1, keepdim=True))


@fault("invalid", "sub", "pool", seed=33, step=2)
def inf_minus_inf() -> Case:
    """A logsumexp by hand over candidates that are all masked: -inf - -inf."""

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

    return case(model, batch, lambda m, x, mask: m(x, mask).mean())


# ------------------------------------------------------------------ bf16 and fp32 overflow


def energy_forward(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    energy = h * h  # FAULT bf16_square
    return self.out(energy) * 1e-30


@fault("overflow", "mul", seed=34, step=2)
def bf16_square() -> Case:
    """The square of 1e20 is too large for bf16, which has fp32's range; fp32 does not help."""
    model = model_of(energy_forward, fc=nn.Linear(4, 8), out=nn.Linear(8, 1))
    return case(
        model,
        lambda k: (normal(k, 6, 4) * (1e20 if k == 2 else 1.0), normal(k + 1, 6)),
        lambda m, x, y: F.mse_loss(m(x)[:, 0], y),
        policy=BF16,
    )


def low_mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y.to(torch.float16))  # FAULT loss_in_fp16


# torch.autocast never computes a loss in fp16
@fault("overflow", "mse_loss", plain=False, step=2, cures=("op fp32", "bf16"))
def loss_in_fp16() -> Case:
    """O3 computes the loss in fp16 as well: the square of an error of 400 is infinite."""
    model = mlp(6, 1, seed=35)
    return case(
        model,
        lambda k: (normal(k, 8, 6), normal(k + 1, 8, 1) * (400.0 if k == 2 else 1.0)),
        low_mse,
        policy=hs.Policy.of("O3", dtype="fp16"),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
    )


# ------------------------------------------------------------------ structure: graphs, recurrence, reuse, recomputation


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Linear(inputs, outputs)

    def forward(self, adjacency: Tensor, h: Tensor) -> Any:
        gathered = adjacency @ self.weight(h)  # FAULT graph_hub
        return F.relu(gathered / adjacency.sum(-1, keepdim=True).clamp(min=1))


def graph_forward(self: Any, adjacency: Tensor, x: Tensor) -> Any:
    return self.conv2(adjacency, self.conv1(adjacency, x))


@fault("overflow", "matmul", "conv2", seed=36, step=2, cures=("op fp32", "module fp32"))
def graph_hub() -> Case:
    """A graph with a hub of 200 neighbours: their messages are summed in fp16 before they are averaged."""
    model = model_of(graph_forward, conv1=GraphConv(4, 8), conv2=GraphConv(8, 3))

    def batch(step: int) -> tuple[Any, ...]:
        adjacency = torch.eye(200)
        if step == 2:
            adjacency[0] = 1.0
        return adjacency, torch.full((200, 4), 2.0) + 0.1 * normal(step, 200, 4), labels(step, 200, 3)

    return case(
        model,
        batch,
        lambda m, a, x, y: F.cross_entropy(m(a, x), y),
        policy=MIXED.replace(scale=1.0),
        before=at(2, lambda: (model.conv2.weight.bias.fill_(1000.0), model.conv2.weight.weight.mul_(0.1))),
    )


def recurrent_forward(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.enter(x[:, 0]))
    for t in range(1, x.shape[1]):
        carried = self.keep(h)  # FAULT exploding_state
        h = torch.relu(carried + 1e-3 * self.enter(x[:, t]))
    return self.out(h)


@fault("overflow", "linear", "keep", seed=37, step=2, cures=("bf16",))
def exploding_state() -> Case:
    """A recurrent net that doubles its state at each step of time: a sequence of 24 is too long for fp16."""
    model = model_of(recurrent_forward, enter=nn.Linear(4, 8), keep=nn.Linear(8, 8, bias=False), out=nn.Linear(8, 3))
    with torch.no_grad():
        model.keep.weight.copy_(2 * torch.eye(8))
        model.out.weight.mul_(1e-3)
    return case(
        model,
        lambda k: (normal(k, 4, 24 if k == 2 else 6, 4) + 1.0, labels(k, 4, 3)),
        lambda m, x, y: F.cross_entropy(m(x) * 1e-3, y),
        policy=MIXED.replace(scale=2.0**-8),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
    )


def gated_forward(self: Any, x: Tensor) -> Any:
    gated = self.gate(x) * self.value(x)  # FAULT checkpointed_gate
    return self.out(gated)


def recomputing_forward(self: Any, x: Tensor) -> Any:
    for block in self.blocks:
        x = torch.tanh(checkpoint(block, x, use_reentrant=False))
    return self.head(x)


@fault("overflow", "mul", "blocks.0", seed=38, step=3, cures=("module fp32", "bf16"))
def checkpointed_gate() -> Case:
    """A gated layer under activation checkpointing: gate times value of a heavy batch."""
    model = model_of(
        recomputing_forward,
        blocks=nn.ModuleList(
            model_of(gated_forward, gate=nn.Linear(8, 16), value=nn.Linear(8, 16), out=nn.Linear(16, 8))
            for _ in range(2)
        ),
        head=nn.Linear(8, 4),
    )
    return case(
        model,
        lambda k: (normal(k, 8, 8) * (800.0 if k == 3 else 1.0), labels(k, 8)),
        lambda m, x, y: F.cross_entropy(m(x), y),
    )


def twice_forward(self: Any, x: Tensor) -> Any:
    return self.body(x)  # FAULT second_call


def siamese(model: Any, a: Tensor, b: Tensor) -> Any:
    near, far = model(a), model(b)
    return (near.float() - far.float()).abs().mean() * 1e-3


@fault("overflow", "linear", "body.2", seed=39, step=2, cures=("bf16",))
def second_call() -> Case:
    """A siamese pair: the first call of the model is harmless, the second one, with the other image, overflows."""
    model = model_of(twice_forward, body=nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)))
    with torch.no_grad():
        model.body[2].weight.mul_(30)
    return case(model, lambda k: (normal(k, 6, 6), normal(k + 40, 6, 6) * (10000.0 if k == 2 else 1.0)), siamese)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8)
        self.write = nn.ModuleDict({"shared": self.read})

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.mix(self.read(x) * 0.01)) * 60.0
        return self.write["shared"](h)  # FAULT shared_layer


@fault("overflow", "linear", "read", seed=40, step=3, also=("write.shared",), cures=("bf16",))
def shared_layer() -> Case:
    """One layer at two places of the model; only its second use overflows."""
    model = Tied()
    with torch.no_grad():
        model.read.weight.mul_(40)
    return case(
        model,
        lambda k: (normal(k, 6, 8) * (600.0 if k == 3 else 1.0), labels(k, 6, 8)),
        lambda m, x, y: F.cross_entropy(m(x) * 1e-3, y),
    )


def two_heads_forward(self: Any, x: Tensor) -> Any:
    h = self.body(x)
    return self.first(h), self.second(h)


def two_losses(model: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    logits, value = model(x)
    main = F.cross_entropy(logits, y)
    error = value[:, 0] - target.to(value.dtype)  # FAULT auxiliary_loss
    return main + 1e-3 * F.smooth_l1_loss(error, torch.zeros_like(error))


@fault("overflow", "to", seed=41, step=2, cures=("bf16",))
def auxiliary_loss() -> Case:
    """Two losses: the second one's target, 1e5, is converted to the fp16 of the prediction by hand."""
    model = model_of(two_heads_forward, body=mlp(6, 8, seed=41), first=nn.Linear(8, 4), second=nn.Linear(8, 1))
    return case(
        model, lambda k: (normal(k, 6, 6), labels(k, 6), normal(k + 3, 6) + (1e5 if k == 2 else 0.0)), two_losses
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


def with_function_forward(self: Any, x: Tensor) -> Any:
    return self.after(half(self.before(x).float()))


@fault("overflow", "mul", seed=42, step=2)
def function_in_half() -> Case:
    """A custom autograd.Function that computes in half whatever the policy says; what comes after it is NaN."""
    model = model_of(with_function_forward, before=nn.Linear(5, 8), after=nn.Linear(8, 3))
    return case(
        model,
        lambda k: (normal(k, 6, 5) * (30000.0 if k == 2 else 1.0), labels(k, 6, 3)),
        lambda m, x, y: F.cross_entropy(m(x), y),
        policy=BF16,
    )


@fault("overflow", "mul", "1", seed=43, step=3, cures=("bf16",))
def third_micro_batch() -> Case:
    """Four micro-batches an update; only the third one is heavy."""
    model = nn.Sequential(nn.Linear(6, 8), Interaction(), nn.Linear(8, 4))
    return case(
        model,
        lambda k: (normal(k, 6, 6) * (700.0 if k == 3 else 1.0), labels(k, 6)),
        lambda m, x, y: F.cross_entropy(m(x), y),
        steps=4,
        options={"accumulate": 4, "clip_norm": 1.0},
    )


class Interaction(nn.Module):
    def forward(self, h: Tensor) -> Any:
        return h * h.flip(-1)  # FAULT third_micro_batch
