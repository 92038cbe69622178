"""Pain 40: parameters of two formats under `fully_shard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore

import halfstep as hs
from tests.pains.libraries import HALFSTEP
from tests.pains.pain import pain


@contextmanager
def one_rank() -> Iterator[None]:
    """Start a process group of one rank."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sharded(amp: Any, model: nn.Module) -> None:
    """Shard a model with bf16 linear layers and fp32 norms, as one unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a mesh of CPUs
        if amp is HALFSTEP:
            hs.shard(model, hs.Policy.of("O2", dtype="bf16"), units=[])
            return
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                layer.to(torch.bfloat16)
        torch.distributed.fsdp.fully_shard(model)


@pain(40, torch_fails_with=AssertionError, saying="uniform original parameter dtype")
def test_low_weights_and_fp32_norms_are_sharded_together(amp: Any) -> None:
    with one_rank():
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        sharded(amp, model)
        model(torch.randn(2, 4).to(model[0].weight.dtype)).float().sum().backward()
        assert model[0].weight.dtype is torch.bfloat16 and model[1].weight.dtype is torch.float32
        assert all(parameter.grad is not None for parameter in model.parameters())
