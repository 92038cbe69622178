"""List A of the second set, faults of the forward pass inside models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.faults.case import ALL, BF16, MIXED, TORCH, Case, at, case, fault, labels, model_of, normal, tokens

# ------------------------------------------------------------------ transformers


class AlibiAttention(nn.Module):
    slopes: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def forward(self, x: Tensor) -> Any:
        batch, length, dim = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, self.size).transpose(1, 2).flatten(0, 1)
            for part in self.qkv(x).chunk(3, -1)
        )
        place = torch.arange(length, device=x.device)
        bias = -(place[:, None] - place).abs() * self.slopes[:, None, None]
        bias = bias.repeat(batch, 1, 1)
        scores = torch.baddbmm(bias.to(q.dtype), q, k.transpose(1, 2), alpha=self.size**-0.5)  # FAULT alibi_scores
        mixed = torch.bmm(scores.softmax(-1), v)
        return self.out(mixed.unflatten(0, (batch, self.heads)).transpose(1, 2).reshape(batch, length, dim))


class GatedUnit(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = (
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(dim, hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)
        return self.wo(h)  # FAULT reentrant_block


class AlibiBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), AlibiAttention(16, 2)
        self.norm2, self.ff = nn.LayerNorm(16), GatedUnit(16, 24)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class AlibiModel(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList(AlibiBlock() for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def language(model: Any, rows: dict[str, Tensor]) -> Any:
    return model(**rows)["loss"]


def text(step: int) -> tuple[Any, ...]:
    ids = tokens(step, (3, 8), 20)
    return ({"input_ids": ids, "labels": ids},)


@fault("overflow", "baddbmm", "blocks.2.attn", seed=301, step=3, cures=ALL)
def alibi_scores() -> Case:
    """A decoder with ALiBi, called by keywords: queries and keys of the last block have grown 200-fold each."""
    model = AlibiModel(recompute=False)
    rows: Any = model.blocks[2].attn.qkv.weight  # type: ignore[union-attr]
    return case(model, text, language, before=at(3, lambda: rows[:32].mul_(300.0)))


@fault("overflow", "linear", "blocks.1.ff.wo", seed=302, step=2, cures=("bf16",))
def reentrant_block() -> Case:
    """The T5 disease: the output projection of a gated unit leaves fp16, here inside a re-entrant checkpoint."""
    model = AlibiModel(recompute=True)

    def grow() -> None:
        unit: Any = model.blocks[1].ff
        unit.wi_0.weight.mul_(40.0)
        unit.wi_1.weight.mul_(40.0)
        unit.wo.weight.mul_(300.0)

    return case(model, text, language, policy=MIXED.replace(scale=1.0), before=at(2, grow))


class SquaredUnit(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.fc1(self.norm(x) + x))
        return self.fc2(h * h)  # FAULT albert_third_visit


def albert_forward(self: Any, x: Tensor) -> Any:
    x = self.enter(x)
    for depth in range(6):
        x = x + self.groups[depth % 2](x)
    return self.out(self.norm(x))


@fault("overflow", "mul", "groups.1", seed=303, step=2, cures=("bf16",))
def albert_third_visit() -> Case:
    """Two blocks whose weights are shared over a depth of six: the state grows and a late visit's square overflows."""
    model = model_of(
        albert_forward,
        enter=nn.Linear(6, 8),
        out=nn.Linear(8, 4),
        groups=nn.ModuleList(SquaredUnit(8) for _ in range(2)),
        norm=nn.LayerNorm(8),
    )

    def grow() -> None:
        for group in model.groups:
            group.fc2.weight.fill_(0.01)
            group.fc1.weight.fill_(0.7)

    return case(
        model, lambda k: (normal(k, 6, 6) + 1.0, labels(k, 6)), policy=MIXED.replace(scale=1.0), before=at(2, grow)
    )


class RouterLoss(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts, bias=False)

    def forward(self, x: Tensor) -> Any:
        logits = self.gate(x)
        z = torch.logsumexp(logits, -1)
        return logits.softmax(-1), z.square().mean()  # FAULT router_z_loss


def expert_layer_forward(self: Any, x: Tensor) -> Any:
    weights, z = self.router(x)
    best, where = weights.max(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        rows = (where == number).nonzero()[:, 0]
        out = out.index_add(0, rows, (expert(x[rows]) * best[rows, None]).to(out.dtype))
    return x + out, z


def experts_forward(self: Any, x: Tensor) -> Any:
    penalty = x.new_zeros(())
    for layer in self.layers:
        x, z = layer(x)
        penalty = penalty + z
    return self.head(x), penalty


def with_penalty(model: Any, x: Tensor, y: Tensor) -> Any:
    logits, penalty = model(x)
    return F.cross_entropy(logits, y) + 1e-4 * penalty, {"penalty": penalty.detach()}


@fault("overflow", "square", "layers.1.router", seed=304, step=2, cures=ALL)
def router_z_loss() -> Case:
    """A mixture of experts' z-loss under torch.autocast's CPU lists: the square of a logsumexp of 300 and more."""
    model = model_of(
        experts_forward,
        layers=nn.ModuleList(
            model_of(
                expert_layer_forward, router=RouterLoss(4), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            )
            for _ in range(2)
        ),
        head=nn.Linear(8, 4),
    )
    return case(
        model,
        lambda k: (normal(k, 12, 8), labels(k, 12)),
        with_penalty,
        policy=TORCH,
        before=at(2, lambda: model.layers[1].router.gate.weight.mul_(1000.0)),
    )


# ------------------------------------------------------------------ convolutions


class Excite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels)
        self.squeeze = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.conv(x))
        gate = F.relu(self.squeeze(x.abs().mean((2, 3))))
        h.mul_(gate[:, :, None, None])  # FAULT excited_in_place
        return F.relu(h)


