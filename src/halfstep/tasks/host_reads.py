"""Host reads: how often a step of each of torch's optimizers waits for the device while a loss scale is on.

Found by training, not by a list: each class of torch.optim takes a few steps of `hs.TrainStep` under ``mixed`` in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import halfstep as hs

STEPS = 3
WIDTH = 4
SCALE = 2.0**8  # small enough that no step overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReads:
    """What one optimizer costs in waiting."""

    optimizer: str  # its class and the options it was made with
    first: int = 0  # reads of a device value by the host in the first step
    later: int = 0  # the same in each later step; 0: the optimizer checks the flag on the device
    generic: str = ""  # why its update goes through torch's operators, "" if halfstep's own make it
    problem: str = ""  # why it cannot be stepped with a loss scale, "" if it can


def optimizer_classes() -> Iterator[type[Optimizer]]:
    """Yield the optimizers that torch.optim offers, by name."""
    for _, kind in sorted(vars(torch.optim).items(), key=lambda item: item[0].lower()):
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield kind


def host_reads(device: str, kind: type[Optimizer]) -> HostReads:
    """Step an optimizer of class `kind` on `device` and count its reads."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}  # usual, and it changes the answer
    name = ", ".join([kind.__name__, *(f"{key}={value}" for key, value in options.items())])
    sparse = "Sparse" in kind.__name__
    model: nn.Module = nn.Embedding(WIDTH, WIDTH, sparse=True) if sparse else nn.Linear(WIDTH, WIDTH, bias=False)
    batch = torch.arange(WIDTH) if sparse else torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
    policy = hs.Policy.of("mixed", dtype="fp16", scale=SCALE)
    counts = []
    try:
        optimizer: Any = kind
        model = model.to(device)
        made = optimizer(model.parameters(), **options)
        step = hs.TrainStep(model, made, lambda model, x: model(x).float().square().mean(), policy=policy)
        for _ in range(STEPS):
            before = step.host_reads + step.scaler.host_reads
            step(batch.to(device))
            counts.append(step.host_reads + step.scaler.host_reads - before)
    except Exception as error:  # the optimizer's objection is the result
        return HostReads(optimizer=name, problem=_problem(error))
    return HostReads(optimizer=name, first=counts[0], later=max(counts[1:]), generic=step.generic)


def _problem(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "closure" in text:
        return "it needs a closure, whose backward runs inside the optimizer"
    return f"{type(error).__name__}: {text}"
