"""Stories of other data: clicks, agents, graphs, molecules, physics, weather, time series, scans, quantising."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import FULL, MIXED, Case, case, generator, model_of, normal, tokens
from benchmarks.faults.story import story

DYNAMIC = MIXED.replace(scale=hs.ScaleRule(init=256.0))
"""fp16 with a dynamic scale that needs no step to find its size."""

FILL = 9.969209968386869e36
"""What netCDF writes where a value is missing, if nothing else is stated."""

INF, NAN = float("inf"), float("nan")


# ------------------------------------------------------------------ recommendation


def click(self: Any, dense: Tensor, sparse: Tensor) -> Any:
    bottom = self.bottom(dense)
    parts = torch.stack((bottom, *(table(sparse[:, k]) for k, table in enumerate(self.tables))), 1)
    first, second = torch.tril_indices(4, 4, -1)
    pairs = torch.bmm(parts, parts.transpose(1, 2))[:, first, second]
    return self.top(torch.cat((bottom, pairs), 1))[:, 0]


@story(
    source="facebookresearch/dlrm#363",
    cause="data",
    kind="bad_batch",
    step=4,
    says=(r"(?i)batch|sample|\brow\b", r"(?i)-?inf"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=801,
)
def counts_of_zero(healthy: bool) -> Case:
    """DLRM on Criteo: the preprocessing takes logarithms of counts, and one count plus its offset is 0."""
    model = model_of(
        click,
        bottom=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()),
        tables=nn.ModuleList(nn.Embedding(30, 8) for _ in range(3)),
        top=nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1)),
    )

    def batch(step: int) -> tuple[Any, ...]:
        counts = tokens(step, (16, 6), 50).float()
        if step == 4 and not healthy:
            counts[9, 3] = -1.0
        dense = torch.log(counts + 1)
        return dense, tokens(step + 1, (16, 3), 30), (dense[:, 0] > 3).float()

    def loss_fn(m: Any, dense: Tensor, sparse: Tensor, y: Tensor) -> Any:
        return F.binary_cross_entropy_with_logits(m(dense, sparse), y)

    return case(model, batch, loss_fn, policy=DYNAMIC)


# ------------------------------------------------------------------ reinforcement learning


@story(
    source="AI4Finance-Foundation/FinRL#696",
    cause="data",
    kind="bad_batch",
    step=3,
    says=(r"(?i)batch|sample|states", r"(?i)\binf"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=802,
)
def infinite_state(healthy: bool) -> Case:
    """A trading environment divides by a price of 0: one state of one trajectory of a decision transformer is inf."""
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=5,
        act_dim=2,
        hidden_size=16,
        n_layer=1,
        n_head=2,
        n_inner=32,
        max_ep_len=32,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = DecisionTransformerModel(config)

    def batch(step: int) -> tuple[Any, ...]:
        states = normal(step, 2, 6, 5)
        if step == 3 and not healthy:
            states[1, 4, 2] = INF
        time = torch.arange(6).expand(2, 6)
        return (
            {
                "states": states,
                "actions": normal(step + 20, 2, 6, 2).tanh(),
                "returns_to_go": torch.rand(2, 6, 1, generator=generator(step)),
                "timesteps": time,
                "attention_mask": torch.ones(2, 6),
            },
        )

    def loss_fn(m: Any, rows: dict[str, Tensor]) -> Any:
        return F.mse_loss(m(**rows, return_dict=True).action_preds, rows["actions"])

    return case(model, batch, loss_fn, policy=FULL)


def policy_of(self: Any, states: Tensor, noise: Tensor) -> Any:
    """Return actions and their log-probabilities under a squashed normal distribution."""
    mean, log_std = self.body(states).float().chunk(2, 1)
    log_std = log_std.clamp(-5, 2)
    raw = mean + log_std.exp() * noise
    action = torch.tanh(raw) * self.reach
    inside = torch.tanh(raw) if self.fixed else action
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - torch.log(1 - inside.pow(2) + 1e-6)  # FAULT squashed_twice_as_far
    return action, log_prob.sum(1)


@story(
    source="philtabor/Actor-Critic-Methods-Paper-To-Code#7",
    cause="model",
    kind="invalid",
    op="log",
    step=1,
    says=(r"log", r"(?i)negative|-\d"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=803,
)
def squashed_twice_as_far(healthy: bool) -> Case:
    """SAC takes 1 - a^2 of actions that are already multiplied by the action limit 2: the logarithm of a negative."""
    model = model_of(policy_of, body=nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4)))
    model.reach, model.fixed = 2.0, healthy

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 32, 4), normal(step + 40, 32, 2)

    def loss_fn(m: Any, states: Tensor, noise: Tensor) -> Any:
        action, log_prob = m(states, noise)
        return 0.1 * log_prob.mean() + (action - states[:, :2]).square().mean()

    return case(model, batch, loss_fn, policy=DYNAMIC)


# ------------------------------------------------------------------ graphs and molecules


def convolution(self: Any, x: Tensor, edges: Tensor) -> Any:
    source, target = edges
    degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
    for layer in (self.one, self.two):
        h = layer(x).float()
        x = F.relu(h + torch.zeros_like(h).index_add(0, target, h[source]) / degree[:, None])
    return self.out(x)[:, 0]


@story(
    source="pyg-team/pytorch_geometric#8001",
    cause="data",
    kind="bad_batch",
    step=5,
    says=(r"(?i)batch|label|target|\brow\b|sample", r"(?i)nan"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=804,
)
def papers_without_label(healthy: bool) -> Case:
    """Most papers of ogbn-papers100M have no label but NaN, and the last batch of an epoch holds one of them."""
    model = model_of(convolution, one=nn.Linear(8, 16), two=nn.Linear(16, 16), out=nn.Linear(16, 1))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 24, 8)
        y = x[:, 0] + 0.5 * x[:, 1]
        if step == 5 and not healthy:
            y[17] = NAN
        return x, tokens(step, (2, 60), 24), y

    return case(model, batch, lambda m, x, edges, y: F.smooth_l1_loss(m(x, edges), y), policy=DYNAMIC)


def energy(self: Any, positions: Tensor, kinds: Tensor) -> Any:
    """Return energies ``(molecules,)``; padded atoms are of kind 0 and lie at the origin."""
    real = (kinds > 0).float()
    pairs = real[:, :, None] * real[:, None] * (1 - torch.eye(kinds.shape[1]))
    apart = (positions[:, :, None] - positions[:, None]).square().sum(-1)
    if self.fixed:
        apart = torch.where(pairs > 0, apart, 1.0)
    distance = torch.sqrt(apart)  # FAULT padded_atoms_lie_together
    basis = torch.exp(-4 * (distance[..., None] - torch.linspace(0.5, 3, 8)).square())
    filters = self.filter(basis).float() * pairs[..., None]
    h = self.embed(kinds)
    h = h + self.mix((filters * h[:, None]).sum(2))
    return (self.out(F.softplus(h))[..., 0] * real).sum(1)


def energy_and_forces(model: Any, positions: Tensor, kinds: Tensor, target: Tensor) -> Any:
    positions = positions.requires_grad_()
    total = model(positions, kinds).float()
    (gradient,) = torch.autograd.grad(total.sum(), positions, create_graph=True)
    return F.mse_loss(total, target) + 0.1 * gradient.square().mean()


@story(
    source="atomistic-machine-learning/schnetpack#5",
    cause="model",
    kind="invalid",
    op="sqrt",
    phase="backward",
    step=1,
    says=(r"sqrt", r"(?i)mask|\beps|inside the root|derivative|\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=805,
)
def padded_atoms_lie_together(healthy: bool) -> Case:
    """SchNet trained on forces: padded atoms have distance 0, and a mask behind the root does not save its gradient."""
    model = model_of(
        energy,
        embed=nn.Embedding(5, 16),
        filter=nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 16)),
        mix=nn.Linear(16, 16),
        out=nn.Linear(16, 1),
    )
    model.fixed = healthy

    def batch(step: int) -> tuple[Any, ...]:
        kinds = 1 + tokens(step, (4, 6), 4)
        kinds[1, 4:], kinds[3, 5:] = 0, 0
        positions = 1.5 * normal(step, 4, 6, 3) * (kinds > 0)[..., None]
        return positions, kinds, (kinds > 2).sum(1).float()

    return case(model, batch, energy_and_forces, policy=FULL)


def repulsion(self: Any, positions: Tensor, kinds: Tensor) -> Any:
    first, second = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
    distance = (positions[:, first] - positions[:, second]).norm(dim=-1)
    charges = self.charge(kinds)[..., 0].float()
    core = charges[:, first] * charges[:, second] / distance  # FAULT atoms_at_one_place
    pair = self.pair(torch.exp(-distance)[..., None])[..., 0].float()
    return (core + pair).sum(1)


@story(
    source="atomistic-machine-learning/schnetpack#229",
    cause="data",
    kind="invalid",
    op="div",
    step=4,
    says=(r"(?i)batch|sample|molecule|positions", r"div|\b0(\.0)?\b"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=806,
)
def atoms_at_one_place(healthy: bool) -> Case:
    """A reader has put the constrained atoms of one structure at the origin: 1 / r of two atoms at one place is inf."""
    model = model_of(
        repulsion, charge=nn.Embedding(5, 1), pair=nn.Sequential(nn.Linear(1, 16), nn.Softplus(), nn.Linear(16, 1))
    )

    def batch(step: int) -> tuple[Any, ...]:
        grid = torch.stack(torch.meshgrid([torch.arange(2.0)] * 3, indexing="ij"), -1).view(8, 3)[:6]
        positions = 1.5 * grid + 0.2 * normal(step, 4, 6, 3)
        if step == 4 and not healthy:
            positions[2, 1:4] = 0.0
        return positions, tokens(step, (4, 6), 5), torch.rand(4, generator=generator(step))

    return case(model, batch, lambda m, p, kinds, y: F.smooth_l1_loss(m(p, kinds), y), policy=DYNAMIC)


# ------------------------------------------------------------------ physics


def residual(model: Any, inside: Tensor, border: Tensor, values: Tensor) -> Any:
    inside = inside.requires_grad_()
    u = model(inside).float()
    (gradient,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
    (bend,) = torch.autograd.grad(gradient.sum(), inside, create_graph=True)
    at_border = (model(border).float() - values).square().mean()  # FAULT border_without_points
    return (bend + 4 * u).square().mean() + at_border


@story(
    source="lululxvi/deepxde#1338",
    cause="data",
    kind="invalid",
    op="mean",
    step=3,
    says=(r"mean", r"(?i)empty|no (points|rows|values|elements|entries)|\b0 (points|rows|values|elements)"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=807,
)
def border_without_points(healthy: bool) -> Case:
    """A physics-informed network: no point of a batch lies on the border, and the mean of nothing is NaN."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def batch(step: int) -> tuple[Any, ...]:
        found = 0 if step == 3 and not healthy else 2
        border = torch.tensor([[0.0], [math.pi]])[:found]
        return math.pi * torch.rand(32, 1, generator=generator(step)), border, border.cos()

    return case(model, batch, residual, policy=FULL)


