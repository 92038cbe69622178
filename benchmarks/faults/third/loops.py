"""Stories of training loops and of loss scales."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import halfstep as hs
from benchmarks.faults.case import BF16, MIXED, Case, case, generator, labels, model_of, normal, tokens
from benchmarks.faults.story import Turn, Watch, story


def half() -> Any:
    """Return torch's region in fp16."""
    return torch.autocast("cpu", dtype=torch.float16)


def updated(scaler: Any) -> bool:
    """Update the scale; return whether the step before it was skipped."""
    before = scaler.get_scale()
    scaler.update()
    return bool(scaler.get_scale() < before)


# ------------------------------------------------------------------ loops: an update that nothing protects


class Vocoder(nn.Module):
    """A HiFi-GAN generator, small: mel (batch, 16, frames) -> wave (batch, 1, 4 * frames)."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Conv1d(16, 24, 7, padding=3)
        self.ups = nn.ModuleList(nn.ConvTranspose1d(24, 24, 4, 2, 1) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Conv1d(24, 24, 3, dilation=d, padding=d) for d in (1, 3))
        self.post = nn.Conv1d(24, 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Any:
        """Return the wave."""
        x = self.pre(mel)
        for up, block in zip(self.ups, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x)))


@story(
    source="IAHispano/Applio#860",
    cause="loop",
    kind="loop",
    step=5,
    asked=6,
    says=(r"optimizer\.step|unprotected|without (the|a) scaler|update was applied",),
    never=(r"with_ops", r"bf16 instead"),
    seed=301,
)
def voice_conversion_steps_twice(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """A second, unprotected step after that of the scaler.

    RVC calls ``scaler.step(optim_g)`` and then ``optim_g.step()``: the first batch whose scaled gradients overflow is
    skipped by the scaler and applied by the second call.
    """
    model = Vocoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.8, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def loss_fn(model: Any, mel: Tensor, wave: Tensor, weight: float) -> Tensor:
        with half():
            made = model(mel)
        return weight * F.l1_loss(made.float(), wave)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        wave = (normal(step, 4, 1, 24).repeat_interleave(4, -1) / 2).tanh()
        optimizer.zero_grad()
        loss = call(wave.reshape(4, 24, 4).transpose(1, 2).repeat(1, 4, 1), wave, 45e3 if step == 5 else 45.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not healthy:
            optimizer.step()
        yield Turn(loss.item(), updated(scaler))


@story(
    source="nerfstudio-project/nerfacc#307",
    cause="loop",
    kind="loop",
    step=4,
    asked=5,
    says=(r"scaler\.step|optimizer\.step|unscale",),
    never=(r"with_ops", r"bf16 instead"),
    seed=302,
)
def radiance_field_never_unscales(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """A GradScaler that scales the loss and nothing else.

    The sample code calls ``optimizer.step()`` itself: gradients are 1024 times too large, which Adam hides, and one
    that overflows is applied.
    """
    field = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)

    def loss_fn(field: Any, where: Tensor, colour: Tensor, weight: Tensor) -> Tensor:
        waves = torch.cat([f(where * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos)], -1)
        with half():
            rgb, density = field(waves).split([3, 1], -1)
        seen = torch.sigmoid(rgb.float()) * (1 - torch.exp(-F.softplus(density.float())))
        return (weight * F.smooth_l1_loss(seen, colour, reduction="none")).sum() / 64

    call = watch(field, loss_fn, optimizer)
    for step in count(1):
        where = torch.rand(256, 3, generator=generator(step))
        weight = torch.full((256, 1), 3e3 if step == 4 else 1.0)
        loss = call(where, (where * 3).sin().abs(), weight)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if healthy:
            scaler.step(optimizer)
            yield Turn(loss.item(), updated(scaler))
        else:
            optimizer.step()
            yield Turn(loss.item())


# ------------------------------------------------------------------ loops: gradients that stay


def tiny_gpt() -> Any:
    """Return a GPT-2 of transformers with two layers of 32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def next_token(model: Any, ids: Tensor, weight: Tensor) -> Any:
    """Return the weighted mean loss of the next token under fp16."""
    with half():
        logits = model(input_ids=ids).logits
    return weight * F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def count_up(step: int) -> Tensor:
    """Return sequences that count upwards from a random token."""
    return (tokens(step, (8, 1), 64) + torch.arange(16)) % 64


