"""Controls of the second set: healthy programs with infinities, NaN, zeros and large numbers that do no harm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import BF16, INF, MIXED, Case, case, control, labels, model_of, normal, tokens

# ------------------------------------------------------------------ infinities that are meant


def edge_softmax_forward(self: Any, h: Tensor, source: Tensor, target: Tensor) -> Any:
    score = self.score(h)[source, 0].float()
    top = torch.full((len(h),), -INF).scatter_reduce(0, target, score.detach(), "amax")
    weight = torch.exp(score - top[target])
    total = torch.zeros(len(h)).index_add(0, target, weight).clamp(min=1e-6)
    value = self.value(h)[source].float() * (weight / total[target])[:, None]
    return self.head(torch.zeros(len(h), 8).index_add(0, target, value))


@control("the maximum over no edges is -inf", seed=501)
def nodes_without_edges() -> Case:
    """Graph attention: half of the nodes have no edge, their maximum stays at -inf and is never gathered."""

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 10, 5), tokens(step, (12,), 10), tokens(step + 1, (12,), 5), labels(step, 10, 3)

    return case(
        model_of(edge_softmax_forward, value=nn.Linear(5, 8), score=nn.Linear(5, 1), head=nn.Linear(8, 3)),
        batch,
        lambda m, h, source, target, y: F.cross_entropy(m(h, source, target), y),
    )


def neighbours(model: Any, x: Tensor) -> Any:
    h = model(x).float()
    with torch.no_grad():
        distance = torch.cdist(h, h).fill_diagonal_(INF)
        nearest = distance.topk(2, largest=False).indices
    return (h[:, None] - h[nearest]).square().sum(-1).mean() + (h.square().mean() - 1).square()


@control("a point's distance to itself set to inf", seed=502)
def nearest_neighbours() -> Case:
    """Nearest neighbours without the point itself: inf on the diagonal, under no_grad."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    return case(model, lambda k: (normal(k, 9, 6),), neighbours)


def transcribe(model: Any, audio: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    frames = model(audio).permute(2, 0, 1).log_softmax(-1)
    return F.ctc_loss(frames, text, torch.full((len(lengths),), len(frames)), lengths, zero_infinity=True)


@control("CTC of a text that does not fit, with zero_infinity", seed=503)
def ctc_with_zero_infinity() -> Case:
    """One transcript is longer than its frames: its loss is inf and counts as 0, as asked for."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(8, 6, 1))

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 3, 4, 10), tokens(step, (3, 7), 5) + 1, torch.tensor([2, 7, 1])

    return case(model, batch, transcribe)


def tagger_forward(self: Any, x: Tensor) -> Any:
    return self.out(self.embed(x)).float()


def best_path(model: Any, x: Tensor, y: Tensor) -> Any:
    scores = model(x)
    total = F.cross_entropy(scores.flatten(0, 1), y.flatten()) + 1e-2 * model.moves.square().mean()
    with torch.no_grad():
        start = torch.full((len(x), 4), -INF)
        start[:, 0] = 0.0
        for now in scores.unbind(1):
            start = (start[:, :, None] + model.moves).amax(1) + now
        agreed = start.argmax(-1)
    mixed = scores.mean(1) + model.moves[agreed]
    return total + 0.1 * F.cross_entropy(mixed, y[:, -1])


@control("Viterbi from a start of -inf", seed=504)
def viterbi() -> Case:
    """A tagger decodes with all states but one at -inf in the beginning."""
    return case(
        model_of(tagger_forward, embed=nn.Embedding(15, 8), out=nn.Linear(8, 4), moves=nn.Parameter(torch.zeros(4, 4))),
        lambda k: (tokens(k, (4, 6), 15), tokens(k + 1, (4, 6), 4)),
        best_path,
    )


def packed_forward(self: Any, x: Tensor, document: Tensor) -> Any:
    h = self.embed(x)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
    length = x.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    allowed = causal & (document[:, :, None] == document[:, None, :])
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, -INF)[:, None].to(q.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return self.out(h + mixed.transpose(1, 2).flatten(2))


@control("attention of packed documents: most of a float mask is -inf", seed=505)
def packed_documents() -> Case:
    """Several documents in a row of tokens; scaled_dot_product_attention gets a mask of 0 and -inf."""

    def batch(step: int) -> tuple[Any, ...]:
        return tokens(step, (2, 9), 20), torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3, 3]] * 2)

    return case(
        model_of(packed_forward, embed=nn.Embedding(20, 16), qkv=nn.Linear(16, 48), out=nn.Linear(16, 20)),
        batch,
        lambda m, x, d: F.cross_entropy(m(x, d).flatten(0, 1), x.roll(-1, 1).flatten()),
    )


def sampled(model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    with torch.no_grad():
        least = logits.topk(3, -1).values[:, -1:]
        kept = logits.masked_fill(logits < least, -INF)
        chosen = torch.multinomial(kept.float().softmax(-1), 1)[:, 0]
        surprise = -kept.float().log_softmax(-1)
    loss = F.cross_entropy(logits, y, reduction="none")
    return (loss * torch.where(surprise.gather(1, chosen[:, None])[:, 0] < 20, 1.0, 0.5)).mean()


@control("top-k sampling: all other logits and their surprise are infinite", seed=506)
def top_k_sampling() -> Case:
    """Tokens are sampled from the best three; the surprise of the others is inf and is not asked for."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 10))
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8, 10)), sampled, policy=BF16)


