"""What a rule for one part of a model changes: log-probabilities beside float64, time and saved bytes.

    python -m benchmarks.recipes --json benchmarks/results/recipes.json [--only NAME]

Each recipe is a small decoder with the part in question. It trains `STEPS` updates in fp32 on the bundled text;
its log-probabilities of held-out text are compared with those of a float64 copy, under bf16 `O2` without and with the
rule. Time is the processor's for a forward and a backward pass, without and with it in turns, the minimum of each;
bytes are those that the forward pass saves, parameters left out.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import write
from halfstep.tasks import machine
from halfstep.tasks.gpt import batches, corpus, windows

__all__ = ["RECIPES", "Decoder", "Recipe", "log_probs", "recipes_table", "trained"]

WIDTH, HEADS, LAYERS, LENGTH, EXPERTS, CHOSEN = 64, 4, 2, 64, 8, 2
STEPS, ROUNDS, HELD_OUT = 150, 40, 32


class Rotary(nn.Module):
    """Rotates q and k by tables of fp32 and gives them back in the format they came in."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.to(self.cos.dtype).chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return (torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)
        self.rotary = Rotary(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    """h = decay * h + (1 - decay) * x along the tokens, from 0."""

    def forward(self, decay: Tensor, x: Tensor) -> Tensor:
        states, state = [], torch.zeros_like(x[:, 0])
        for a, b in zip(decay.unbind(1), x.unbind(1), strict=True):
            state = a * state + (1 - a) * b
            states.append(state)
        return torch.stack(states, 1)


class StateSpace(nn.Module):
    """A diagonal state-space layer whose decays follow the input, as Mamba's, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out, self.recurrence = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Recurrence()

    def forward(self, x: Tensor) -> Tensor:
        rate, x, gate = self.project(x).chunk(3, -1)
        return self.out(self.recurrence(torch.sigmoid(rate + 4), x) * F.silu(gate))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Scores of experts, and the chosen ones; `bias` balances the load without a loss (DeepSeek-V3, section 2.1.2)."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.bias).topk(CHOSEN, -1).indices
        weights = scores.gather(-1, chosen)
        if self.training:
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
            self.bias += 1e-3 * torch.sign(load.mean() - load)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """The chosen experts of each token, as grouped products in the format of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.05)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()
        rows = flat[order // CHOSEN]
        made = grouped(F.gelu(grouped(rows, self.up, ends)), self.down, ends)
        made = made * weights.flatten()[order, None].type_as(made)
        return torch.zeros_like(flat).index_add(0, order // CHOSEN, made.type_as(flat)).view_as(x)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix."""
    if rows.dtype is torch.float64:  # torch has no kernel
        parts = rows.tensor_split([int(end) for end in ends[:-1]])
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    return F.grouped_mm(rows, weights, offs=ends)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, mixer: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.RMSNorm(WIDTH), mixer()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder over the characters of the bundled text, with the parts that recipes are about."""

    def __init__(
        self, mixer: Callable[[], nn.Module] = Attention, mlp: Callable[[], nn.Module] = MLP, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(corpus()[2], WIDTH)
        self.blocks = nn.ModuleList(Block(mixer, mlp) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, corpus()[2], bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One part of a model, and what is done for it.

    Attributes:
        make: the model.
        rule: module rules added to `O2`.
        without: what is done to the model in place of the recipe, if the recipe is no rule.
        words: the rule as the page shows it.
        reason: why, in a few words.
    """

    make: Callable[[], nn.Module]
    rule: Mapping[str, str]
    words: str
    reason: str
    without: Callable[[nn.Module], None] | None = None


def low_tables(model: nn.Module) -> None:
    """Make the tables of angles low, as ``model.bfloat16()`` does."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.bfloat16()


RECIPES: Mapping[str, Recipe] = {
    "LM head": Recipe(
        make=Decoder, rule={"head": "fp32"}, words='`{"head": "fp32"}`',
        reason="half an ulp of a bf16 logit of 16 is 1/16",
    ),
    "tied head": Recipe(
        make=lambda: Decoder(tied=True), rule={"head": "fp32"}, words='`{"head": "fp32"}`',
        reason="the shared weight is fp32 for both of its modules",
    ),
    "router": Recipe(
        make=lambda: Decoder(mlp=Experts), rule={"*.router": "fp32"}, words='`{"*.router": "fp32"}`',
        reason="scores that round alike choose another expert",
    ),
    "scan": Recipe(
        make=lambda: Decoder(StateSpace), rule={"*.recurrence": "fp32"}, words='`{"*.recurrence": "fp32"}`',
        reason="a state that decays slowly sums many small terms",
    ),
    "RoPE tables": Recipe(
        make=Decoder, rule={}, words="fp32 buffers, `type_as(q)`", without=low_tables,
        reason="a bf16 cosine has 8 bits; `O2` leaves buffers, `model.bfloat16()` does not",
    ),
    "QK-norm": Recipe(
        make=Decoder, rule={"*.[qk]_norm": "fp32"}, words='`{"*.[qk]_norm": "fp32"}`',
        reason="its kernel sums in fp32 already",
    ),
}  # fmt: skip


def held_out() -> tuple[Tensor, Tensor]:
    """Return tokens (B, T) of the validation text and the next ones."""
    _, text, _ = corpus()
    return windows(text, torch.linspace(0, len(text) - LENGTH - 2, HELD_OUT).long())


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def log_probs(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target in float64."""
    with torch.no_grad():
        return torch.log_softmax(model(tokens).double(), -1).gather(-1, targets[..., None]).squeeze(-1)


def trained(recipe: Recipe, steps: int = STEPS) -> nn.Module:
    """Return the model of a recipe after `steps` updates in fp32."""
    torch.manual_seed(0)
    model = recipe.make()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, policy="O0")
    for i in range(steps):
        step(*batches(0, i))
    return hs.unprepare(model).eval()


def pair(recipe: Recipe, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return copies of `model` without and with the recipe, prepared under bf16 `O2`."""
    policy, without = hs.Policy.of("O2", dtype="bf16"), copy.deepcopy(model)
    if recipe.without is not None:
        recipe.without(without)
    ruled = policy.with_modules(recipe.rule) if recipe.rule else policy
    return hs.prepare(without, policy=policy), hs.prepare(copy.deepcopy(model), policy=ruled)


def errors(recipe: Recipe, model: nn.Module) -> tuple[float, float]:
    """Return the mean absolute error of log-probabilities beside float64, without and with the recipe."""
    batch = held_out()
    exact = log_probs(copy.deepcopy(model).double(), *batch)
    without, ruled = (float((log_probs(each, *batch) - exact).abs().mean()) for each in pair(recipe, model))
    return without, ruled


def saved_bytes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Return the bytes that a forward pass saves for the backward pass, besides parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_fn(model, *batch)
    assert loss.requires_grad
    return sum(saved.values())


def seconds(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    began = time.process_time()
    loss_fn(model, *batch).backward()
    return time.process_time() - began


def measured(name: str) -> dict[str, Any]:
    """Return the row of a recipe."""
    recipe = RECIPES[name]
    model = trained(recipe)
    without, ruled = errors(recipe, model)
    models, batch = pair(recipe, model), batches(0, STEPS)
    times = [[seconds(each, batch) for each in models] for _ in range(ROUNDS)]
    best = [min(column) for column in zip(*times[2:], strict=True)]
    sizes = [saved_bytes(each, batch) for each in models]
    row = {"recipe": name, "error_without": without, "error_with": ruled, "error_ratio": ruled / without}
    return {**row, "time_ratio": best[1] / best[0], "bytes_ratio": sizes[1] / sizes[0]}


def balance() -> dict[str, float]:
    """Return where 1,000 steps of 0.001 take the balancing bias of an expert: an fp32 buffer, and a bf16 one."""
    ends = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        bias = torch.zeros((), dtype=dtype)
        for _ in range(1000):
            bias += 1e-3
        ends[name] = float(bias)
    return ends


def recipes_table(report: Mapping[str, Any]) -> str:
    """Return a row for each recipe."""
    rows = [
        [
            row["recipe"],
            RECIPES[row["recipe"]].words,
            RECIPES[row["recipe"]].reason,
            *(f"{row[key]:.2g}" for key in ("error_without", "error_with")),
            *(f"{row[key]:.2f}" for key in ("error_ratio", "time_ratio", "bytes_ratio")),
        ]
        for row in report["rows"]
    ]
    head = ["part", "rule", "reason", "error without", "with", "ratio", "time", "saved bytes"]
    return table(head, rows)


def main() -> None:
    """Measure every recipe and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rows = []
    for name in RECIPES:
        if given.only in name:
            rows.append(measured(name))
            print(rows[-1], flush=True)
    about = {"command": "make bench-recipes", "machine": machine(), "steps": STEPS}
    write(given.json, {**about, "rows": rows, "balance": balance()})


if __name__ == "__main__":
    main()
