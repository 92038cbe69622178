"""Controls: healthy programs with infinities, NaN, zeros and large numbers that are meant, or do no harm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import BF16, INF, MIXED, Case, case, control, labels, model_of, normal, tokens

# ------------------------------------------------------------------ masks


class Causal(nn.Module):
    mask: Tensor

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)
        self.fill = fill
        self.register_buffer("mask", torch.full((8, 8), fill).triu(1))

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * 0.25 + self.mask
        return self.out(h + torch.softmax(scores, -1) @ v)


def next_token(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@control("a buffer of -inf added to attention logits", seed=101)
def infinite_mask() -> Case:
    """A causal mask of -inf, kept in a buffer and added to fp16 logits."""
    return case(Causal(-INF), lambda k: (tokens(k, (3, 8), 20),), next_token)


@control("finfo.min of fp32 as a mask, -inf once it is rounded to fp16", seed=102)
def smallest_number_mask() -> Case:
    """finfo(fp32).min added to fp32 logits, whose sum is rounded to -inf when it becomes fp16 again."""
    low = torch.finfo(torch.float32).min
    return case(Causal(low), lambda k: (tokens(k, (3, 8), 20),), next_token)


class Filled(nn.Module):
    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value, self.out, self.fc = value, nn.Linear(12, 4), nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        h = self.fc(x)
        scores = h @ h.transpose(-2, -1)
        low = torch.finfo(scores.dtype).min if self.value is None else self.value
        scores = scores.masked_fill(~mask[:, None, :], low)
        return self.out((scores.softmax(-1) @ h).mean(1))


def with_lengths(step: int) -> tuple[Any, ...]:
    lengths = torch.tensor([[6], [4], [1]])
    return normal(step, 3, 6, 12), torch.arange(6) < lengths, labels(step, 3)


def classify_masked(model: Any, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, mask), y)


@control("masked_fill with -inf before softmax", seed=103)
def filled_with_inf() -> Case:
    """Padding is masked with -inf; every row keeps a key."""
    return case(Filled(-INF), with_lengths, classify_masked)


@control("masked_fill with the format's lowest number", seed=104)
def filled_with_lowest() -> Case:
    """Padding is masked with finfo.min of the logits' own format."""
    return case(Filled(None), with_lengths, classify_masked, policy=BF16)


def safe_rows_forward(self: Any, x: Tensor, mask: Tensor) -> Any:
    q = self.fc(x)[:, None]
    h = F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])[:, 0]
    return self.out(h.mean(1))


@control("scaled_dot_product_attention with a row that may see nothing", seed=105)
def attention_to_nothing() -> Case:
    """The attention of torch gives 0 for a query whose keys are all masked; nothing is NaN."""

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 3, 6, 12), torch.arange(6) < torch.tensor([[6], [0], [3]]), labels(step, 3)

    return case(model_of(safe_rows_forward, fc=nn.Linear(12, 12), out=nn.Linear(12, 4)), batch, classify_masked)


# ------------------------------------------------------------------ infinities that the program removes again


def hidden_log(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(model(x).float(), -1)
    target = F.one_hot(y, 4).float()
    entropy = torch.where(target > 0, target * torch.log(target), 0.0)
    return -(target * torch.log(p)).sum(-1).mean() + entropy.sum()


@control("log of 0, hidden by where, of something that needs no gradient", seed=106)
def hidden_infinity() -> Case:
    """The entropy of a one-hot target: 0 * -inf is NaN, and where() puts 0 there."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), hidden_log)


def margin_to_best(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x).float()
    others = scores.masked_fill(F.one_hot(y, 4).bool(), -INF)
    return F.relu(1 + torch.logsumexp(others, -1) - scores.gather(1, y[:, None])[:, 0]).mean()


@control("logsumexp over scores some of which are -inf", seed=107)
def logsumexp_of_inf() -> Case:
    """The best of the other classes, softly: the right one is -inf."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), margin_to_best)


def running_best(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    best = torch.full(scores.shape[:1], -INF)
    least = torch.full(scores.shape[:1], INF)
    for column in scores.unbind(-1):
        best, least = torch.maximum(best, column.float()), torch.minimum(least, column.float())
    return F.cross_entropy(scores, y) + 1e-3 * (best - least).mean()


@control("inf as the start of a running minimum and maximum", seed=108)
def infinite_start() -> Case:
    """A fold that starts at -inf and inf."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), running_best, policy=BF16)


def clamped(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        weight = (1 / (y == 0).float()).clamp(max=5.0)
    return (weight * F.cross_entropy(model(x), y, reduction="none")).mean()


@control("1 / 0, clamped", seed=109)
def clamped_infinity() -> Case:
    """Weights 1/count where the count is 0: inf, clamped to 5 before anything is made of it."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), clamped)


def router_forward(self: Any, x: Tensor) -> Any:
    scores = self.gate(x)
    kept = scores.topk(2, -1)
    sparse = torch.full_like(scores, -INF).scatter(-1, kept.indices, kept.values)
    weights = sparse.softmax(-1)
    mixed = torch.stack([expert(x) for expert in self.experts], -1) * weights[:, None]
    return self.out(mixed.sum(-1))


@control("all but the top two gates at -inf", seed=110)
def top_two_experts() -> Case:
    """A mixture of experts: the gates of those not chosen are -inf before softmax."""
    return case(
        model_of(
            router_forward,
            gate=nn.Linear(8, 6),
            out=nn.Linear(8, 4),
            experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(6)),
        ),
        lambda k: (normal(k, 8, 8), labels(k, 8)),
    )


@control("NaN and inf in the batch, cleaned by the model", seed=111)
def cleaned_input() -> Case:
    """Missing values come as NaN and saturated ones as inf; the model's first line replaces them."""

    class Cleaning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

        def forward(self, x: Tensor) -> Any:
            return self.body(torch.nan_to_num(x, nan=0.0, posinf=3.0, neginf=-3.0))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 6)
        x[0, 0], x[1, 1], x[2, 2] = float("nan"), INF, -INF
        return x, labels(step, 8)

    return case(Cleaning(), batch, policy=BF16)


