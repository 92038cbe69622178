"""Run a function in the processes of one gloo group: for tests of what ranks do together."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from halfstep.errors import HalfstepError

__all__ = ["error_of", "in_processes", "in_two_processes"]

PATIENCE = 120.0  # seconds


def in_two_processes(work: Callable[..., Any], folder: str | Path, *args: Any) -> list[Any]:
    """Return what ``work(rank, *args)`` returns in each of two processes; see `in_processes`."""
    return in_processes(2, work, folder, *args)


def in_processes(
    count: int, work: Callable[..., Any], folder: str | Path, *args: Any, patience: float = PATIENCE
) -> list[Any]:
    """Return what ``work(rank, *args)`` returns in each of `count` processes.

    Args:
        count: how many.
        work: a function of a module, called with the default group initialised.
        folder: an empty one.
        args: what can be pickled; so must the results.
        patience: seconds after which ranks that have not come to an end are killed.

    Raises:
        TimeoutError: that has happened.
        ProcessRaisedException: `work` raised on a rank.
    """
    started = spawn(_process, (work, str(folder), count, patience, args), nprocs=count, join=False)
    assert started is not None
    end = time.monotonic() + patience
    while not started.join(timeout=0.5):
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"{work.__name__} hangs in {count} processes")
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(count)]


def _process(
    rank: int, work: Callable[..., Any], folder: str, count: int, patience: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", meeting, timedelta(seconds=patience), world_size=count, rank=rank)
    try:
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(work(rank, *args)))
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads abort some exits (torch 2.13), after the work is done
    except BaseException:
        dist.destroy_process_group()
        raise


def error_of(run: Callable[[], object]) -> str:
    """Return the error that `run` raises, as text that ranks can compare; "ran" if it raises none of halfstep's."""
    try:
        run()
    except HalfstepError as error:
        return f"{type(error).__name__}: {error}"
    return "ran"