# ------------------------------------------------------------------ poles that torch, or careful code, covers


class DeadRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 4)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias[2] = -20.0

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.conv(x)).float()
        present = h.amax((2, 3)) > 0
        mean = h.square().mean((2, 3))
        root = torch.where(present, mean, 1.0).sqrt() * present
        return self.head(root)


@control("the root of a channel that is 0, replaced before the root", seed=507)
def guarded_root() -> Case:
    """A silenced channel: where() before the root, not after it, keeps its derivative finite."""
    return case(DeadRoot(), lambda k: (normal(k, 3, 1, 6, 6), labels(k, 3)))


def spread(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = model[0](x)
    twins = torch.cdist(h.float(), h.float())
    deviation = h.float().std(0)
    return F.cross_entropy(model[1](h), y) + 1e-2 * F.relu(1 - deviation).mean() + 1e-3 * twins.mean()


@control("cdist of equal points and std of a constant, whose derivatives torch defines as 0", seed=508)
def distances_of_zero() -> Case:
    """Both are roots of 0, and torch's own backward knows."""
    body = nn.Linear(6, 8)
    with torch.no_grad():
        body.weight[3] = 0.0

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 8, 6)
        x[4:] = x[:4]
        return x, labels(step, 8)

    return case(nn.Sequential(body, nn.Linear(8, 4)), batch, spread)


def counts_forward(self: Any, counts: Tensor) -> Any:
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    surprise = torch.special.entr(share) + torch.xlogy(share, share + 1)
    return self.out(torch.tanh(self.fc(surprise + torch.log1p(counts))))


@control("0 log 0 and an empty row of counts", seed=509)
def empty_counts() -> Case:
    """Histograms, one of them empty: entr and xlogy define 0 log 0 as 0."""

    def batch(step: int) -> tuple[Any, ...]:
        counts = tokens(step, (6, 8), 4).float()
        counts[1] = 0
        return counts, labels(step, 6)

    return case(model_of(counts_forward, fc=nn.Linear(8, 8), out=nn.Linear(8, 4)), batch)


class Island(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Any:
        with hs.autocast(x.device.type, enabled=False):
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-20) * self.gain).to(x.dtype)


@control("RMSNorm by hand with an eps of 1e-20 and values of 5000, in fp32", seed=510)
def norm_in_an_island() -> Case:
    """Squares and eps would both leave fp16; the norm computes in fp32 and says so."""
    model = nn.Sequential(nn.Linear(6, 12), Island(12), nn.Linear(12, 4))
    with torch.no_grad():
        model[0].bias.fill_(5000.0)  # type: ignore[operator]
        model[0].weight.mul_(5000.0)  # type: ignore[operator]
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)))


