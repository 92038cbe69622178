"""gpt: a character-level GPT on the English text of Python's own documentation topics (`pydoc_data.topics`).

A pre-norm decoder (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) out of torch's own
Linear, LayerNorm, Embedding and scaled_dot_product_attention. The text, and with it the vocabulary, is that of the
running Python version: losses of two Python versions are not comparable, which is why reports carry the version.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from halfstep.tasks.task import STEPS_OF_A_SEED, Task

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 2, 4, 64, 16
TRAIN_SHARE = 0.9  # the first nine tenths of the text are for training
VALIDATION_BATCH, VALIDATION_BATCHES = 64, 4  # 64 * 4 * LENGTH characters, evenly spread over the last tenth


class Block(nn.Module):
    """Attention, then a four times wider MLP, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a residual stream (B, T, width) to the next one."""
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]  # module calls are Any


class GPT(nn.Module):
    """A decoder-only transformer over a vocabulary of `vocabulary` tokens."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)  # GPT-2's

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) int64 to scores of the next token (B, T, vocabulary)."""
        return self.head(self.features(tokens))  # type: ignore[no-any-return]  # module calls are Any

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) int64 to what the last layer reads (B, T, width)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]  # module calls are Any


@cache
def corpus() -> tuple[Tensor, Tensor, int]:
    """Return the training and the validation text as int64 tokens, and the size of the vocabulary (all characters)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([index[character] for character in text])
    cut = int(TRAIN_SHARE * len(tokens))
    return tokens[:cut], tokens[cut:], len(index)


def windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (len(starts), LENGTH) tokens from each start on, and those one further: input and target."""
    rows = starts[:, None] + torch.arange(LENGTH + 1)
    both = tokens[rows]
    return both[:, :-1], both[:, 1:]


def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return batch `step` of a run: random places of the training text that only `seed` and `step` decide."""
    train, _, _ = corpus()
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + step)
    return windows(train, torch.randint(len(train) - LENGTH, (BATCH,), generator=generator))


def validation_loss(model: nn.Module) -> float:
    """Return the mean cross-entropy on fixed places of the validation text, nats a character."""
    _, held_out, _ = corpus()
    device = next(model.parameters()).device
    last = len(held_out) - LENGTH - 1
    starts = torch.linspace(0, last, VALIDATION_BATCH * VALIDATION_BATCHES, dtype=torch.float64).long()
    losses = []
    for chunk in starts.chunk(VALIDATION_BATCHES):
        tokens, targets = (t.to(device) for t in windows(held_out, chunk))
        losses.append(F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()))
    return float(torch.stack(losses).cpu().double().mean())


def gpt_task() -> Task:
    """Return the task `gpt`."""
    return Task(
        name="gpt", batches=batches,
        model=lambda: GPT(vocabulary=corpus()[2], width=WIDTH, layers=LAYERS, heads=HEADS, length=LENGTH),
        loss_fn=lambda model, tokens, targets: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()),
        optimizer=lambda model: AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        scheduler=lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),  # the metric settles at the end
        metric=validation_loss, metric_name="validation loss, nats/char", higher_is_better=False, margin=0.01,
        relative_margin=True, steps=400, excerpt_steps=80,
        about=f"character-level GPT, {LAYERS} layers of {WIDTH}, batch {BATCH} x {LENGTH}, on Python's documentation",
    )  # fmt: skip
