"""Who writes into a folder of checkpoints: one process at a time, and no two that are alive.

While a save is under way the folder has a link ``.lock``, whose target names the process: links are made in one call
together with what they say. It is removed when the save ends; what a killed process has left is taken over. A manifest
names the process that saved, and its run: a step that has loaded a checkpoint goes on with its run.

Note [two writers]: another process on this host is refused while the one that saved last is alive, unless it is a child
of that one. Whether a process on another host is alive is unknown, so a new one goes on there, and the earlier one is
refused at its next save, when it finds checkpoints that it has not made. A process whose lock was taken over does not
complete its checkpoint.
"""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from halfstep.errors import CheckpointError
from halfstep.meeting import facts_of

LOCK = ".lock"
TRIES = 8  # of taking a lock that others take over at the same time
HELD: set[str] = set()  # the locks that this process has
REMEDY = "give each run a folder of its own, or end the other one first"


def this_process() -> str:
    """Return "HOST:PID:START": what tells this process from all others."""
    return f"{socket.gethostname()}:{os.getpid()}:{facts_of(os.getpid())[1]}"


def in_words(process: str) -> str:
    """Return a name that `this_process` returned for a message."""
    host, pid, _ = (f"{process}::").split(":", 2)
    return f"process {pid or '?'} on {host or '?'}"


def is_alive(process: str) -> bool:
    """Return whether a process on this host, other than this one, is alive; False for those on other hosts."""
    host, pid, start = (f"{process}::").split(":")[:3]
    if host != socket.gethostname() or not pid.isdecimal() or process == this_process() or os.name != "posix":
        return False
    if start:
        return facts_of(int(pid))[1] == start
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is there, and another user's
        return True
    return True


def has_started_this(process: str) -> bool:
    """Return whether a process on this host is above this one: one that waits for it."""
    above, known = os.getppid(), {0}
    while above not in known:
        if process.split(":")[1:2] == [str(above)]:
            return True
        known.add(above)
        above = facts_of(above)[0]
    return False


class Lock(AbstractContextManager["Lock"]):
    """The lock of one save on the folder `root`; a file system without links has none."""

    def __init__(self, root: Path) -> None:
        self.root, self._path = root, root / LOCK
        self.token = uuid4().hex[:8]  # two steps of one process
        self._mine = f"{this_process()}:{self.token}"

    def take(self) -> None:
        """Take the lock; refuse to while a process that is alive saves here."""
        for _ in range(TRIES):
            try:
                self._path.symlink_to(self._mine)
            except FileExistsError:
                self.check()
                with suppress(OSError):
                    self._path.unlink()
            except OSError:  # no links, or no folder that can be written to, as the next call says
                return
            else:
                HELD.add(self._mine)
                return

    def check(self) -> None:
        """Refuse a lock that another save has, unless its process is known to have ended."""
        try:
            owner = os.readlink(self._path)
        except OSError:
            return
        process = owner.rpartition(":")[0]
        if owner != self._mine and (owner in HELD or is_alive(process) or self._mine in HELD):
            raise CheckpointError(
                f"another save into {self.root} is under way, by {in_words(process)}: two writers would lose each "
                f"other's checkpoints; {REMEDY}"
            )

    def release(self) -> None:
        """Give the lock back; without effect if this save does not have it."""
        with suppress(OSError):
            if self._mine in HELD and os.readlink(self._path) == self._mine:
                self._path.unlink()
        HELD.discard(self._mine)

    def __exit__(self, *_: Any) -> None:
        self.release()
