"""What processes tell each other around a checkpoint: through the store of the process group, without a collective.

A collective that one rank does not reach hangs all others. Here a rank that waits names, after a minute, the ranks that
have not come, and raises an error when the time is over. The connection to the store is its own, so that a wait in a
thread blocks no other use of the store.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from halfstep.errors import CheckpointError

__all__ = ["Alone", "Meeting", "meeting", "processes", "store_under"]

LOG = logging.getLogger("halfstep")
NAMED_AFTER = 60.0  # seconds of waiting until the ranks that have not come are named
WRITE_TIME = 3600.0  # seconds that others may take to write a checkpoint


def processes() -> tuple[int, int]:
    """Return this process's rank and the number of processes of the default group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def store_under(prefix: str) -> Any:
    """Return a connection to the store of the default group, for keys under `prefix`."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()  # torch's stubs lack some of its methods
    under: Any = PrefixStore(f"halfstep/{prefix}", store)
    copy = under.clone()
    copy.set_timeout(store.timeout)
    return copy


class Alone:
    """The meeting of one process."""

    rank, size = 0, 1

    def gather(self, value: Any, *, limit: float | None = None) -> list[Any]:
        """Return the values of all ranks."""
        return [value]

    def publish(self, value: Any, *, limit: float | None = None) -> Any:
        """Return the value of rank 0."""
        return value


class Meeting:
    """An exchange of values between all ranks of the default group.

    Args:
        what: the call that meets, for messages: "hs.save".
        number: how many meetings for this call there were before; the same on all ranks.
    """

    def __init__(self, what: str, number: int) -> None:
        self.rank, self.size = processes()
        self._what, self._rounds = what, 0
        self._store = store_under(f"{what}/{number}")
        self._limit = float(self._store.timeout.total_seconds())

    def gather(self, value: Any, *, limit: float | None = None) -> list[Any]:
        """Give `value` to rank 0; return the values of all ranks there, and [] elsewhere, without waiting.

        Raises:
            CheckpointError: on rank 0: other ranks have not come within `limit` seconds (default: the timeout of the
                process group).
        """
        self._rounds += 1
        if self.rank:
            self._store.set(f"{self._rounds}/{self.rank}", pickle.dumps(value))
            return []
        keys = {rank: f"{self._rounds}/{rank}" for rank in range(1, self.size)}
        self._wait(list(keys.values()), limit, lambda: [r for r, key in keys.items() if not self._store.check([key])])
        values = [value, *(pickle.loads(self._store.get(key)) for key in keys.values())]
        for key in keys.values():
            self._store.delete_key(key)
        return values

    def publish(self, value: Any, *, limit: float | None = None) -> Any:
        """Return the value that rank 0 gives.

        Raises:
            CheckpointError: on other ranks: rank 0 has not come within `limit` seconds.
        """
        self._rounds += 1
        key = f"{self._rounds}/0"
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value))
            return value
        self._wait([key], limit, lambda: [0])
        return pickle.loads(self._store.get(key))

    def _wait(self, keys: list[str], limit: float | None, missing: Callable[[], list[int]]) -> None:
        """Wait for `keys`, in naps of at most a second, between which signals are handled."""
        limit = self._limit if limit is None else limit
        began, named = time.monotonic(), False
        while not self._store.check(keys):
            waited = time.monotonic() - began
            if waited > limit:
                raise CheckpointError(
                    f"{self._what} has waited {timedelta(seconds=round(waited))} for ranks {missing()} to call it too; "
                    "every rank calls it at the same place of its loop, not rank 0 alone"
                )
            if waited > NAMED_AFTER and not named:
                named = True
                LOG.warning(
                    "%s waits for ranks %s: every rank calls it, not rank 0 alone (rank %d waits up to %d s)",
                    self._what, missing(), self.rank, limit,
                )  # fmt: skip
            time.sleep(min(1.0, 0.001 + waited / 16))


def meeting(what: str, number: int) -> Alone | Meeting:
    """Return a meeting of all processes there are."""
    return Alone() if processes()[1] == 1 else Meeting(what, number)
