"""Batches that are dictionaries, as tokenizers and Hugging Face data collators make them.

`step(**batch)` calls `loss_fn(model, **batch)`. Integer tensors (token ids, masks, labels) are never cast. What the
loss function returns beside the loss comes back as `result.aux`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

VOCABULARY, WIDTH, LENGTH, CLASSES = 32, 64, 12, 2


class Classifier(nn.Module):
    """A transformer layer over token ids with a padding mask, mean-pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Map token ids and their mask, both (batch, length), to logits (batch, classes)."""
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[:, :, None]
        out: Tensor = self.head((hidden * mask).sum(dim=1) / mask.sum(dim=1))
        return out


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Yield sentences of random length; the label is whether the token 7 occurs in them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(8, VOCABULARY, (32, LENGTH), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (32, 1), generator=generator)
        labels = torch.randint(0, CLASSES, (32,), generator=generator)
        ids[labels == 1, 2] = 7
        mask = (torch.arange(LENGTH) < lengths).long()
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def loss_fn(model: nn.Module, labels: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and beside it the number of right answers."""
    logits = model(**inputs)
    return F.cross_entropy(logits, labels), {"right": (logits.argmax(dim=-1) == labels).sum()}


def main() -> dict[str, float]:
    """Train for 120 batches; return the loss at both ends and the accuracy over the last 20 batches."""
    torch.manual_seed(0)
    model = Classifier()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss_fn, policy="O2")
    results = [step(**batch) for batch in batches(120)]
    first, last = (float(torch.stack([r.loss for r in part]).mean()) for part in (results[:20], results[-20:]))
    accuracy = sum(int(r.aux["right"]) for r in results[-20:]) / (20 * 32)
    print(f"loss {first:.3f} -> {last:.3f}, accuracy {accuracy:.3f}")
    return {"first": first, "last": last, "accuracy": accuracy}


if __name__ == "__main__":
    main()
