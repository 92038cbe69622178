"""Ways: how devices share a training step: alone, under DistributedDataParallel, under `hs.shard`. Used by a trace.

In: the model that is traced. Out: the model of the first device, the memory that the way adds, and what is sent.

Note [ddp]: DistributedDataParallel's reducer is C++ and needs numbers, so it is not traced: its buckets are allocated
beside the gradients, as many bytes as these have, and its messages are computed. `fully_shard` is Python, and is traced
itself (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.ledger import Ledger
from halfstep.advise.plan.memory import PlanError
from halfstep.advise.plan.ranks import fake_ranks
from halfstep.advise.plan.traffic import Sent, ddp_bytes, sent
from halfstep.arguments import COUNT, check, one_of

__all__ = ["WAYS", "Way", "check_way", "way_of"]

WAYS = ("none", "ddp", "fsdp2")


class Way:
    """One device alone; the others add to it.

    Args:
        devices: how many.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices

    in_parts = False
    """Whether no device ever holds the whole model: it is made on the meta device, and gets memory for its part."""

    def model(self, model: nn.Module, policy: hs.Policy) -> nn.Module:
        """Return the model that this device trains, before it is prepared."""
        return model

    def prepare(self, model: nn.Module, optimizer: Optimizer, policy: hs.Policy) -> None:
        """Prepare the model, where that comes before the training step."""

    def ready(self, model: nn.Module, policy: hs.Policy, ledger: Ledger, device: str) -> None:
        """Allocate what is there from the first step on; `model` is prepared, and `policy` resolved."""

    def sums(self, ledger: Ledger) -> None:
        """Note what averages take between backward pass and update."""

    def sent(self, seen: Iterable[tuple[str, int]]) -> tuple[Sent, ...]:
        """Return the collectives of a step in which those in `seen` were dispatched."""
        return sent(seen, self.devices)


class Ddp(Way):
    """DistributedDataParallel with torch's defaults around a prepared model: buckets beside the gradients."""

    def prepare(self, model: nn.Module, optimizer: Optimizer, policy: hs.Policy) -> None:
        """Prepare the model, before it is wrapped."""
        hs.prepare(model, optimizer, policy=policy)

    def ready(self, model: nn.Module, policy: hs.Policy, ledger: Ledger, device: str) -> None:
        """Allocate the buckets."""
        self._bytes = ddp_bytes(model, policy)
        self._buckets: list[Tensor] = []
        for dtype, size in self._bytes.buckets.items():
            bucket = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
            block = ledger.of(bucket)
            assert block is not None  # the tracer has noted it
            block.part, block.module = "communication", "(DistributedDataParallel)"
            self._buckets.append(bucket)

    def sums(self, ledger: Ledger) -> None:
        """Note what is made to send gradients in another format."""
        if self._bytes.sending:
            ledger.passing(self._bytes.sending, self._bytes.format, "(DistributedDataParallel)", "average", "update")

    def sent(self, seen: Iterable[tuple[str, int]]) -> tuple[Sent, ...]:
        """Return DDP's messages."""
        return sent([*seen, *self._bytes.seen], self.devices)


class Sharded(Way):
    """`hs.shard` over a group that passes for many ranks.

    Args:
        devices: how many.
        mesh: of them.
        units: as `hs.shard` takes them.
    """

    in_parts = True

    def __init__(self, devices: int, mesh: Any, units: Sequence[str] | None) -> None:
        super().__init__(devices)
        self._mesh, self._units = mesh, units

    def model(self, model: nn.Module, policy: hs.Policy) -> nn.Module:
        """Shard the model, and prepare it."""
        return hs.shard(model, policy, units=self._units, mesh=self._mesh)


def check_way(shard: str, devices: int, units: Sequence[str] | None) -> None:
    """Make sure that there is a way called `shard` for that many devices.

    Raises:
        PlanError: there is not.
    """
    check("hs.plan", PlanError, shard=(shard, one_of(*WAYS)), devices=(devices, COUNT))
    if devices == 1 and shard != "none":
        raise PlanError(f"shard={shard!r} needs devices=2 or more, and devices is 1")
    if devices > 1 and shard == "none":
        raise PlanError(f"devices={devices} need a way to share the work: shard='ddp' or shard='fsdp2'")
    if units is not None and shard != "fsdp2":
        raise PlanError("units= name what hs.shard gathers together; they need shard='fsdp2'")


@contextmanager
def way_of(shard: str, devices: int, device: str, units: Sequence[str] | None = None) -> Iterator[Way]:
    """Give the way called `shard`, which `check_way` has found.

    Raises:
        PlanError: fsdp2 cannot have a process group of its own.
    """
    if shard == "fsdp2":
        with fake_ranks(devices, device) as mesh:
            yield Sharded(devices, mesh, units)
    else:
        yield Ddp(devices) if shard == "ddp" else Way(devices)