def excite_net_forward(self: Any, x: Tensor) -> Any:
    return self.head(self.stages(self.stem(x)).mean((2, 3)))


@fault("overflow", "mul_", "stages.1", seed=305, step=3, also=("mul",), cures=("bf16",))
def excited_in_place() -> Case:
    """Squeeze and excite with a gate that has no upper bound, multiplied in place into the features."""
    model = model_of(
        excite_net_forward,
        stem=nn.Conv2d(3, 8, 3, padding=1),
        head=nn.Linear(8, 4),
        stages=nn.Sequential(Excite(8), Excite(8), Excite(8)),
    )
    return case(
        model,
        lambda k: (normal(k, 2, 3, 6, 6), labels(k, 2)),
        before=at(3, lambda: model.stages[1].squeeze.bias.fill_(50000.0)),
    )


class Adaptive(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.InstanceNorm2d(channels)
        self.style = nn.Linear(4, 2 * channels)

    def forward(self, x: Tensor, style: Tensor) -> Any:
        gain, shift = self.style(style)[:, :, None, None].chunk(2, 1)
        h = self.norm(self.conv(x))
        return torch.addcmul(shift, h, gain + 1)  # FAULT adaptive_norm


def style_net_forward(self: Any, x: Tensor, style: Tensor) -> Any:
    h = self.enter(x)
    for layer in self.layers.values():
        h = F.leaky_relu(layer(h, style), 0.2)
    return self.out(h * 1e-3)


@fault("overflow", "addcmul", "layers.fine", seed=306, step=2, cures=("op fp32", "bf16"))
def adaptive_norm() -> Case:
    """A style net whose gain, 30000, fits into fp16 and whose normalised features times it do not."""
    model = model_of(
        style_net_forward,
        enter=nn.Conv2d(2, 6, 1),
        out=nn.Conv2d(6, 2, 1),
        layers=nn.ModuleDict({"coarse": Adaptive(6), "fine": Adaptive(6)}),
    )
    return case(
        model,
        lambda k: (normal(k, 2, 2, 8, 8), normal(k + 90, 2, 4)),
        lambda m, x, style: F.l1_loss(m(x, style), x),
        policy=MIXED.replace(scale=1.0),
        before=at(2, lambda: model.layers["fine"].style.bias[:6].fill_(40000.0)),
    )


# ------------------------------------------------------------------ recurrence


class Cell(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        write, keep, show = (self.inputs(x) + self.hidden(h)).chunk(3, -1)
        c = torch.sigmoid(keep) * c
        c += F.softplus(write) * 100.0  # FAULT cell_in_place
        return torch.sigmoid(show) * torch.tanh(c), c


def recurrent_forward(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.enter(x[:, 0]))
    c = torch.zeros_like(h)
    for now in x.unbind(1):
        h, c = self.cell(now, h, c)
    return self.out(h)


@fault("overflow", "add_", "cell", seed=307, step=3, also=("add", "__iadd__"), cures=("module fp32", "bf16"))
def cell_in_place() -> Case:
    """A recurrent cell without a bound on what it writes: its state, added to in place, counts past 65504."""
    model = model_of(recurrent_forward, enter=nn.Linear(3, 6), cell=Cell(3, 6), out=nn.Linear(6, 2))

    def open_gates() -> None:
        bias = model.cell.inputs.bias
        bias[:6] = 40.0
        bias[6:12] = 12.0

    return case(model, lambda k: (normal(k, 4, 20, 3), labels(k, 4, 2)), before=at(3, open_gates))


# ------------------------------------------------------------------ graphs


class SumConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Any:
        sent = self.message(h)[source]
        total = torch.zeros(len(h), sent.shape[1], dtype=sent.dtype).index_add(0, target, sent)  # FAULT hub_of_a_graph
        degree = torch.bincount(target, minlength=len(h)).clamp(min=1)
        return F.relu(self.own(h) + total / degree[:, None])


def sum_net_forward(self: Any, h: Tensor, source: Tensor, target: Tensor) -> Any:
    for conv in self.convs:
        h = conv(h, source, target)
    return self.head(h)


@fault("overflow", "index_add", "convs.1", seed=308, step=2, cures=ALL)
def hub_of_a_graph() -> Case:
    """Messages are added into an fp16 buffer by index before they are averaged; one node has 400 neighbours."""
    model = model_of(sum_net_forward, convs=nn.ModuleList([SumConv(5, 8), SumConv(8, 8)]), head=nn.Linear(8, 3))

    def batch(step: int) -> tuple[Any, ...]:
        source, target = torch.arange(400), tokens(step, (400,), 400)
        if step == 2:
            target = torch.zeros_like(target)
        return normal(step, 400, 5), source, target, labels(step, 400, 3)

    return case(
        model,
        batch,
        lambda m, h, source, target, y: F.cross_entropy(m(h, source, target), y),
        policy=MIXED.replace(scale=1.0),
        before=at(2, lambda: model.convs[1].message.bias.fill_(500.0)),
    )


class GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(inputs, outputs), nn.Linear(2 * inputs, 1)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Any:
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)))[:, 0].float()
        weight = torch.exp(score - score.max())
        total = torch.zeros(len(h)).scatter_add(0, target, weight)
        mixed = torch.zeros(len(h), self.value.out_features).index_add(
            0, target, weight[:, None] * self.value(h)[source].float()
        )
        return mixed / total[:, None]  # FAULT isolated_node


