"""Stories of speech models: recognition, enhancement, synthesis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.case import FULL, MIXED, TORCH, UNSCALED, Case, case, labels, model_of, normal, tokens
from benchmarks.faults.story import story

SMALL = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "attn_implementation": "eager",
}
"""Settings of the wav2vec 2 family: one frame of 20 samples, and nothing random."""


def tones(step: int, rows: int, length: int) -> Tensor:
    """Return a sine with noise a row, shape (rows, length), of unit variance."""
    pitch = 0.05 + 0.05 * tokens(step, (rows, 1), 8)
    wave = torch.sin(pitch * torch.arange(length)) + 0.3 * normal(step, rows, length)
    return wave / wave.std(1, keepdim=True)


def transcripts(step: int, rows: int, length: int) -> Tensor:
    """Return labels from 1 to 15, no two neighbours the same; 0 is CTC's blank."""
    first = tokens(step, (rows, 1), 8)
    return 1 + (first + torch.arange(length)) % 15


def transcribed(model: Any, audio: Tensor, text: Tensor, heard: Tensor | None = None) -> Any:
    """Return the loss that the model computes itself; `heard` is False where audio is padding."""
    return model(input_values=audio, labels=text, attention_mask=heard).loss


# ------------------------------------------------------------------ fp16 is too small


@story(
    source="pytorch/audio#2716",
    cause="precision",
    kind="overflow",
    op="matmul",
    module="hubert.encoder.layers.1.attention",
    place="modeling_hubert.py: eager_attention_forward: torch.matmul(query, key",
    step=1,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"matmul", r"hubert\.encoder\.layers\.1\.attention", r"65504|fp16|float16"),
    never=(r"learning rate",),
    seed=301,
)
def hubert_attention(healthy: bool) -> Case:
    """HuBERT in fp16: keys share a large component, which softmax removes, but products with it exceed 65504."""
    from transformers import HubertConfig, HubertForCTC

    model = HubertForCTC(HubertConfig(**SMALL))
    with torch.no_grad():
        attention = model.hubert.encoder.layers[1].attention
        attention.q_proj.bias.fill_(20.0 if healthy else 70.0)
        attention.k_proj.bias.fill_(20.0 if healthy else 70.0)
    return case(model, lambda k: (tones(k, 3, 640), transcripts(k, 3, 5)), transcribed)