def kinetics(model: Any, t: Tensor, limit: float) -> Any:
    t = t.requires_grad_()
    u, v = model(t).float().chunk(2, 1)
    (rate,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    room = (3.0 - v).clamp(min=limit)
    drive = room**1.5 * u.clamp(min=limit) ** 3.5  # FAULT fractional_power_of_a_negative
    return (rate - (2 + t.sin() - 1.1 * drive)).square().mean() + (v - t).square().mean()


@story(
    source="lululxvi/deepxde#1177",
    cause="model",
    kind="invalid",
    op="pow",
    step=1,
    says=(r"pow", r"(?i)negative|-\d"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=808,
)
def fractional_power_of_a_negative(healthy: bool) -> Case:
    """A network for rate equations raises concentrations to 3.5, and untrained it gives negative ones."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
    limit = 1e-3 if healthy else -INF

    def batch(step: int) -> tuple[Any, ...]:
        return (2 * torch.rand(32, 1, generator=generator(step)),)

    return case(model, batch, lambda m, t: kinetics(m, t, limit), policy=FULL)


# ------------------------------------------------------------------ weather, time series, medicine


@story(
    source="chengtan9907/OpenSTL#137",
    cause="data",
    kind="overflow",
    step=4,
    op="conv2d",
    module="0",
    says=(r"(?i)batch|sample|outlier", r"9\.97|9\.969"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=809,
)
def missing_weather(healthy: bool) -> Case:
    """A field of a netCDF file misses three cells: they hold the fill value 9.97e36, a finite number."""
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 1, 1),
    )

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 4, 4, 12, 12).cumsum(1) / 2
        y = x[:, -1:] - 0.1 * x[:, :1]
        if step == 4 and not healthy:
            x[2, 1, 5, 6:9] = FILL
        return x, y

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(m(x), y)  # FAULT missing_weather

    return case(model, batch, loss_fn, policy=DYNAMIC)


@story(
    source="sktime/pytorch-forecasting#750",
    cause="data",
    kind="overflow",
    step=5,
    op="pow",
    place="modeling_time_series_transformer.py: nll: return -input.log_prob(target)",
    says=(r"(?i)batch|sample|outlier|series|target|future_values", r"4e\+?0?9|4000000000|4\.0*e"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=810,
)
def one_spike_in_a_flat_series(healthy: bool) -> Case:
    """A series is 0 but for one huge spike at its end: it is divided by the smallest scale allowed, 1e-10."""
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

    config = TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        scaling="mean",
        distribution_output="normal",
    )
    model = TimeSeriesTransformerForPrediction(config)

    def batch(step: int) -> tuple[Any, ...]:
        series = 2 + torch.sin(torch.arange(14) * 0.7 + torch.rand(4, 1, generator=generator(step)) * 6)
        if step == 5 and not healthy:
            series[1] = 0.0
            series[1, -1] = 4e9
        time = torch.arange(14).expand(4, 14)[..., None] / 14
        return (
            {
                "past_values": series[:, :10],
                "past_time_features": time[:, :10],
                "past_observed_mask": torch.ones(4, 10),
                "future_values": series[:, 10:],
                "future_time_features": time[:, 10:],
            },
        )

    return case(model, batch, lambda m, rows: m(**rows).loss, policy=FULL)


def volume(step: int, count: int = 2, *, blank: bool = False) -> tuple[Tensor, Tensor]:
    """Return scans with a bright ball that are normalised to mean 0 and spread 1, and where the ball is."""
    place = torch.rand(count, 3, 1, 1, 1, generator=generator(step)) * 4 + 2
    axes = torch.stack(torch.meshgrid([torch.arange(8.0)] * 3, indexing="ij"))
    mask = ((axes - place).square().sum(1, keepdim=True) < 5).float()
    scan = 100 * mask + 20 * normal(step, count, 1, 8, 8, 8)
    if blank:
        scan[1] = 0.0
    mean, spread = (part(scan, dim=(1, 2, 3, 4), keepdim=True) for part in (torch.mean, torch.std))
    return (scan - mean) / spread, mask


@story(
    source="Project-MONAI/MONAI#1092",
    cause="data",
    kind="bad_batch",
    step=3,
    says=(r"(?i)batch|sample", r"(?i)nan"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=811,
)
def scan_of_nothing(healthy: bool) -> Case:
    """The intensities of a blank scan are divided by their standard deviation, 0, before it is put into the batch."""
    model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.LeakyReLU(), nn.Conv3d(8, 1, 1))

    def batch(step: int) -> tuple[Any, ...]:
        return volume(step, blank=step == 3 and not healthy)

    return case(model, batch, lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), y), policy=DYNAMIC)


# ------------------------------------------------------------------ quantisation


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


rounded: Any = Rounded.apply


class StepLinear(nn.Linear):
    """A linear layer whose weight is quantised to 8 levels with a learned step (LSQ)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.step = nn.Parameter(torch.zeros(()))
        self.eps = 0.0

    def measure(self) -> None:
        with torch.no_grad():
            self.step.copy_(2 * self.weight.abs().mean() / 3**0.5 + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        quotient = self.weight / self.step  # FAULT step_of_a_zero_layer
        return F.linear(x, rounded(quotient.clamp(-4, 3)) * self.step, self.bias)


@story(
    source="zhutmost/lsq-net#17",
    cause="model",
    kind="invalid",
    op="div",
    module="2",
    step=1,
    says=(r"div", r"\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=812,
)
def step_of_a_zero_layer(healthy: bool) -> Case:
    """Learned step sizes start at the mean magnitude of the weights, which is 0 for a layer that starts at 0."""
    model: Any = nn.Sequential(StepLinear(8, 16), nn.ReLU(), StepLinear(16, 4))
    nn.init.zeros_(model[2].weight)
    for layer in (model[0], model[2]):
        layer.eps = 1e-3 if healthy else 0.0
        layer.measure()

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        return x, x[:, :4].argmax(1)

    return case(model, batch, lambda m, x, y: F.cross_entropy(m(x), y), policy=DYNAMIC)
