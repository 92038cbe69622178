"""Small parameters, their gradients and the optimizers that step them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.weights import WeightStore

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam-loop": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
}

EVERY: dict[str, Make] = {
    **OPTIMIZERS,
    "sgd-loop": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
}
"""Every optimizer of torch that takes dense gradients of any shape and needs no closure."""


def shapes() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in ((4, 3), (4,), (2, 2, 2), ())]


def gradients(parameters: Iterable[nn.Parameter], step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7 + step)
    for p in parameters:
        value = torch.randn(p.shape, generator=generator).to(dtype)
        p.grad = value.to(p.dtype)


def buffers(store: WeightStore) -> list[Tensor]:
    """Return the fp32 gradients that are kept from step to step."""
    return [buffer for attachment in store.attached.values() for buffer in attachment.buffers.values()]
