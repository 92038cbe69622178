"""The cases of `benchmarks.run`: the losses of a candidate with and without logits agree."""

from __future__ import annotations

import torch

from benchmarks.cases import cross_entropy, linear_cross_entropy
from halfstep.tasks.gpt import GPT


def test_the_loss_without_logits_is_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=50, width=16, layers=1, heads=2, length=8)
    tokens = torch.randint(0, model.head.out_features, (2, 9))
    x, y = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(linear_cross_entropy(model, x, y), cross_entropy(model, x, y))
