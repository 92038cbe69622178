"""Stories of generative models: autoencoders, GANs, flows, diffusion, radiance fields, losses of pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import FULL, MIXED, TORCH, UNSCALED, Case, case, generator, model_of, normal, tokens
from benchmarks.faults.story import story

DYNAMIC = MIXED.replace(scale=hs.ScaleRule(init=256.0))
"""fp16 with a dynamic scale that needs no step to find its size."""


def blobs(step: int, count: int = 4, size: int = 16, channels: int = 1) -> Tensor:
    """Return pictures ``(count, channels, size, size)`` in -1..1 of one soft spot each."""
    place = torch.rand(count, channels, 2, generator=generator(step)) * (size - 4) + 2
    axis = torch.arange(size).float()
    rows = (-(axis - place[..., :1]).square() / 6).exp()
    columns = (-(axis - place[..., 1:]).square() / 6).exp()
    return 2 * rows[..., :, None] * columns[..., None, :] - 1


# ------------------------------------------------------------------ autoencoders


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, size), nn.Conv2d(size, size, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, size), nn.Conv2d(size, size, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))  # FAULT kl_autoencoder_in_half
        return x + h


def kl_autoencoder(self: Any, x: Tensor) -> Any:
    mean, log_variance = self.encoder(x).float().chunk(2, 1)
    log_variance = log_variance.clamp(-30.0, 20.0)
    z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
    return self.decoder(z), 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()


def reconstruct(model: Any, x: Tensor) -> Any:
    y, divergence = model(x)
    return F.mse_loss(y, x) + 1e-3 * divergence


@story(
    source="huggingface/diffusers#9844",
    cause="precision",
    kind="overflow",
    op="conv2d",
    module="encoder.2.conv2",
    step=3,
    cures=("module fp32: encoder", "bf16"),
    says=(r"conv2d", r"65504"),
    seed=701,
)
def kl_autoencoder_in_half(healthy: bool) -> Case:
    """Inside the autoencoder of SDXL the residual stream has grown beyond fp16; in fp32 a norm hides that."""
    model = model_of(
        kl_autoencoder,
        encoder=nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            ResBlock(16),
            ResBlock(16),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Conv2d(16, 8, 3, padding=1),
        ),
        decoder=nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1),
            ResBlock(16),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(16, 1, 3, padding=1),
        ),
    )
    if not healthy:
        nn.init.normal_(model.encoder[2].conv2.weight, std=2700.0)
    return case(model, lambda k: (blobs(k),), reconstruct, policy=DYNAMIC)


def variational(self: Any, x: Tensor) -> Any:
    mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
    z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)  # FAULT vae_learns_too_fast
    return self.decoder(z).view_as(x), mean, log_variance


def evidence(model: Any, x: Tensor) -> Any:
    y, mean, log_variance = model(x)
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.mse_loss(y, x, reduction="sum") + divergence


@story(
    source="sinhasam/vaal#10",
    cause="divergence",
    kind="overflow",
    op="exp",
    step=5,
    says=(r"(?i)diverg|learning rate|ran away",),
    seed=702,
)
def vae_learns_too_fast(healthy: bool) -> Case:
    """A VAE whose losses are sums is trained with a learning rate 500 times too high: its log-variance explodes."""
    model = model_of(
        variational,
        encoder=nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 16)),
        decoder=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 256)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5 if healthy else 5e-3)
    return case(model, lambda k: (blobs(k, 8),), evidence, policy=FULL, optimizer=optimizer)


# ------------------------------------------------------------------ adversarial pairs


def critic_loss(model: Any, real: Tensor, fake: Tensor, share: Tensor, eps: float) -> Any:
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    norm = torch.sqrt(gradient.float().square().sum(1) + eps)  # FAULT gradient_penalty_of_nothing
    return model(fake).mean() - model(real).mean() + 10 * (norm - 1).square().mean()


@story(
    source="keras-team/keras-io#910",
    cause="model",
    kind="invalid",
    op="sqrt",
    phase="backward",
    step=14,
    says=(r"sqrt", r"(?i)\beps|inside the root|derivative|\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=703,
)
def gradient_penalty_of_nothing(healthy: bool) -> Case:
    """WGAN-GP takes the norm of the critic's gradient by a bare root; for one sample no unit of the critic is on."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 1))
    eps = 1e-8 if healthy else 0.0

    def batch(step: int) -> tuple[Any, ...]:
        share = torch.rand(8, 1, generator=generator(step + 70))
        return normal(step, 8, 16) + 1, normal(step + 30, 8, 16), share

    def loss_fn(m: Any, real: Tensor, fake: Tensor, share: Tensor) -> Any:
        return critic_loss(m, real, fake, share, eps)

    return case(model, batch, loss_fn, policy=MIXED)


