"""Optimizers under each preset: whether they train as in fp32, resume with the same bits, and skip a bad step whole.

    python -m benchmarks.optimizers --json benchmarks/results/optimizers.json [--only NAME]

Each cell runs a small language model (an embedding, two layers, a norm, a head) for `STEPS` updates in bf16.
*trains*: the mean loss of the last ten updates is at most `NEAR` times that of fp32, over what fp32
has gained. *resumes*: a new step that loads the state after half of the updates ends with the same bits. *skips*: an
update whose gradient is not finite changes no weight and no state. A library that is not installed is left out; the
result names the versions of those that were.
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import write
from halfstep.tasks import machine
from halfstep.trees import tensors

PRESETS = ("mixed", "O2", "pure", "lean")
STEPS = 60
NEAR = 0.1  # share of what fp32 has gained by which a final loss may be higher

Made = Callable[[nn.Module], Any]


def _of(kind: Callable[..., Optimizer], **options: Any) -> Made:
    return lambda model: kind(model.parameters(), **options)


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layer" in name]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def optimizers() -> Mapping[str, tuple[str, Made]]:
    """Return label -> (the library, what makes the optimizers of a model)."""
    own = torch.optim
    table: dict[str, tuple[str, Made]] = {
        "SGD": ("torch", _of(own.SGD, lr=0.3, momentum=0.9)),
        "Adam": ("torch", _of(own.Adam, lr=3e-3)),
        "AdamW": ("torch", _of(own.AdamW, lr=3e-3)),
        "NAdam": ("torch", _of(own.NAdam, lr=3e-3)),
        "RAdam": ("torch", _of(own.RAdam, lr=1e-2)),
        "Adamax": ("torch", _of(own.Adamax, lr=1e-2)),
        "Adagrad": ("torch", _of(own.Adagrad, lr=3e-2)),
        "Adadelta": ("torch", _of(own.Adadelta, lr=1.0)),
        "RMSprop": ("torch", _of(own.RMSprop, lr=1e-3)),
        "ASGD": ("torch", _of(own.ASGD, lr=0.3)),
        "Adafactor": ("torch", _of(own.Adafactor, lr=1e-2)),
        "Lion": ("halfstep", _of(hs.Lion, lr=3e-4)),
    }
    if hasattr(own, "Muon"):
        table["Muon and AdamW"] = ("torch", _muon)
    for label, library, module, name, options in (
        ("Schedule-Free AdamW", "schedulefree", "schedulefree", "AdamWScheduleFree", {"lr": 1e-2}),
        ("Prodigy", "prodigyopt", "prodigyopt", "Prodigy", {"lr": 1.0}),
        ("SOAP", "heavyball", "heavyball", "SOAP", {"lr": 3e-3}),
        ("GaLore AdamW", "galore-torch", "galore_torch", "GaLoreAdamW", {"lr": 3e-3}),
        ("AdamW, 8-bit states", "torchao", "torchao.optim", "AdamW8bit", {"lr": 3e-3}),
        ("AdamW, 4-bit states", "torchao", "torchao.optim", "AdamW4bit", {"lr": 3e-3}),
        ("AdamW, 8-bit states", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {"lr": 3e-3}),
    ):
        try:
            table[label if label not in table else f"{label} ({library})"] = (
                library,
                _of(_imported(module, name), **options),
            )
        except Exception as error:  # not installed, or not for this machine
            print(f"left out: {label} of {library}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return table


class Net(nn.Module):
    """A small language model, whose matrices in layers are a multiple of 64 wide, as 8-bit states need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h: Tensor = self.embedding(x)
        h = h + self.layers[1](F.gelu(self.layers[0](h)))
        out: Tensor = self.head(self.norm(h))
        return out


def batch(n: int) -> tuple[Tensor, Tensor]:
    """Return the n-th batch: the next token is a function of the one before, with noise."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(0, 64, (16, 32), generator=generator)
    y = (x * 5 + 3) % 64
    noise = torch.rand(y.shape, generator=generator) < 0.1
    return x, torch.where(noise, torch.randint(0, 64, y.shape, generator=generator), y)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def built(make: Made, preset: str) -> hs.TrainStep:
    """Return a new training step; all begin from the same weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    if callable(begin := getattr(optimizer, "train", None)):  # of Schedule-Free: weights as they are trained
        begin()
    policy = hs.Policy.of("O0") if preset == "O0" else hs.Policy.of(preset, dtype="bf16")
    return hs.TrainStep(model, optimizer, loss_fn, policy=policy, blackbox=False)


def train(step: hs.TrainStep, first: int, last: int) -> list[float]:
    """Train on some batches; return the losses."""
    return [step(*batch(n)).host().loss for n in range(first, last)]


def state(step: hs.TrainStep) -> list[Tensor]:
    """Return copies of weights and optimizer states."""
    values = [*step.model.state_dict().values(), *tensors(step.optimizer.state_dict())]
    return [(value.dequantize() if hasattr(value, "scale") else value).detach().clone() for value in values]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return len(some) == len(others) and all(bool((a == b).all()) for a, b in zip(some, others, strict=True))


def cell(make: Made, preset: str, wide: list[float]) -> dict[str, Any]:
    """Return what holds of one optimizer under one preset; `wide` are the losses of fp32."""
    step = built(make, preset)
    losses = train(step, 0, STEPS // 2)
    torch.save(step.state_dict(), file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    losses += train(step, STEPS // 2, STEPS)
    resumed = built(make, preset)
    resumed.load_state_dict(saved)
    train(resumed, STEPS // 2, STEPS)
    resumes = same([*step.model.state_dict().values()], [*resumed.model.state_dict().values()])
    end, fp32 = (sum(some[-10:]) / 10 for some in (losses, wide))
    before = state(step)
    hook = next(step.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    skipped = step(*batch(STEPS)).host().skipped
    hook.remove()
    return {
        "loss": end,
        "trains": end - fp32 <= NEAR * (wide[0] - fp32),
        "resumes": resumes,
        "skips": bool(skipped) and same(before, state(step)),
    }


def optimizers_table(report: dict[str, Any]) -> str:
    """Return a row for each optimizer: under which presets it trains, resumes and skips; else what it does."""
    words = ("trains", "resumes", "skips")
    rows = []
    for row in report["rows"]:
        cells = []
        for preset in PRESETS:
            found = row["cells"][preset]
            lacking = [word for word in words if not found.get(word)]
            refused = "refused" if "refused" in found else "fails"
            cells.append("all three" if not lacking else f"not: {', '.join(lacking)}" if "loss" in found else refused)
        rows.append([row["optimizer"], f"{row['library']} {row['version'].partition('+')[0]}", *cells])
    return table(["optimizer", "library", *(f"`{preset}`" for preset in PRESETS)], rows)


def main() -> None:
    """Run every cell and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for label, (library, make) in optimizers().items():
        if given.only not in label:
            continue
        wide = train(built(make, "O0"), 0, STEPS)
        cells: dict[str, Any] = {}
        for preset in PRESETS:
            try:
                cells[preset] = cell(make, preset, wide)
            except hs.HalfstepError as error:
                cells[preset] = {"refused": str(error)}
            except Exception as error:
                cells[preset] = {
                    "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                }
            print(label, preset, cells[preset], flush=True)
        rows.append(
            {
                "optimizer": label,
                "library": library,
                "version": version(library),
                "fp32": sum(wide[-10:]) / 10,
                "cells": cells,
            }
        )
    write(
        given.json,
        {
            "command": "python -m benchmarks.optimizers",
            "machine": machine(),
            "steps": STEPS,
            "near": NEAR,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
