"""List A, faults of the forward pass: a value leaves its format, or an operation has no answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import ALL, BF16, FULL, TORCH, Case, at, case, fault, model_of, normal, tokens


def classes(step: int, shape: tuple[int, ...], *, heavy: float = 1.0, at: int = 3, kinds: int = 4) -> tuple[Any, ...]:
    """Return inputs and labels; the inputs of step `at` are `heavy` times larger than the others."""
    return normal(step, *shape) * (heavy if step == at else 1.0), tokens(step + 500, shape[:1], kinds)


# ------------------------------------------------------------------ attention


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.query(x), self.key(x), self.value(x)
        logits = q @ k.transpose(-2, -1)  # FAULT attention_logits
        return torch.softmax(logits * 32**-0.5, -1) @ v


class AttentionBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim)

    def forward(self, x: Tensor) -> Any:
        return x + self.attn(self.norm(x))


def transformer_forward(self: Any, x: Tensor) -> Any:
    for block in self.blocks:
        x = block(x)
    return self.head(x.mean(1))


@fault("overflow", "matmul", "blocks.1.attn", seed=1, step=3, cures=ALL)
def attention_logits() -> Case:
    """The queries of the second block have grown: their products with the keys pass 65504 before they are scaled."""
    model = model_of(
        transformer_forward, blocks=nn.ModuleList(AttentionBlock(32) for _ in range(3)), head=nn.Linear(32, 4)
    )
    attn = model.blocks[1].attn

    return case(
        model,
        lambda k: classes(k, (4, 6, 32)),
        before=at(3, lambda: (attn.query.weight.mul_(300), attn.key.weight.mul_(300))),
    )


def heads_attention_forward(self: Any, x: Tensor) -> Any:
    q, k, v = self.qkv(x).reshape(*x.shape[:2], 2, 24).chunk(3, -1)
    logits = torch.einsum("bthd,bshd->bhts", q, k)  # FAULT einsum_attention
    mixed = torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v)
    return self.out(mixed.flatten(2).mean(1))


@fault("overflow", "einsum", seed=2, step=3, cures=ALL)
def einsum_attention() -> Case:
    """Inputs a thousand times larger in one batch: the attention logits, written with einsum, overflow."""
    model = model_of(heads_attention_forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 4))
    return case(model, lambda k: classes(k, (4, 6, 16), heavy=1000.0))


def masked_forward(self: Any, x: Tensor, mask: Tensor) -> Any:
    h = self.embed(x)
    scores = self.score(h) @ h.transpose(-2, -1)
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    weights = torch.softmax(scores, -1)  # FAULT fully_masked_row
    return self.out((weights @ h).mean(1))


@fault("invalid", "softmax", seed=3, step=2)
def fully_masked_row() -> Case:
    """One sequence of padding only: every logit is -inf, and softmax divides 0 by 0. -inf itself is meant."""
    model = model_of(masked_forward, embed=nn.Embedding(20, 16), score=nn.Linear(16, 16), out=nn.Linear(16, 4))

    def batch(step: int) -> tuple[Any, ...]:
        mask = torch.arange(5) < torch.tensor([[5], [3], [0 if step == 2 else 1]])
        return tokens(step, (3, 5), 20), mask, tokens(step + 1, (3,), 4)

    return case(model, batch, lambda m, x, mask, y: F.cross_entropy(m(x, mask), y), policy=BF16)


def encoder_forward(self: Any, x: Tensor, padding: Tensor) -> Any:
    mixed, _ = self.attn(x, x, x, key_padding_mask=padding)  # FAULT padded_multihead
    return self.out(mixed.mean(1))


@fault("invalid", "multi_head_attention_forward", "attn", seed=4, step=2, also=("softmax",))
def padded_multihead() -> Case:
    """nn.MultiheadAttention whose key_padding_mask hides all keys of one sample."""
    model = model_of(encoder_forward, attn=nn.MultiheadAttention(16, 2, batch_first=True), out=nn.Linear(16, 4))

    def batch(step: int) -> tuple[Any, ...]:
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, (0 if step == 2 else 3) :] = True
        return normal(step, 3, 5, 16), padding, tokens(step, (3,), 4)

    return case(model, batch, lambda m, x, padding, y: F.cross_entropy(m(x, padding), y))


# ------------------------------------------------------------------ convolutions


class TwoBranches(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.left(x) + self.right(x))  # FAULT residual_sum


def residual_net_forward(self: Any, x: Tensor) -> Any:
    return self.head(self.stages(self.stem(x)).mean((2, 3)) * 1e-3)


@fault("overflow", "add", "stages.1", seed=5, step=2, cures=("op fp32", "bf16"))
def residual_sum() -> Case:
    """Both branches fit into fp16 (40000), their sum does not."""
    model = model_of(
        residual_net_forward,
        stem=nn.Conv2d(3, 8, 3, padding=1),
        stages=nn.Sequential(TwoBranches(8), TwoBranches(8)),
        head=nn.Linear(8, 4),
    )

    def grow() -> None:
        for branch in (model.stages[1].left, model.stages[1].right):
            branch.bias.fill_(40000.0)

    return case(model, lambda k: classes(k, (2, 3, 8, 8)), before=at(2, grow))


def u_net_forward(self: Any, x: Tensor) -> Any:
    h = self.middle(F.relu(self.down(x)))
    wide = self.up["wide"](h)  # FAULT upsampling
    return self.up["last"](torch.cat([wide, x], 1))


@fault("overflow", "conv_transpose2d", "up.wide", seed=6, step=3, cures=("bf16",))
def upsampling() -> Case:
    """A segmentation net without norms on a batch in the wrong unit; its transposed convolution overflows."""
    model = model_of(
        u_net_forward,
        down=nn.Conv2d(1, 8, 3, stride=2, padding=1),
        middle=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        up=nn.ModuleDict({"wide": nn.ConvTranspose2d(8, 8, 2, stride=2), "last": nn.Conv2d(9, 2, 1)}),
    )
    with torch.no_grad():
        model.up["wide"].weight.mul_(300)

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 2, 1, 8, 8) * (8000.0 if step == 3 else 1.0), tokens(step, (2, 8, 8), 2)

    return case(model, batch)


@fault("overflow", "linear", "0", seed=7, step=2, cures=("module fp32",))
def raw_inputs() -> Case:
    """A feature that is not normalised (an income of 1e6): finite in the batch, inf in the operand of the layer."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)  # FAULT raw_inputs
        return F.cross_entropy(logits, y)

    return case(model, lambda k: classes(k, (8, 6), heavy=1e6, at=2), loss_fn)


