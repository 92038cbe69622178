"""Run a function in two processes of one gloo group: for tests of what ranks do together."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["in_two_processes"]


def in_two_processes(work: Callable[..., Any], folder: str | Path, *args: Any) -> list[Any]:
    """Return what ``work(rank, *args)`` returns in each process.

    Args:
        work: a function of a module, called with the default group initialised.
        folder: an empty one.
        args: what can be pickled; so must the results.
    """
    spawn(_process, (work, str(folder), args), nprocs=2)
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


def _process(rank: int, work: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=2)
    try:
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(work(rank, *args)))
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done
    except BaseException:
        dist.destroy_process_group()
        raise
