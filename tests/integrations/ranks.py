"""What torchrun tells a process, for libraries that start none of their own then."""

from __future__ import annotations

import os

__all__ = ["as_torchrun"]


def as_torchrun(rank: int, world_size: int = 2) -> None:
    """Set the environment of `rank` as torchrun does on one machine; the process group is there already."""
    here, ranks = str(rank), str(world_size)
    os.environ.update({"RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks})
    os.environ.update({"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
