"""What processes tell each other around a checkpoint: through the store of the process group, without a collective.

A collective that one rank does not reach hangs all others. Here a rank that waits names the ranks that have not come.
The connection to the store is its own, so that a wait in a thread blocks no other use of the store.

Note [ended]: each rank announces its process when its first training step is built. Ranks on the same machine read in
/proc whether it still runs. A rank that has not announced itself, or is on another machine, is waited for until the
time is over; launchers such as torchrun end the other ranks sooner.
"""

import logging
import os
import pickle
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from halfstep.errors import CheckpointError
from halfstep.torch_private.distributed import default_store

LOG = logging.getLogger("halfstep")
NAMED_AFTER = 60.0  # seconds of waiting until the ranks that have not come are named
WRITE_TIME = 3600.0  # seconds that others may take to write a checkpoint
NAP = 0.25  # seconds between two looks at the store, at most; signals are handled then
LEAVE = 10.0  # seconds until the process that has the store goes on although others have not read its last word
PROC = Path("/proc")


def processes() -> tuple[int, int]:
    """Return this process's rank and the number of processes of the default group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def store_under(prefix: str) -> Any:
    """Return a connection to the store of the default group, for keys under `prefix`."""
    from torch.distributed.distributed_c10d import PrefixStore

    store = default_store()
    under: Any = PrefixStore(f"halfstep/{prefix}", store)
    copy = under.clone()
    copy.set_timeout(store.timeout)
    return copy


def announce() -> None:
    """Tell the other ranks which process this is: note [ended]."""
    fake = dist.is_initialized() and dist.get_backend() == "fake"  # whose other ranks do not exist
    if processes()[1] > 1 and not fake:
        told = _machine(), os.getpid(), facts_of(os.getpid())[1]
        store_under("processes").set(str(processes()[0]), pickle.dumps(told))


def _machine() -> str:
    """Return a name of this machine and its namespace of process numbers; "" where there is no /proc."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii") + os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def facts_of(process: int) -> tuple[int, str]:
    """Return the parent of a process here and when it began, in clock ticks; (0, "") once it has ended, or unknown."""
    try:
        text = (PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0, ""
    state, parent, *more = text.rpartition(")")[2].split()
    return (0, "") if state in "ZX" else (int(parent), more[17])  # fields 4 and 22: numbers of processes are used again


class Meeting:
    """An exchange of values between all ranks: meeting `number`, the same on all of them, of the call `what`."""

    def __init__(self, what: str, number: int) -> None:
        self.rank, self.size = processes()
        self._what, self._rounds = what, 0
        self._store: Any = None  # a process alone needs none
        if self.size > 1:
            self._store = store_under(f"{what}/{number}")
            self._limit = float(self._store.timeout.total_seconds())

    def gather(self, value: Any, *, limit: float | None = None) -> list[Any]:
        """Give `value` to rank 0, which waits up to `limit` seconds and returns all values; others return []."""
        if self.size == 1:
            return [value]
        self._rounds += 1
        if self.rank:
            self._store.set(f"{self._rounds}/{self.rank}", pickle.dumps(value))
            return []
        keys = {rank: f"{self._rounds}/{rank}" for rank in range(1, self.size)}
        self._wait(keys, limit)
        values = [value, *(pickle.loads(self._store.get(key)) for key in keys.values())]
        for key in keys.values():
            self._store.delete_key(key)
        return values

    def publish(self, value: Any, *, limit: float | None = None, last: bool = False) -> Any:
        """Return the value that rank 0 gives.

        `last`: the program may end next: rank 0, whose process may have the store, then waits until the other ranks
        have read the value, or have ended, or for `LEAVE`.
        """
        if self.size == 1:
            return value
        self._rounds += 1
        key = f"{self._rounds}/0"
        if self.rank:
            self._wait({0: key}, limit)
            value = pickle.loads(self._store.get(key))
            if last:
                self._store.set(f"{self._rounds}/{self.rank}", b"")
            return value
        self._store.set(key, pickle.dumps(value))
        if last:
            with suppress(CheckpointError):
                self._wait({rank: f"{self._rounds}/{rank}" for rank in range(1, self.size)}, LEAVE)
        return value

    def _missing(self, keys: dict[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _wait(self, keys: dict[int, str], limit: float | None) -> None:
        """Wait for the keys of some ranks, in naps, between which signals are handled."""
        limit = self._limit if limit is None else limit
        began, named, looked = time.monotonic(), False, 0.0
        try:
            while not self._store.check([*keys.values()]):
                waited = time.monotonic() - began
                if waited > limit:
                    raise CheckpointError(
                        f"{self._what} has waited {timedelta(seconds=round(waited))} for ranks {self._missing(keys)} "
                        "to call it too; every rank calls it at the same place of its loop, not rank 0 alone"
                    )
                if waited > NAMED_AFTER and not named:
                    named = True
                    LOG.warning(
                        "%s waits for ranks %s: every rank calls it, not rank 0 alone (rank %d waits up to %d s)",
                        self._what, self._missing(keys), self.rank, limit,
                    )  # fmt: skip
                if waited > looked + 1:
                    looked = waited
                    self._refuse_ended(keys)
                time.sleep(min(NAP, 0.001 + waited / 16))
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._what}: rank {self.rank} has lost the store of the process group, which rank 0 has as a rule: "
                "its process has ended; look there for the first error, and start the run again"
            ) from error

    def _refuse_ended(self, keys: dict[int, str]) -> None:
        """Raise if the process of a rank that is missing has ended: note [ended]."""
        store = store_under("processes")
        for rank in self._missing(keys):
            if store.check([str(rank)]):
                machine, process, start = pickle.loads(store.get(str(rank)))
                ended = machine == _machine() != "" and facts_of(process)[1] != start
                if ended and rank in self._missing(keys):  # else it has come and ended since
                    raise CheckpointError(
                        f"{self._what}: rank {rank} will not come: its process {process} on this machine has ended; "
                        "look there for the first error, and start the run again"
                    )