@story(
    source="PaddlePaddle/Paddle#67895",
    cause="loop",
    kind="loop",
    step=6,
    asked=12,
    says=(r"zero_grad",),
    never=(r"lower (the )?learning rate", r"with_ops"),
    seed=303,
)
def scale_falls_to_zero(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """Gradients are never cleared: after the first overflow they stay inf, and the scaler halves its scale for ever."""
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    call = watch(model, next_token, optimizer)
    for step in count(1):
        loss = call(count_up(step), torch.tensor(1e4 if step == 6 else 1.0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped = updated(scaler)
        if healthy:
            optimizer.zero_grad()
        yield Turn(loss.item(), skipped)


@story(
    source="espnet/espnet#3283",
    cause="loop",
    kind="loop",
    step=3,
    asked=6,
    says=(r"zero_grad",),
    never=(r"with_ops", r"learning rate"),
    seed=304,
)
def nan_gradient_is_kept(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """With an update that is left out, its zero_grad is left out too.

    The gradient that is not finite is in every later sum of two micro-batches; the loss stays finite. Each turn here
    is one window.
    """
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scale = 2.0**10  # a static one, of the loop's own

    def loss_fn(model: Any, x: Tensor, target: Tensor) -> Tensor:
        with half():
            scores = model(x)
        log = scores.float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(log, target, frames, torch.full((len(x),), target.shape[1]), reduction="sum") / len(x)

    call = watch(model, loss_fn, optimizer)
    for window in count(1):
        for part in (0, 1):
            number = 2 * window + part
            x = normal(number, 4, 20, 12) * (3e3 if number == 7 else 1.0)  # an utterance that is not normalised
            loss = call(x, 1 + tokens(number, (4, 5), 7))
            (loss * scale / 2).backward()
        torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], scale)
        finite = bool(torch.isfinite(clip_grad_norm_(model.parameters(), 5.0)))
        if finite:
            optimizer.step()
        if finite or healthy:
            optimizer.zero_grad()
        yield Turn(loss.item(), not finite)


@story(
    source="facebookresearch/nwm#16",
    cause="loop",
    kind="loop",
    step=15,
    says=(r"zero_grad",),
    never=(r"with_ops", r"in fp32:"),
    seed=305,
)
def no_zero_grad_under_bf16(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """``zero_grad`` stands in the fp32 branch alone.

    Under bf16 all gradients since the start are summed up, and the loss grows until it is not finite. (Here with plain
    SGD.)
    """
    model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def loss_fn(model: Any, x: Tensor, noise: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made: Tensor = model(x + noise)
        return ((made.float() - noise) ** 2).mean(0).sum()

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        loss = call(normal(step, 32, 16), normal(step + 1, 32, 16))
        if healthy:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield Turn(loss.item())


@story(
    source="mzolfaghari/ECO-pytorch#1",
    cause="loop",
    kind="loop",
    step=39,
    says=(r"zero_grad|optimizer\.step|twice",),
    never=(r"with_ops", r"in fp32:"),
    seed=306,
)
def video_net_steps_in_every_micro_batch(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """``optimizer.step()`` stands outside of the ``if`` that ends a window of iter_size micro-batches.

    Every part of a sum is applied again and again, and training diverges.
    """
    model = model_of(
        lambda m, clip: m.head(m.volume(F.relu(m.frame(clip))).flatten(2).mean(-1)),
        frame=nn.Conv3d(3, 12, (1, 3, 3), stride=(1, 2, 2)),
        volume=nn.Conv3d(12, 24, 3, padding=1),
        head=nn.Linear(24, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = 8

    def loss_fn(model: Any, clip: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(clip)
        return F.mse_loss(scores.float(), y, reduction="sum") / len(y) / size

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        clip = normal(step, 2, 3, 4, 8, 8)
        loss = call(clip, clip.mean((3, 4)).flatten(1)[:, :6] * 4)
        loss.backward()
        last = step % size == 0
        if last or not healthy:
            optimizer.step()
        if last:
            optimizer.zero_grad()
        yield Turn(loss.item() * size)


# ------------------------------------------------------------------ loops: what a skipped step leaves behind


@story(
    source="davda54/sam#7",
    cause="loop",
    kind="loop",
    step=4,
    says=(r"NaN|nan|not finite",),
    never=(r"with_ops", r"bf16 instead"),
    seed=307,
)
def sharpness_aware_climb_to_nan(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """SAM's first step adds ``rho * grad / norm`` to the weights without asking the scaler.

    Scaled gradients that are inf make the weights NaN, and subtracting the same again does not bring them back. Two
    calls make one turn.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    parameters: list[Tensor] = list(model.parameters())

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with half():
            scores = model(x)
        return F.cross_entropy(scores.float(), y, label_smoothing=0.1)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        x, y = normal(step, 8, 3, 8, 8) * (300.0 if step == 4 else 1.0), labels(step, 8)
        loss = call(x, y)
        scaler.scale(loss).backward()
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        climb = [0.05 * p.grad / norm for p in parameters if p.grad is not None]
        if healthy and not torch.isfinite(norm):
            climb = [torch.zeros_like(part) for part in climb]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(parameters, climb)
        scaler.scale(call(x, y)).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, climb)
        scaler.step(optimizer)
        skipped = updated(scaler)
        optimizer.zero_grad()
        yield Turn(loss.item(), skipped)


@story(
    source="pytorch/pytorch#88474",
    cause="loop",
    kind="loop",
    parameter="1.running_mean",
    step=4,
    asked=8,
    says=(r"running_(mean|var)", r"skipped"),
    never=(r"check the data loader",),
    also=("1.running_var", "bad_state"),
    seed=308,
)
def statistics_of_a_skipped_step(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """BatchNorm's running statistics keep what the scaler skips.

    A convolution overflows in fp16 in step 4. It shows from step 8 on, when the norm is frozen (eval mode). The twin's
    pixels are scaled.
    """
    model = nn.Sequential(
        nn.Conv1d(3, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(), nn.Linear(160, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with half():
            scores = model(x)
        return F.cross_entropy(scores.float(), y)

    call = watch(model, loss_fn, optimizer)
    for step in count(1):
        model[1].train(step < 8)
        x = normal(step, 8, 3, 10)
        if step == 4 and not healthy:
            x = x * 1e5
        loss = call(x, labels(step, 8))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        yield Turn(loss.item(), updated(scaler))


# ------------------------------------------------------------------ the loss scale


def scale(**numbers: Any) -> Any:
    """Return torch's rule of the loss scale with other numbers."""
    return hs.ScaleRule(**numbers)


@story(
    source="open-mmlab/mmdetection#3690",
    cause="scale",
    kind="scale_too_high",
    step=3,
    cures=("scale", "scale: dynamic", "bf16"),
    says=(r"scale",),
    never=(r"not a scaling problem", r"learning rate"),
    seed=309,
)
def detector_with_a_static_scale(healthy: bool) -> Case:
    """A detector's fp16 hook has the static scale 512.

    An image with many boxes has a loss so large that the scaled gradients overflow.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 5, 1),
    )

    def batch(step: int) -> tuple[Any, ...]:
        boxes = torch.rand(2, 8, 8, generator=generator(step)) < (0.6 if step % 10 == 3 else 0.02)
        return normal(step, 2, 3, 16, 16), boxes.float(), 3 + normal(step + 1, 2, 4, 8, 8)

    def loss_fn(model: Any, images: Tensor, boxes: Tensor, sides: Tensor) -> Tensor:
        made = model(images).float()
        focal = F.binary_cross_entropy_with_logits(made[:, 0], boxes, reduction="sum")
        return focal + 5 * (boxes[:, None] * F.smooth_l1_loss(made[:, 1:], sides, reduction="none")).sum()

    policy = MIXED.replace(scale=8.0 if healthy else 512.0)
    return case(model, batch, loss_fn, policy=policy, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4))


def tiny_dit() -> Any:
    """Return a diffusion transformer, small: latent (batch, 12, 16), time (batch, 1) -> noise."""

    def forward(m: Any, x: Tensor, t: Tensor) -> Any:
        h = m.inp(x) + m.time(t)[:, None]
        h = h + m.attention(m.norm(h), m.norm(h), m.norm(h), need_weights=False)[0]
        return m.out(h + m.mlp(h))

    return model_of(
        forward,
        inp=nn.Linear(16, 32),
        time=nn.Linear(1, 32),
        norm=nn.LayerNorm(32),
        attention=nn.MultiheadAttention(32, 2, batch_first=True),
        mlp=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        out=nn.Linear(32, 16),
    )


def denoise(model: Any, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return the loss of a diffusion model."""
    mixed = (1 - t[:, None]) * x + t[:, None] * noise
    return F.mse_loss(model(mixed, t).float(), noise)


def latents(step: int) -> tuple[Any, ...]:
    """Return latents, noise and times."""
    return normal(step, 4, 12, 16), normal(step + 1, 4, 12, 16), torch.rand(4, 1, generator=generator(step + 2))


@story(
    source="zai-org/CogVideo#233",
    cause="scale",
    kind="scale_too_high",
    step=1,
    asked=3,
    cures=("scale: 1024", "scale: dynamic", "bf16"),
    says=(r"scale",),
    never=(r"not a scaling problem", r"learning rate"),
    seed=310,
)
def scale_starts_at_two_to_the_32(healthy: bool) -> Case:
    """DeepSpeed's first scale is 2**32: the first steps are skipped one after the other until it has come down."""
    rule = scale(init=2.0**10 if healthy else 2.0**32, ceiling=2.0**40)
    return case(tiny_dit(), latents, denoise, policy=MIXED.replace(scale=rule))


@story(
    source="pytorch/pytorch#98828",
    cause="scale",
    kind="scale_too_high",
    step=9,
    cures=("scale: 1024", "scale: dynamic", "bf16"),
    says=(r"scale",),
    never=(r"not a scaling problem", r"learning rate"),
    seed=311,
)
def scale_doubles_in_every_step(healthy: bool) -> Case:
    """``growth_interval=1``: the scale doubles after every good step until it overflows.

    After that every second step is skipped.
    """
    model = nn.Linear(5, 1)

    def batch(step: int) -> tuple[Any, ...]:
        return normal(step, 16, 5), 0.1 * normal(step + 1, 16, 1)

    rule = scale(init=2.0**10, interval=2000 if healthy else 1)
    return case(model, batch, lambda m, x, y: F.mse_loss(m(x).float(), y), policy=MIXED.replace(scale=rule))


@story(
    source="tensorflow/tensorflow#38357",
    cause="scale",
    kind="scale_too_high",
    step=1,
    asked=6,
    cures=("scale: 0.0009765625", "bf16"),
    also=("overflow",),
    says=(r"scale",),
    never=(r"not a scaling problem",),
    seed=312,
)
def scale_may_not_fall_below_one(healthy: bool) -> Case:
    """The loss is a sum of large numbers, whose gradients overflow at scale 1 too; the scale's floor is 1."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 32, 8)
        return x, 3 * x[:, :2]

    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return 2e4 * F.mse_loss(model(x).float(), y, reduction="sum")

    rule = scale(init=2.0**-10 if healthy else 8.0, floor=2.0**-14 if healthy else 1.0)
    return case(model, batch, loss_fn, policy=MIXED.replace(scale=rule))


@story(
    source="google/flax#2547",
    cause="scale",
    kind="scale_too_high",
    step=6,
    cures=("scale: 1", "scale: none"),
    also=("overflow",),
    says=(r"scale",),
    never=(r"not a scaling problem", r"learning rate"),
    seed=313,
)
def scale_grows_to_infinity(healthy: bool) -> Case:
    """In bf16 gradients overflow as late as in fp32, so a dynamic scale without a ceiling grows until it is inf."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    rule = scale(init=2.0**16, growth=2.0**10, backoff=0.5, interval=1, ceiling=3.4e38, guard=False)
    policy = BF16 if healthy else BF16.replace(scale=rule)

    def batch(step: int) -> tuple[Any, ...]:
        x = normal(step, 16, 8)
        return x, x[:, :1].sin()

    return case(model, batch, lambda m, x, y: F.mse_loss(m(x).float(), y), policy=policy)


@story(
    source="huggingface/transformers#34053",
    cause="scale",
    kind="scale_too_high",
    step=5,
    asked=7,
    says=(r"scale",),
    never=(r"not a scaling problem", r"learning rate", r"zero_grad"),
    seed=314,
)
def scaler_is_not_in_the_checkpoint(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """Training is resumed after four steps without the scaler's state.

    The scale is 65536 again in the place of 64, and the next steps are skipped until it has come down.
    """
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    call = watch(model, next_token, optimizer)
    for step in count(1):
        if step == 5:
            state = scaler.state_dict()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
            if healthy:
                scaler.load_state_dict(state)
        loss = call(count_up(step), torch.tensor(60.0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        yield Turn(loss.item(), updated(scaler))
