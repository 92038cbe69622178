"""Run a function in the processes of one gloo group, or a script in one, as forks of a server: no import takes time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from halfstep.errors import HalfstepError

__all__ = ["as_script", "error_of", "in_processes", "in_two_processes", "run_all", "started"]

PATIENCE = 120.0  # seconds
LOADED = (
    *("pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("halfstep.binding.shard", "halfstep.checkpoints", "halfstep.lens", "halfstep.step", "tests.two_processes"),
)
"""What the server of processes imports once: each rank begins as a fork of it, in which no import takes seconds."""


def started(work: Callable[..., Any], args: tuple[Any, ...] = (), *, count: int = 2) -> ProcessContext:
    """Start ``work(rank, *args)`` in each of `count` processes with this one's environment variables."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_forkserver_preload(list(LOADED))
    context: ProcessContext | None
    context = start_processes(_placed, (dict(os.environ), work, args), count, join=False, start_method=method)
    assert context is not None
    return context


def run_all(work: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 2, *, join: bool = True) -> None:
    """Run ``work(rank, *args)`` in each of `nprocs` processes to its end; raise what one of them raises.

    It can stand for `torch.multiprocessing.spawn` in a script, whose argument `join` it takes.
    """
    assert join
    context = started(work, args, count=nprocs)
    while not context.join():
        pass


def as_script(words: Sequence[str | Path], folder: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what ``python WORDS...`` leaves, run in `folder` by a fork of the server: the imports above are there.

    Args:
        words: a file, or "-m" and a module, and its arguments.
        folder: where it runs.
        environment: further environment variables.
    """
    command = [str(word) for word in words]
    with TemporaryDirectory() as place:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            context = started(_script, (command, str(folder), place), count=1)
        (process,) = context.processes
        process.join(5 * PATIENCE)
        process.kill()
        process.join()
        status = process.exitcode
        out, err = (Path(place, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(command, -1 if status is None else status, out, err)


def _script(rank: int, words: list[str], folder: str, place: str) -> None:
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(place, name), os.O_WRONLY | os.O_CREAT), number)
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    sys.path[:0] = ["" if module else str(Path(words[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    status: object = 0
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1 if status else 0)


def _placed(rank: int, environment: dict[str, str], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()  # a fork has those of its server
    os.environ.update(environment)
    work(rank, *args)


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
    context = started(_process, (work, str(folder), count, patience, args), count=count)
    end = time.monotonic() + patience
    while not context.join(timeout=0.5):
        if time.monotonic() > end:
            for process in context.processes:
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