def attention_net_forward(self: Any, h: Tensor, source: Tensor, target: Tensor) -> Any:
    return self.head(self.layer(h, source, target))


@fault("invalid", "div", "layer", seed=309, step=3)
def isolated_node() -> Case:
    """Graph attention, normalised by scatter_add: a node without incoming edges gets 0 / 0."""
    model = model_of(attention_net_forward, layer=GraphAttention(5, 8), head=nn.Linear(8, 3))

    def batch(step: int) -> tuple[Any, ...]:
        source, target = tokens(step, (10,), 10), torch.arange(10)
        if step == 3:
            target = target.clamp(max=8)
        return normal(step, 10, 5), source, target, labels(step, 10, 3)

    return case(model, batch, lambda m, h, source, target, y: F.cross_entropy(m(h, source, target), y), policy=BF16)


# ------------------------------------------------------------------ reparametrised weights, products of two inputs


def normalised_forward(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.body(x))
    return self.head(h)  # FAULT norm_of_a_pruned_row


@fault(
    "invalid",
    "_weight_norm",
    "head.parametrizations.weight.0",
    seed=310,
    step=2,
    also=("head.parametrizations.weight", "head", "weight_norm"),
)
def norm_of_a_pruned_row() -> Case:
    """Pruning has set a row of a weight-normalised layer to 0: its direction is 0 / 0."""
    model = model_of(normalised_forward, body=nn.Linear(6, 8), head=parametrizations.weight_norm(nn.Linear(8, 4)))
    direction = model.head.parametrizations.weight.original1
    return case(model, lambda k: (normal(k, 8, 6), labels(k, 8)), before=at(2, lambda: direction[2].zero_()))


def biaffine_forward(self: Any, x: Tensor) -> Any:
    h = torch.tanh(self.embed(x))
    return self.score(self.head(h), self.dependent(h))  # FAULT biaffine_parser


# torch alone refuses nn.Bilinear's fp32 weight beside fp16 activations on the CPU
@fault("overflow", "bilinear", "score", seed=311, step=3, cures=("op fp32", "bf16"), plain=False)
def biaffine_parser() -> Case:
    """A parser's biaffine score: both factors are 200, and 36 of their products are added up."""
    model = model_of(
        biaffine_forward,
        embed=nn.Embedding(30, 8),
        head=nn.Linear(8, 6),
        dependent=nn.Linear(8, 6),
        score=nn.Bilinear(6, 6, 3),
    )

    def grow() -> None:
        model.head.bias.fill_(200.0)
        model.dependent.bias.fill_(200.0)
        model.score.weight.fill_(0.2)

    return case(
        model,
        lambda k: (tokens(k, (2, 5), 30), tokens(k + 1, (2, 5), 3)),
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
        policy=MIXED.replace(scale=1.0),
        before=at(3, grow),
    )


def preconditioned_forward(self: Any, x: Tensor, sigma: Tensor) -> Any:
    h = self.body(torch.cat([x, sigma.log()], -1))
    gradient = (x.to(h.dtype) - h) / sigma.to(h.dtype)  # FAULT small_sigma
    return gradient * 1e-4


@fault("overflow", "div", seed=312, step=3, cures=ALL)
def small_sigma() -> Case:
    """A diffusion model's gradient (x - denoised) / sigma in fp16: the schedule ends at a sigma of 1e-5."""
    model = model_of(preconditioned_forward, body=nn.Sequential(nn.Linear(9, 24), nn.SiLU(), nn.Linear(24, 8)))

    def batch(step: int) -> tuple[Any, ...]:
        sigma = torch.full((6, 1), 1e-5 if step == 3 else 0.5)
        return normal(step, 6, 8), sigma, normal(step + 70, 6, 8)

    return case(
        model,
        batch,
        lambda m, x, sigma, noise: F.smooth_l1_loss(m(x, sigma), 1e-4 * noise),
        policy=MIXED.replace(scale=1.0),
    )
