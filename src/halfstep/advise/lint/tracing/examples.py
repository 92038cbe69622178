"""Examples: files with a task, each with one mistake or without it, for the traced rules' pages and tests."""

from __future__ import annotations

import textwrap

__all__ = ["example"]

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

import halfstep as hs
{before}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, x):
{forward}


def task():
    return hs.Task(
        name="example",
        model={model},
        batches=lambda seed, step: (torch.linspace(-1, 1, 128).reshape(8, 16),),
        loss_fn={loss},
        optimizer=lambda model: {optimizer},
    )
"""


def example(
    forward: str = "return self.body(x)",
    *,
    init: str = "",
    before: str = "",
    model: str = "Model",
    loss: str = "lambda model, x: model(x).float().square().mean()",
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=1e-3)",
) -> str:
    """Return a file whose function `task` returns a task on a model with a layer ``body`` of 16 inputs and outputs.

    Args:
        forward: lines of the model's forward.
        init: more lines of its ``__init__``.
        before: lines before the model.
        model: what makes it.
        loss: the loss_fn.
        optimizer: what makes the optimizer of ``model``.
    """
    lines = ["self.body = nn.Linear(16, 16)", *textwrap.dedent(init).strip().splitlines()]
    made = FILE.format(
        before="\n" + textwrap.dedent(before).strip() + "\n" if before else "",
        init=textwrap.indent("\n".join(lines), " " * 8),
        forward=textwrap.indent(textwrap.dedent(forward).strip(), " " * 8),
        model=model,
        loss=loss,
        optimizer=optimizer,
    )
    return made if "F." in made else made.replace("import torch.nn.functional as F\n", "")