# ------------------------------------------------------------------ norms and activations by hand


def penalised(model: Any, x: Tensor, y: Tensor) -> Any:
    h = model[1](model[0](x))
    penalty = (h * h).mean()  # FAULT squared_norm
    return F.cross_entropy(model[2](h), y) + 1e-6 * penalty


@fault("overflow", "mul", seed=8, step=3, cures=("op fp32", "bf16"))
def squared_norm() -> Case:
    """A penalty on large activations squares them itself, in fp16, where the square of 300 is infinite."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return case(model, lambda k: classes(k, (8, 16), heavy=400.0), penalised)


def projector_forward(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    variance = (h - h.mean(0)).pow(2).mean(0)  # FAULT variance_by_hand
    return h, variance


def decorrelated_forward(self: Any, x: Tensor) -> Any:
    h, variance = self.embed["projector"](x)
    return self.out(h), torch.log(variance.float() + 1e-3).mean()


def decorrelate(model: Any, x: Tensor, y: Tensor) -> Any:
    logits, spread = model(x)
    return F.cross_entropy(logits, y) - 1e-3 * spread


@fault("overflow", "pow", "embed.projector", seed=9, step=3, cures=("op fp32", "bf16"))
def variance_by_hand() -> Case:
    """A variance by hand under torch.autocast's CPU lists, where pow stays in fp16; the loss rewards its logarithm."""
    model = model_of(
        decorrelated_forward,
        embed=nn.ModuleDict({"projector": model_of(projector_forward, fc=nn.Linear(16, 32))}),
        out=nn.Linear(32, 4),
    )
    return case(model, lambda k: classes(k, (8, 16), heavy=1000.0), decorrelate, policy=TORCH)


