"""Small training loops that the tests of the scaler share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

INF = float("inf")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def parameters(count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2).to(dtype)) for _ in range(count)]


def backward(scaler: Any, params: list[torch.nn.Parameter], *, bad: bool = False) -> None:
    """Fill gradients as a scaled loss does; an overflow is planted in the last parameter."""
    loss = sum(((p * p).sum() for p in params), torch.zeros(()))
    scaler.scale(loss).backward()
    if bad:
        grad = params[-1].grad
        assert grad is not None
        grad.view(-1)[0] = INF


def one_step(scaler: Any, optimizer: torch.optim.Optimizer, *, bad: bool = False) -> Any:
    optimizer.zero_grad()
    backward(scaler, optimizer.param_groups[0]["params"], bad=bad)
    result = scaler.step(optimizer)
    scaler.update()
    return result


class Reads(TorchDispatchMode):
    """Count operators that wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(expected: int) -> Iterator[None]:
    with Reads() as reads:
        yield
    assert reads.count == expected