def transducer_forward(self: Any, audio: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    heard, _ = self.encoder(audio)
    return self.acoustic(heard), self.language(text)


def transducer_cost(acoustic: Tensor, language: Tensor, text: Tensor) -> Tensor:
    """Return minus the log-probability of each row's text over all alignments of it, shape (rows,)."""
    joined = F.log_softmax((acoustic[:, :, None] + language[:, None]).float(), -1)
    blank = joined[..., 0]
    symbol = joined[:, :, :-1].gather(-1, text[:, None, 1:, None].expand(-1, joined.shape[1], -1, -1))[..., 0]
    waited = F.pad(blank.cumsum(1), (0, 0, 1, 0))
    alpha = waited[:, :-1, 0]
    for place in range(symbol.shape[2]):
        reached = alpha + symbol[:, :, place]
        passed = waited[:, :-1, place + 1]
        alpha = passed + torch.logcumsumexp(reached - passed, 1)
    return -(alpha[:, -1] + blank[:, -1, -1])


def transducer_loss(model: Any, audio: Tensor, text: Tensor) -> Tensor:
    acoustic, language = model(audio, text)
    cost = transducer_cost(acoustic, language, text).to(acoustic.dtype)
    total = cost.sum()  # FAULT transducer_loss_in_half
    return total / audio.shape[0]


@story(
    source="k2-fsa/icefall#283",
    cause="precision",
    kind="overflow",
    op="sum",
    step=5,
    cures=("op fp32", "bf16"),
    says=(r"\bsum\b", r"65504|fp16|float16"),
    never=(r"learning rate", r"bad_batch|the batch is not finite"),
    seed=302,
)
def transducer_loss_in_half(healthy: bool) -> Case:
    """A transducer whose loss is computed under autocast too: summed over a large batch it exceeds 65504."""
    model = model_of(
        transducer_forward,
        encoder=nn.GRU(8, 16, batch_first=True),
        acoustic=nn.Linear(16, 16),
        language=nn.Embedding(16, 16),
    )

    def batch(step: int) -> tuple[Any, ...]:
        rows = 150 if step >= 5 and step % 5 == 0 and not healthy else 8
        return normal(step, rows, 200, 8), F.pad(transcripts(step, rows, 2), (1, 0))

    return case(model, batch, transducer_loss, policy=TORCH.replace(outputs="keep", scale=1.0))


# ------------------------------------------------------------------ training has run away


def tacotron_forward(self: Any, text: Tensor, frames: int) -> Tensor:
    memory = self.encoder(self.embed(text))[0]
    frame, hidden, spoken = memory.new_zeros(len(text), 8), memory.new_zeros(len(text), 32), []
    for _ in range(frames):
        before = F.relu(self.prenet(frame))  # FAULT tacotron_loss_exploded
        context = ((memory @ hidden[..., None]).softmax(1) * memory).sum(1)
        hidden = self.cell(torch.cat((before, context), -1), hidden)
        frame = self.mel(torch.cat((hidden, before), -1))
        spoken.append(frame)
    return torch.stack(spoken, 1)


@story(
    source="barronalex/Tacotron#7",
    cause="divergence",
    kind="overflow",
    op="linear",
    module="prenet",
    step=4,
    says=(r"learning rate", r"loss (rose|grew|went)|diverg"),
    never=(r"cure, verified",),
    seed=303,
)
def tacotron_loss_exploded(healthy: bool) -> Case:
    """A small Tacotron that hears its own frames, in fp16: the loss explodes, a lower learning rate trains on."""
    model = model_of(
        tacotron_forward,
        embed=nn.Embedding(16, 16),
        encoder=nn.GRU(16, 32, batch_first=True),
        prenet=nn.Linear(8, 16),
        cell=nn.GRUCell(48, 32),
        mel=nn.Linear(48, 8),
    )

    def batch(step: int) -> tuple[Any, ...]:
        text = tokens(step, (4, 10), 16)
        return text, torch.sin(text[:, :1, None] + 0.3 * torch.arange(16)[:, None] + torch.arange(8))

    return case(
        model,
        batch,
        lambda m, text, mel: F.mse_loss(m(text, mel.shape[1]), mel),
        lr=1e-3 if healthy else 0.25,
        policy=UNSCALED,
    )


def flow_forward(self: Any, mel: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
    voice = self.speakers(speaker)
    first, second = mel.chunk(2, -1)
    stretched: Any = 0.0
    for net in self.flows:
        log_scale, shift = net(torch.cat((first, voice), -1)).chunk(2, -1)
        second = second * log_scale.exp() + shift  # FAULT flowtron_new_speakers
        stretched = stretched + log_scale.sum(-1)
        first, second = second, first
    return torch.cat((first, second), -1), stretched


def likelihood(model: Any, mel: Tensor, speaker: Tensor) -> Any:
    latent, stretched = model(mel, speaker)
    return (0.5 * latent.square().sum(-1) - stretched).mean() / mel.shape[-1]


@story(
    source="NVIDIA/flowtron#130",
    cause="divergence",
    kind="overflow",
    op="exp",
    step=9,
    says=(r"loss (rose|grew|went)|diverg",),
    never=(r"cure, verified",),
    seed=304,
)
def flowtron_new_speakers(healthy: bool) -> Case:
    """A flow trained on two speakers is given eight new ones: the loss jumps from 10 to 10,000 and is NaN soon."""
    model = model_of(
        flow_forward,
        speakers=nn.Embedding(10, 8),
        flows=nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(6)),
    )
    with torch.no_grad():
        model.speakers.weight[:2].mul_(0.1)
        model.speakers.weight[2:].mul_(0.1 if healthy else 4.0)

    def batch(step: int) -> tuple[Any, ...]:
        speaker = labels(step, 16, 2) if step < 6 else 2 + labels(step, 16, 8)
        return normal(step, 16, 8) * (1 + 0.1 * speaker[:, None]), speaker

    return case(model, batch, likelihood, policy=FULL, lr=3e-3)


# ------------------------------------------------------------------ the batch


@story(
    source="k2-fsa/icefall#135",
    cause="data",
    kind="invalid",
    op="ctc_loss",
    place="loss_ctc.py: ForCTCLoss: nn.functional.ctc_loss(",
    step=6,
    says=(r"ctc_loss", r"target|label|length|short"),
    never=(r"cure, verified", r"learning rate"),
    seed=305,
)
def ctc_short_audio(healthy: bool) -> Case:
    """wav2vec 2 with CTC: an utterance has fewer frames than its transcript has letters, so that its loss is inf."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SMALL))

    def batch(step: int) -> tuple[Any, ...]:
        heard = torch.arange(640) < torch.tensor([[640], [140 if step == 6 and not healthy else 500], [560]])
        return tones(step, 3, 640) * heard, transcripts(step, 3, 9), heard.long()

    return case(model, batch, transcribed)


def deep_speech_forward(self: Any, features: Tensor) -> Any:
    hidden, _ = self.recurrent(F.relu(self.enter(features)))
    return self.head(hidden)


def connectionist(model: Any, features: Tensor, text: Tensor) -> Tensor:
    scores = model(features).float().log_softmax(-1).transpose(0, 1)
    frames, letters = (torch.full((len(text),), size) for size in (features.shape[1], text.shape[1]))
    return F.ctc_loss(scores, text, frames, letters)


@story(
    source="SeanNaren/deepspeech.pytorch#272",
    cause="data",
    kind="bad_batch",
    step=7,
    says=(r"batch", r"nan|NaN|not finite", r"sample|row|\[1"),
    never=(r"cure, verified", r"learning rate"),
    seed=306,
)
def silent_audio(healthy: bool) -> Case:
    """Features are standardised when they are loaded; an audio file of zeros has no deviation and becomes NaN."""
    model = model_of(
        deep_speech_forward,
        enter=nn.Linear(8, 24),
        recurrent=nn.GRU(24, 24, batch_first=True, bidirectional=True),
        head=nn.Linear(48, 16),
    )

    def batch(step: int) -> tuple[Any, ...]:
        audio = tones(step, 3, 240)
        if step == 7 and not healthy:
            audio[1] = 0.0
        features = audio.unflatten(1, (30, 8)).abs().log1p()
        mean, deviation = features.mean((1, 2), keepdim=True), features.std((1, 2), keepdim=True)
        return (features - mean) / deviation, transcripts(step, 3, 6)

    return case(model, batch, connectionist)


def conversion_forward(self: Any, audio: Tensor) -> tuple[Tensor, Tensor]:
    spectrum = torch.fft.rfft(audio.unflatten(1, (-1, 32)) * torch.hann_window(32))
    power = spectrum.abs().square()  # FAULT corrupted_audio
    mel = (power @ self.filters + 1e-5).log()
    hidden, _ = self.encoder(mel)
    return self.decoder(hidden), mel


def reconstruction(model: Any, audio: Tensor) -> Tensor:
    made, mel = model(audio)
    return F.l1_loss(made[:, :-1], mel[:, 1:])


@story(
    source="Plachtaa/seed-vc#108",
    cause="data",
    kind="overflow",
    op="square",
    step=9,
    says=(r"outlier|extreme|times|larg", r"sample|row|\[2", r"e\+?2[5-9]|10\*\*2[5-9]"),
    never=(r"cure, verified", r"learning rate"),
    seed=309,
)
def corrupted_audio(healthy: bool) -> Case:
    """Voice conversion: one file is corrupted, its samples are finite but of size 1e29, and its power is infinite."""
    model = model_of(conversion_forward, encoder=nn.GRU(12, 24, batch_first=True), decoder=nn.Linear(24, 12))
    model.register_buffer("filters", torch.rand(17, 12))

    def batch(step: int) -> tuple[Any, ...]:
        audio = tones(step, 4, 640) * 0.2
        if step == 9 and not healthy:
            audio[2, 400:420] = 3e29 * audio[2, 400:420].sign()
        return (audio,)

    return case(model, batch, reconstruction)


# ------------------------------------------------------------------ the formula


def magnitude(healthy: bool) -> Any:
    def spectral(spectrum: Tensor) -> Tensor:
        power = spectrum.square().sum(-1)
        if healthy:
            power = power + 1e-14
        return power.pow(0.5)  # FAULT spectral_magnitude

    def loss_fn(model: Any, noisy: Tensor, clean: Tensor) -> Tensor:
        return F.mse_loss(spectral(model(noisy)), spectral(clean))

    return loss_fn


def masking_forward(self: Any, noisy: Tensor) -> Tensor:
    mask = torch.sigmoid(self.mask(noisy.flatten(2)))
    return noisy * mask[..., None]


@story(
    source="speechbrain/speechbrain#184",
    cause="model",
    kind="invalid",
    op="pow",
    phase="backward",
    step=4,
    says=(r"\bpow\b|sqrt|root", r"eps|clamp|inside|\+ 1e"),
    never=(r"cure, verified", r"learning rate"),
    seed=307,
)
def spectral_magnitude(healthy: bool) -> Case:
    """Speech enhancement with a loss of magnitudes: in padded frames the root of the power has an infinite gradient."""
    model = model_of(masking_forward, mask=nn.Sequential(nn.Linear(34, 32), nn.ReLU(), nn.Linear(32, 17)))

    def batch(step: int) -> tuple[Any, ...]:
        clean, noise = normal(step, 4, 20, 17, 2), normal(step + 70, 4, 20, 17, 2)
        heard = torch.arange(20) < torch.tensor([[20], [14 if step >= 4 else 20], [20], [17 if step >= 4 else 20]])
        heard = heard[..., None, None].float()
        return (clean + 0.3 * noise) * heard, clean * heard

    return case(model, batch, magnitude(healthy), policy=FULL)


# ------------------------------------------------------------------ the loss scale


@story(
    source="facebookresearch/fairseq#4555",
    cause="scale",
    kind="scale_too_high",
    phase="backward",
    step=1,
    cures=("scale", "scale: dynamic"),
    says=(r"scale",),
    never=(r"learning rate",),
    seed=308,
)
def loss_summed_over_frames(healthy: bool) -> Case:
    """Recognition in fp16 with a loss summed over a batch and a fixed scale for means: gradients overflow."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SMALL, ctc_loss_reduction="sum"))
    return case(
        model,
        lambda k: (tones(k, 6, 640), transcripts(k, 6, 7)),
        transcribed,
        policy=MIXED.replace(scale=8.0 if healthy else 2.0**16),
        lr=1e-4,
    )