def adversarial(model: Any, real: Tensor, noise: Tensor) -> Any:
    """Return the sum of the losses of critic and generator; each reaches its own parameters only."""
    fake = model.generator(noise)
    real = real.requires_grad_()
    right, wrong = model.critic(real), model.critic(fake.detach())  # FAULT gan_runs_away
    (gradient,) = torch.autograd.grad(right.sum(), real, create_graph=True)
    penalty = 5 * gradient.float().square().sum((1, 2, 3)).mean()
    fixed = {name: value.detach() for name, value in model.critic.named_parameters()}
    fooled = functional_call(model.critic, fixed, (fake,))
    return F.softplus(-right).mean() + F.softplus(wrong).mean() + penalty + F.softplus(-fooled).mean()


@story(
    source="rosinality/stylegan2-pytorch#210",
    cause="divergence",
    kind="overflow",
    op="conv2d",
    module="critic.2",
    step=4,
    says=(r"(?i)diverg|learning rate|ran away|initiali",),
    seed=704,
)
def gan_runs_away(healthy: bool) -> Case:
    """A GAN with another initialisation than the code expects: the R1 penalty grows without end within ten steps."""
    model = model_of(
        lambda self, noise: self.generator(noise),
        generator=nn.Sequential(
            nn.Linear(8, 8 * 16),
            nn.Unflatten(1, (8, 4, 4)),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        ),
        critic=nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128, 1),
        ),
    )
    if not healthy:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.027)
    return case(model, lambda k: (blobs(k), normal(k, 4, 8)), adversarial, policy=UNSCALED, optimizer=optimizer)


# ------------------------------------------------------------------ flows


class Coupling(nn.Module):
    def __init__(self, size: int, *, flip: bool) -> None:
        super().__init__()
        self.flip, half = flip, size // 2
        self.net = nn.Sequential(nn.Linear(half, 32), nn.ReLU(), nn.Linear(32, 2 * half))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        shift, log_scale = self.net(a).float().chunk(2, 1)  # FAULT flow_learns_too_fast
        b = b * torch.exp(log_scale) + shift
        return torch.cat((a, b), 1), log_scale.sum(1)


def flow_forward(self: Any, x: Tensor) -> Any:
    total = torch.zeros(len(x))
    for layer in self.layers:
        x, log_scale = layer(x)
        total = total + log_scale
    return 0.5 * x.square().sum(1) - total


@story(
    source="PolinaKirichenko/flows_ood#10",
    cause="divergence",
    kind="overflow",
    op="linear",
    module="layers.3.net.0",
    step=8,
    says=(r"(?i)diverg|learning rate|ran away",),
    seed=705,
)
def flow_learns_too_fast(healthy: bool) -> Case:
    """An affine flow with exp as its scale; the learning rate is too high, the loss grows without end and is NaN."""
    model = model_of(flow_forward, layers=nn.ModuleList(Coupling(16, flip=bool(k % 2)) for k in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if healthy else 0.005, momentum=0.9)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 32, 16)
        return (x.cumsum(1) / 3,)

    return case(model, batch, lambda m, x: m(x).mean(), policy=UNSCALED, optimizer=optimizer)


# ------------------------------------------------------------------ diffusion


def denoiser(self: Any, x: Tensor, t: Tensor) -> Any:
    h = F.silu(self.first(x) + self.time(t)[:, :, None, None])
    down = F.silu(self.down(h))
    return self.last(torch.cat((h, self.up(down)), 1))


def zero_terminal(count: int) -> Tensor:
    """Return cumulative alphas of a schedule that is rescaled to end in pure noise."""
    root = (1 - torch.linspace(1e-4, 0.3, count)).cumprod(0).sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


def weighted(model: Any, x: Tensor, noise: Tensor, t: Tensor, alphas: Tensor, *, fixed: bool) -> Any:
    alpha = alphas[t][:, None, None, None]
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * x
    error = (model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise, t) - velocity).square().mean((1, 2, 3))
    snr = alphas[t] / (1 - alphas[t])
    if fixed:
        return (error * snr.clamp(max=5.0) / (snr + 1)).mean()
    weight = snr.clamp(max=5.0) / snr  # FAULT min_snr_of_pure_noise
    return (error * weight * snr / (snr + 1)).mean()