def pooling_forward(self: Any, x: Tensor) -> Any:
    h = F.pad(self.conv(x), (1, 1, 1, 1), value=-INF)
    return self.head(F.max_pool2d(h, 3, stride=2).flatten(1))


@control("padding with -inf before max-pooling", seed=112)
def padded_pool() -> Case:
    """Max-pooling over a border of -inf, padded by hand."""
    return case(
        model_of(pooling_forward, conv=nn.Conv2d(1, 4, 3, padding=1), head=nn.Linear(64, 4)),
        lambda k: (normal(k, 3, 1, 8, 8), labels(k, 3)),
    )


class Bounded(nn.Module):
    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("low", torch.tensor([0.0, -1.0, -INF, -INF]))
        self.register_buffer("high", torch.tensor([1.0, INF, INF, INF]))

    def forward(self, x: Tensor) -> Any:
        return torch.maximum(torch.minimum(self.fc(x), self.high), self.low)


@control("buffers that hold inf: bounds that bind nothing", seed=113)
def infinite_bounds() -> Case:
    """Bounds of actions as buffers, inf where there is no bound."""
    return case(Bounded(), lambda k: (normal(k, 8, 6), labels(k, 8)), policy=hs.Policy.of("O2", dtype="fp16"))


# ------------------------------------------------------------------ large, zero, one value


@control("layer_norm of fp16 values of 20000", seed=114)
def large_layer_norm() -> Case:
    """F.layer_norm of large fp16 values computes its statistics in fp32."""
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return case(
        model, lambda k: ((normal(k, 8, 6) * 20000).clamp(-40000, 40000), labels(k, 8)), policy=MIXED.replace(scale=1.0)
    )


def cosine_loss(model: Any, a: Tensor, b: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(model(a), model(b), dim=-1)).mean()


@control("cosine_similarity of zero vectors", seed=115)
def cosine_of_nothing() -> Case:
    """F.cosine_similarity of zeros is 0, and its gradient finite, though large: eps is what it divides by."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh())

    def batch(step: int) -> tuple[Any, ...]:
        a = normal(step, 4, 6)
        a[0] = 0
        return a, normal(step + 9, 4, 6)

    return case(model, batch, cosine_loss, policy=BF16)


@control("BatchNorm of one value, in eval mode", seed=116)
def batch_norm_of_one() -> Case:
    """A frozen BatchNorm on a batch of one."""
    norm = nn.BatchNorm1d(12).eval()
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 1, 6), labels(k, 1)))


@control("a class of weight 0 and one without samples", seed=117)
def weightless_class() -> Case:
    """Class weights with a zero; a batch in which one class does not occur."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    weight = torch.tensor([0.0, 1.0, 2.0, 1.0])

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weight)

    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8) % 3), loss_fn)


def nll(model: Any, x: Tensor) -> Tensor:
    logits = model(x)[:, :-1]
    banned = torch.zeros(20)
    banned[0] = -INF
    return F.cross_entropy((logits + banned).flatten(0, 1), x[:, 1:].flatten() % 19 + 1)


@control("a token that is never right, at -inf in the logits", seed=118)
def banned_token() -> Case:
    """A padding token whose logit is -inf; its log-probability is -inf and is never used."""
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    return case(model, lambda k: (tokens(k, (3, 8), 20),), nll)


def one_hot_forward(self: Any, x: Tensor) -> Any:
    h = self.table(F.one_hot(x, 20).float())
    return self.out(h.amax(1))


@control(
    "an embedding as a product with one-hot rows: mostly zeros, and gradients that are zero for unseen tokens", seed=119
)
def one_hot_embedding() -> Case:
    """Sparse by nature: zeros are not underflow."""
    return case(
        model_of(one_hot_forward, table=nn.Linear(20, 12, bias=False), out=nn.Linear(12, 4)),
        lambda k: (tokens(k, (4, 5), 20), labels(k, 4)),
    )


# ------------------------------------------------------------------ scales that find their size


@control("a dynamic scale that starts 4 halvings too high", seed=120, skips=8)
def scale_on_its_way_down() -> Case:
    """The scale begins at 2**24, skips a few steps, and is right from then on."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    rule = hs.ScaleRule(init=2.0**24, interval=1000)
    policy = hs.Policy.of("O2", dtype="fp16", scale=rule)
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=policy, steps=14)


@control("a dynamic scale that grows past the largest, once", seed=121, skips=2)
def scale_that_probes() -> Case:
    """Growth every second step: the scale passes what fp16 can hold once or twice and comes back."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    rule = hs.ScaleRule(init=2.0**16, interval=2, ceiling=2.0**24)
    policy = hs.Policy.of("O2", dtype="fp16", scale=rule)
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=policy, steps=8)


@control("a heavy sample that dynamic scaling skips, once", seed=122, skips=2)
def one_heavy_sample() -> Case:
    """A sample with a loss a thousand times larger overflows at the present scale; the scale halves and goes on."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    rule = hs.ScaleRule(init=2.0**12, interval=1000)

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 8, 6), normal(step + 1, 8, 1) * (100.0 if step == 3 else 1.0)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    policy = hs.Policy.of("mixed", dtype="fp16", scale=rule)
    return case(model, batch, loss_fn, policy=policy, steps=6)
