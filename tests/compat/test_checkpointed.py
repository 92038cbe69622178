"""A checkpoint called by hand in a region of a front-end changes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.compat import torch_amp
from halfstep.compat.megengine import amp as megengine_amp
from halfstep.compat.mindspore import amp as mindspore_amp
from halfstep.compat.torch_amp.cpu import autocast as cpu_autocast
from tests.cast.checkpointed import FUNCTIONS, Function

REGIONS: dict[str, Callable[[], Any]] = {
    "torch_amp fp16": lambda: torch_amp.autocast("cpu", torch.float16),
    "torch_amp bf16": lambda: torch_amp.autocast("cpu", torch.bfloat16),
    "torch_amp.cpu": cpu_autocast,
    "megengine fp16": megengine_amp.autocast,
    "megengine bf16": lambda: megengine_amp.autocast(low_prec_dtype="bfloat16"),
}


def gradients(function: Function, region: Callable[[], Any], reentrant: bool | None) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region():
        y = function(x, w) if reentrant is None else checkpoint(function, x, w, use_reentrant=reentrant)
    y.float().square().mean().backward()
    assert x.grad is not None and w.grad is not None
    return x.grad, w.grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", REGIONS)
def test_regions_by_hand(name: str, reentrant: bool) -> None:
    for called, function in FUNCTIONS.items():
        plain, again = (gradients(function, REGIONS[name], how) for how in (None, reentrant))
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), called


class Checkpointed(nn.Module):
    """A weight, and operators on it in a checkpoint."""

    def __init__(self, function: Function, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function, self.reentrant = function, reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.function(x, self.weight)
        return checkpoint(self.function, x, self.weight, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_of_mindspore(level: str, reentrant: bool) -> None:
    found = []
    for how in (None, reentrant):
        net = mindspore_amp.auto_mixed_precision(Checkpointed(FUNCTIONS["softmax"], how), level)
        x = torch.ones(4, 4, requires_grad=True)
        net(x).float().square().mean().backward()
        gradient = next(net.parameters()).grad
        assert gradient is not None
        found.append(gradient)
    assert torch.equal(*found)
