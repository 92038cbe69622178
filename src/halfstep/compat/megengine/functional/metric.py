"""megengine.functional.metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["topk_accuracy"]


def topk_accuracy(logits: Tensor, target: Tensor, topk: int | Sequence[int] = 1) -> Tensor | list[Tensor]:
    """Return the share of samples whose label is among the `topk` largest logits, one for each number."""
    counts = [topk] if isinstance(topk, int) else list(topk)
    best = torch.topk(logits, max(counts), dim=-1).indices
    hits = best == target.long().unsqueeze(-1)
    shares = [hits[..., :count].any(-1).float().mean() for count in counts]
    return shares[0] if isinstance(topk, int) else shares
