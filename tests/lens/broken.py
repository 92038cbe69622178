"""Small models that break in known places, and loss functions; each line that breaks ends with a comment `# here`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def here(name: str) -> str:
    """Return how a verdict writes the line marked ``# here: name``."""
    for number, text in enumerate(SOURCE, 1):
        if text.endswith(f"# here: {name}"):
            return f"{Path(__file__).name}:{number} {text.strip()}"
    raise AssertionError(name)


class Attention(nn.Module):
    """One head whose logits are not divided before they are rounded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1)  # here: logits
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        weights = torch.softmax(logits.masked_fill(mask, float("-inf")) / 8, -1)
        return self.out(weights @ v)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Two blocks, a dropout, and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(width), Attention(width)])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def transformer(factor: float = 200.0) -> Transformer:
    """Return a Transformer whose second block has weights `factor` times as large."""
    torch.manual_seed(0)
    model = Transformer()
    with torch.no_grad():
        model.get_parameter("blocks.1.qkv.weight").mul_(factor)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 16, generator=generator), torch.randint(0, 4, (2,), generator=generator)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), y)


class Body(nn.Module):
    """A linear layer and a function after it."""

    def __init__(self, after: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.after = after
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.enter(x))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def explained(
    after: Callable[..., Tensor],
    *,
    policy: str | hs.Policy = "mixed",
    x: Tensor | None = None,
    loss_fn: Callable[..., Tensor] = squared,
    change: Callable[[nn.Module], object] | None = None,
    **parts: nn.Module,
) -> hs.lens.Verdict:
    """Train one step that is not finite and return the verdict on it."""
    model = Body(after, **parts)
    chosen = hs.Policy.of(policy, dtype="fp16") if isinstance(policy, str) else policy
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn, policy=chosen)
    if change is not None:
        change(model)
    assert step(torch.randn(4, 8) if x is None else x).host().skipped
    return step.explain()