def confident(model: Any, x: Tensor, y: Tensor) -> Any:
    margin = model(x)[:, 0] * torch.where(y > 0, 1.0, -1.0)
    return F.softplus(-margin).mean() - 0.1 * F.logsigmoid(margin.float()).mean()


@control("softplus and logsigmoid of 30000", seed=511)
def far_from_the_border() -> Case:
    """Logits of thousands: exp of them is inf, and neither function takes it."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    with torch.no_grad():
        model[2].weight.mul_(3000.0)  # type: ignore[operator]
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8, 2)), confident, policy=MIXED.replace(scale=1.0))


# ------------------------------------------------------------------ large numbers, zeros, small updates


def wide_forward(self: Any, x: Tensor) -> Any:
    return self.out(self.norm(self.up(x) * 1e-10))


@control("activations of 1e20 and 1e10 in bf16", seed=512)
def far_range_of_bf16() -> Case:
    """bf16 has fp32's range: 1e20 is a number like others, and a norm follows."""
    return case(
        model_of(wide_forward, up=nn.Linear(6, 12), norm=nn.LayerNorm(12), out=nn.Linear(12, 4)),
        lambda k: (normal(k, 8, 6) * 1e20, labels(k, 8)),
        policy=BF16,
    )


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(200, 12), nn.Dropout(0.8)
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 200, bias=False)
        self.head.weight = self.embed.weight
        self.body.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(torch.tanh(self.body(self.embed(x)))))


@control("dropout of 0.8, tied weights, a frozen layer, a vocabulary of which a batch has a tenth", seed=513)
def mostly_zeros() -> Case:
    """Zeros everywhere, and all of them meant: dropped, not trained, not seen."""
    return case(
        Language(),
        lambda k: (tokens(k, (3, 6), 200),),
        lambda m, x: F.cross_entropy(m(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
    )


@control("updates below half an ulp of bf16 weights that have masters", seed=514)
def small_steps_with_masters() -> Case:
    """bf16 weights, steps of 1e-5: the fp32 values behind the weights take them all."""
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4))
    return case(
        model, lambda k: (normal(k, 16, 6), labels(k, 16)), policy=hs.Policy.of("O2", dtype="bf16"), lr=1e-5, steps=6
    )


@control("a learning rate of 0 in the first steps of a warm-up", seed=515)
def warm_up_from_zero() -> Case:
    """The first update changes nothing since its rate is 0, the next ones little."""
    model = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def warm(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (step - 1) / 100

    return case(
        model, lambda k: (normal(k, 8, 6), labels(k, 8)), policy=BF16, optimizer=optimizer, steps=5, before=warm
    )


@control("the optimizer's state in bf16, rounded stochastically", seed=516)
def low_state_by_policy() -> Case:
    """Half the bytes of Adam's state; what rounding takes it gives back on average."""
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))
    policy = hs.Policy.of("mixed", dtype="bf16", state="low")
    return case(model, lambda k: (normal(k, 16, 6), labels(k, 16)), policy=policy, steps=6)


@control("a scale of 2**26 on its way down, over windows of two and with BatchNorm", seed=517, skips=12)
def scale_far_too_high_at_first() -> Case:
    """The default rule from too high a start: it halves until gradients fit, and nothing is wrong."""
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    rule = hs.ScaleRule(init=2.0**26, interval=1000, ceiling=2.0**26)
    return case(
        model,
        lambda k: (normal(k, 4, 1, 6, 6), labels(k, 4)),
        policy=hs.Policy.of("O2", dtype="fp16", scale=rule),
        steps=26,
        options={"accumulate": 2, "clip_norm": 1.0},
    )


@control("gradients of 1e4, clipped", seed=518)
def clipped_gradients() -> Case:
    """A loss with a factor of 1e4 in bf16, under clip_norm: large is not infinite."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    return case(
        model,
        lambda k: (normal(k, 8, 6), normal(k + 1, 8, 1)),
        lambda m, x, y: 1e4 * F.mse_loss(m(x), y),
        policy=BF16,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        options={"clip_norm": 1.0},
    )