def root_of_variance_forward(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    mean, mean_of_squares = h.mean(-1, keepdim=True), (h * h).mean(-1, keepdim=True)
    deviation = torch.sqrt(mean_of_squares - mean * mean)  # FAULT cancelled_variance
    return self.out((h - mean) / (deviation + 1e-3))


@fault("invalid", "sqrt", seed=10, step=2, cures=("module fp32",))
def cancelled_variance() -> Case:
    """E[h^2] - E[h]^2 of nearly constant activations is negative after rounding to bf16, and sqrt has no answer."""
    model = model_of(root_of_variance_forward, fc=nn.Linear(8, 32), out=nn.Linear(32, 4))

    return case(
        model,
        lambda k: classes(k, (64, 8)),
        policy=BF16,
        before=at(2, lambda: (model.fc.bias.fill_(9.4), model.fc.weight.mul_(1e-1))),
    )


class HandGelu(nn.Module):
    def forward(self, x: Tensor) -> Any:
        cubed = x * x * x  # FAULT gelu_by_hand
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * cubed)))


@fault("overflow", "mul", "layers.2", seed=11, step=3, cures=("module fp32", "bf16"))
def gelu_by_hand() -> Case:
    """GELU's tanh form by hand: 300 squared and 41 cubed are too large for fp16."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 32), nn.LayerNorm(32), HandGelu(), nn.Linear(32, 4)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model: Any = Mlp()

    return case(model, lambda k: classes(k, (8, 16)), before=at(3, lambda: model.layers[1].weight.mul_(400)))


def pooled_forward(self: Any, x: Tensor) -> Any:
    h = F.relu(self.fc(self.embed(x) * 16))
    pooled = h.sum(1)  # FAULT long_sum
    return self.out(pooled / x.shape[1])


@fault("overflow", "sum", seed=12, step=2, cures=ALL)
def long_sum() -> Case:
    """A bag of 8192 tokens is summed in fp16 before it is divided; short documents before it were fine."""
    model = model_of(pooled_forward, embed=nn.Embedding(50, 16), fc=nn.Linear(16, 16), out=nn.Linear(16, 4))
    return case(model, lambda k: (tokens(k, (2, 32768 if k == 2 else 64), 50), tokens(k, (2,), 4)), policy=TORCH)


def linear_attention_forward(self: Any, x: Tensor) -> Any:
    past = F.relu(self.key(x)).cumsum(1)  # FAULT running_sum
    return self.out(past[:, -1] / x.shape[1])


@fault("overflow", "cumsum", seed=13, step=2, cures=ALL)
def running_sum() -> Case:
    """Linear attention's running sum of keys, kept in fp16 by torch's CPU lists, over a sequence in the wrong unit."""
    model = model_of(linear_attention_forward, key=nn.Linear(8, 8), out=nn.Linear(8, 4))
    return case(model, lambda k: classes(k, (2, 2048, 8), heavy=400.0, at=2), policy=TORCH.replace(scale=1.0))


# ------------------------------------------------------------------ losses and probabilities by hand


def softmax_by_hand(model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    weights = torch.exp(logits)  # FAULT exp_without_max
    probabilities = weights / weights.sum(-1, keepdim=True)
    return F.nll_loss(torch.log(probabilities), y)


@fault("overflow", "exp", seed=14, step=3, cures=("op fp32", "bf16"))
def exp_without_max() -> Case:
    """A language model's softmax by hand, without subtracting the maximum: exp(12) is no fp16 number."""
    model = nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(32, 30))

    def grow() -> None:
        model[2].bias[3] = 13.0  # type: ignore[operator]

    return case(
        model,
        lambda k: (tokens(k, (6, 2), 30), tokens(k + 1, (6,), 30)),
        softmax_by_hand,
        policy=TORCH,
        before=at(3, grow),
    )


def log_softmax_by_hand(model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    total = torch.exp(logits).sum(-1, keepdim=True)  # FAULT log_softmax_by_hand_fp32
    return F.nll_loss(logits - torch.log(total), y)


@fault("overflow", "exp", seed=15, step=2)
def log_softmax_by_hand_fp32() -> Case:
    """exp(100) is too large for fp32 as well: no format cures it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return case(model, lambda k: classes(k, (8, 8), heavy=2000.0, at=2), log_softmax_by_hand, policy=FULL)
