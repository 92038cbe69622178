"""Ranks without processes: one process that passes for rank 0 of many, so that `fully_shard` itself can be traced.

In: a number of devices. Out: a mesh over which `hs.shard` works. torch's group "fake" sends nothing: a collective
returns at once, and its output keeps what it had. Under fake tensors that is all that a trace needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from halfstep.advise.plan.memory import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fake_ranks"]


@contextmanager
def fake_ranks(devices: int, device_type: str) -> Iterator[DeviceMesh]:
    """Pass for rank 0 of `devices` in this process, and give the mesh of all; rank 0 has the largest parts.

    Args:
        devices: how many.
        device_type: of the mesh.

    Raises:
        PlanError: a process group is there already, or this torch has no "fake" one.
    """
    if not dist.is_available():
        raise PlanError("this torch was built without torch.distributed; plan for one device")
    if dist.is_initialized():
        raise PlanError(
            "a plan of a sharded model needs a process group of its own, and this process has one; call hs.plan "
            "before torch.distributed.init_process_group, or in another process"
        )
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise PlanError(f"this torch cannot pass for several ranks ({error}); plan for one device") from error
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield init_device_mesh(device_type, (devices,))
    finally:
        dist.destroy_process_group()