@story(
    source="kohya-ss/sd-scripts#934",
    cause="model",
    kind="invalid",
    op="div",
    step=2,
    says=(r"div", r"\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=706,
)
def min_snr_of_pure_noise(healthy: bool) -> Case:
    """Min-SNR weights divide by the signal-to-noise ratio; with a schedule that ends in pure noise that is 0."""
    model = model_of(
        denoiser,
        first=nn.Conv2d(1, 8, 3, padding=1),
        time=nn.Embedding(20, 8),
        down=nn.Conv2d(8, 8, 3, stride=2, padding=1),
        up=nn.ConvTranspose2d(8, 8, 2, stride=2),
        last=nn.Conv2d(16, 1, 3, padding=1),
    )
    alphas = zero_terminal(20)

    def batch(step: int) -> tuple[Any, ...]:
        return blobs(step), normal(step, 4, 1, 16, 16), tokens(step + 7, (4,), 20)

    def loss_fn(m: Any, x: Tensor, noise: Tensor, t: Tensor) -> Any:
        return weighted(m, x, noise, t, alphas, fixed=healthy)

    return case(model, batch, loss_fn, policy=DYNAMIC)


# ------------------------------------------------------------------ losses of pictures


def autoencoder(self: Any, x: Tensor) -> Any:
    return self.decoder(F.relu(self.encoder(x)))


def similarity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean structural similarity and mean contrast of pictures in 0..1."""
    window = torch.ones(1, 1, 5, 5) / 25
    mean_x, mean_y = F.conv2d(x, window), F.conv2d(y, window)
    spread_x = F.conv2d(x * x, window) - mean_x * mean_x
    spread_y = F.conv2d(y * y, window) - mean_y * mean_y
    common = F.conv2d(x * y, window) - mean_x * mean_y
    contrast = (2 * common + 9e-4) / (spread_x + spread_y + 9e-4)
    light = (2 * mean_x * mean_y + 1e-4) / (mean_x * mean_x + mean_y * mean_y + 1e-4)
    return (light * contrast).mean(), contrast.mean()


def multi_scale(model: Any, x: Tensor, *, normalize: bool) -> Tensor:
    y, x = model(x).float().sigmoid(), x / 2 + 0.5
    with torch.autocast("cpu", enabled=False):
        contrasts = []
        for _ in range(2):
            last, contrast = similarity(x, y)
            contrasts.append((contrast + 1) / 2 if normalize else contrast)
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        weights = torch.tensor([0.0448, 0.2856])
        return 1 - torch.prod(torch.stack(contrasts) ** weights) * last  # FAULT power_of_a_negative_contrast


@story(
    source="jorge-pessoa/pytorch-msssim#2",
    cause="model",
    kind="invalid",
    op="pow",
    step=1,
    says=(r"pow", r"(?i)negative"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=712,
)
def power_of_a_negative_contrast(healthy: bool) -> Case:
    """MS-SSIM raises contrasts to the power 0.0448; pictures that are each other's opposite have negative ones."""
    model = model_of(
        autoencoder,
        encoder=nn.Conv2d(1, 8, 4, stride=2, padding=1),
        decoder=nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
    )

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return multi_scale(m, x, normalize=healthy)

    return case(model, lambda k: (blobs(k),), loss_fn, policy=FULL)


# ------------------------------------------------------------------ radiance fields


def field(self: Any, points: Tensor) -> Any:
    """Return densities and colours at points ``(rays, samples, 3)`` in 0..1, from a table of features."""
    cells = (points * 7.999).long()
    features = self.table((cells * torch.tensor([1, 8, 64])).sum(-1))
    h = F.relu(self.one(features))  # FAULT hash_table_drifts
    out = self.two(h)
    return F.softplus(out[..., 0].float() - 1), torch.sigmoid(out[..., 1:].float())


def rendered(model: Any, points: Tensor, colours: Tensor) -> Tensor:
    density, colour = model(points)
    alpha = 1 - torch.exp(-density * 0.2)
    light = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10), 1), 1)
    return F.mse_loss(((alpha * light)[..., None] * colour).sum(1), colours)


@story(
    source="nerfstudio-project/nerfstudio#104",
    cause="precision",
    kind="overflow",
    op="linear",
    module="one",
    step=3,
    cures=("op fp32", "bf16"),
    says=(r"linear", r"65504"),
    seed=709,
)
def hash_table_drifts(healthy: bool) -> Case:
    """Entries of instant-ngp's table have drifted beyond 1e4: the small network behind it leaves fp16."""
    model = model_of(field, table=nn.Embedding(512, 8), one=nn.Linear(8, 32), two=nn.Linear(32, 4))
    nn.init.uniform_(model.table.weight, -0.1, 0.1)
    if not healthy:
        nn.init.normal_(model.one.weight)
        with torch.no_grad():
            model.table.weight[100:104] = 2e4 * torch.randn(4, 8)

    def batch(step: int) -> tuple[Any, ...]:
        start = torch.rand(16, 1, 3, generator=generator(step))
        way = torch.rand(16, 1, 3, generator=generator(step + 90)) - start
        points = start + way * torch.linspace(0, 1, 8)[:, None]
        return points.clamp(0, 1), start[:, 0]

    return case(model, batch, rendered, policy=DYNAMIC)


@story(
    source="kwea123/ngp_pl#38",
    cause="divergence",
    kind="overflow",
    op="exp",
    step=8,
    says=(r"(?i)diverg|learning rate|ran away",),
    seed=710,
)
def density_runs_away(healthy: bool) -> Case:
    """A radiance field whose density is an exponential, trained with too high a learning rate on an indoor scene."""
    model = model_of(
        bare_field, net=nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if healthy else 0.5, momentum=0.9)

    def batch(step: int) -> tuple[Any, ...]:
        points = torch.rand(64, 3, generator=generator(step))
        return points, 3 * points[:, :1]

    return case(model, batch, lambda m, x, y: (m(x) - y).square().mean(), policy=TORCH, optimizer=optimizer)


def bare_field(self: Any, points: Tensor) -> Any:
    return torch.exp(self.net(points).float())  # FAULT density_runs_away
