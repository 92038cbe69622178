"""Exchange: what ranks post for each other about a bad step, in the key-value store of their process group.

Every rank posts something about a topic (a step and a question), and collects for a bounded time what others have.

Note [no collective]: a collective waits for every rank of its group, and a rank that has finished, has raised or is
dead never comes; it also has a place in the order of all other collectives. The store of `init_process_group` has
neither: a key is written at once, and reading polls until a deadline. So an exchange cannot hang, and cannot shift the
collectives of the training. (If the process that hosts the store is dead, reading raises at once; if it is stopped, it
stops its readers, as it stops collectives.) Ranks that missed a deadline are waited for a fiftieth of the time, until
they have posted something about the topic they missed. The traffic of a rank does not grow with the number of ranks: a
counter, one bit in a counter for every 62 ranks, and for ranks with something to report a numbered place in a short
list.

Note [agreement]: only `agree` decides something that ranks then do together. The decision is one key, written once by
an atomic operation, so all ranks that read it read the same: "yes" if the last rank came in time, "no" by the first
rank that could not, or would not wait longer.
"""

import hashlib
import time
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.meeting import processes
from halfstep.torch_private.compiler import original_of
from halfstep.torch_private.distributed import default_store

BITS = 62  # ranks in one counter of the store, which is a signed 64-bit integer
MOST_VALUES = 16  # values read of one topic, the first that were posted
KEPT = 16  # topics whose keys stay in the store
LESS = 50  # ranks that were missing before are waited for this much less
FIRST_PAUSE = 0.0005  # seconds between the first two looks at the store
LONGEST_PAUSE = 0.02  # seconds between two of them; for more than 2000 ranks longer in proportion


class Exchange:
    """The ranks that make a step together, by their global numbers; `me` is that of this one."""

    def __init__(self, store: Any, ranks: tuple[int, ...], me: int) -> None:
        self.ranks, self.me = ranks, me
        self._index = ranks.index(me)
        self._store = store
        self._gone: dict[int, str] = {}  # index of a rank -> the last topic it has posted nothing about
        self._topics: deque[str] = deque()

    def post(self, topic: str, value: bytes | None = None) -> None:
        """Post that this rank has come to `topic`, and `value` if it is not None. Waits for none of them."""
        store = self._store
        if value is not None:
            store.set(f"{topic}/value/{self.me}", value)
            place = store.add(f"{topic}/values", 1)
            if place <= MOST_VALUES:
                store.set(f"{topic}/place/{place}", str(self.me))
        store.add(f"{topic}/bits/{self._index // BITS}", 1 << (self._index % BITS))
        store.add(f"{topic}/count", 1)
        self._note(topic)

    def collect(
        self, topic: str, patience: float, *, one: bool = False, at_update: bool = True
    ) -> tuple[dict[int, bytes], tuple[int, ...]]:
        """Return rank -> what it reported about `topic`, and the ranks that have posted nothing; this one has.

        Waits `patience` seconds for ranks that have posted nothing; with `one` for the first value only. A rank that
        does not come is waited for less the next time if it should have come: `at_update`.
        """
        store, everyone = self._store, len(self.ranks)
        gone = len(self._still_gone())
        began = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            count = store.add(f"{topic}/count", 0)
            if one and (found := self._values(topic)):
                return found, ()
            waited = time.monotonic() - began
            if count >= everyone or waited >= (patience / LESS if count >= everyone - gone else patience):
                break
            pause = self._wait(pause)
        missing = [] if count >= everyone else self._missing(topic)
        if at_update:
            self._gone = dict.fromkeys(missing, topic)
        return self._values(topic), tuple(self.ranks[index] for index in missing)

    def agree(self, topic: str, *, ok: bool, patience: float) -> bool:
        """Return whether all ranks are here within `patience` seconds and have `ok`, each of them; note [agreement]."""
        store, decision = self._store, f"{topic}/decision"
        self._note(topic)
        if not ok or self._still_gone():  # one that was missing does not stop the others for long
            store.compare_set(decision, "", "no")
        elif store.add(f"{topic}/count", 1) == len(self.ranks):
            store.compare_set(decision, "", "yes")
        end = time.monotonic() + patience
        pause = FIRST_PAUSE
        while not store.check([decision]):
            if time.monotonic() >= end:
                store.compare_set(decision, "", "no")
            pause = self._wait(pause)
        return bytes(store.get(decision)) == b"yes"

    def _wait(self, pause: float) -> float:
        time.sleep(pause)
        return min(2 * pause, LONGEST_PAUSE * max(1.0, len(self.ranks) / 2000))

    def _still_gone(self) -> list[int]:
        """Return the indices of ranks that have posted nothing, until now, about the topic they missed."""
        if self._gone:
            missed = next(iter(self._gone.values()))
            self._gone = dict.fromkeys(self._missing(missed), missed)
        return list(self._gone)

    def _missing(self, topic: str) -> list[int]:
        found = []
        for first in range(0, len(self.ranks), BITS):
            bits = self._store.add(f"{topic}/bits/{first // BITS}", 0)
            found += [i for i in range(first, min(first + BITS, len(self.ranks))) if not bits >> (i - first) & 1]
        return found

    def _values(self, topic: str) -> dict[int, bytes]:
        store, found = self._store, {}
        for place in range(1, 1 + min(store.add(f"{topic}/values", 0), MOST_VALUES)):
            if store.check([f"{topic}/place/{place}"]):  # else it is about to be written, or its rank is dead
                rank = int(store.get(f"{topic}/place/{place}"))
                found[rank] = bytes(store.get(f"{topic}/value/{rank}"))
        return found

    def _note(self, topic: str) -> None:
        """Note a new topic, and remove the keys of an old one: each rank its own, the first rank the shared ones."""
        self._topics.append(topic)
        if len(self._topics) <= KEPT:
            return
        topic = self._topics.popleft()
        keys = [f"value/{self.me}"]
        if self._index == 0:
            keys += ["decision", "values", "count", *(f"place/{place}" for place in range(1, 1 + MOST_VALUES))]
            keys += [f"bits/{word}" for word in range(-(-len(self.ranks) // BITS))]
        for key in keys:
            self._store.delete_key(f"{topic}/{key}")


def exchange_of(wrapped: nn.Module, model: nn.Module, name: str) -> Exchange | None:
    """Return the exchange of the ranks that see the same verdict on each update of a model; None without others.

    They are the ranks of DistributedDataParallel, or of the device mesh of sharded parameters. Where several of them
    are nested or cross each other, all ranks of the program are taken.
    `wrapped` is the model as the user calls it; `name` that of its black box, equal on all ranks, used for no other.
    """
    meshes: set[Any] = {getattr(parameter, "device_mesh", None) for parameter in model.parameters()}
    found = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes - {None}}
    while isinstance(inner := original_of(wrapped), nn.Module):  # compiled
        wrapped = inner
    if isinstance(wrapped, DistributedDataParallel):
        found.add(tuple(sorted(torch.distributed.get_process_group_ranks(wrapped.process_group))))
    ranks = min(found, default=()) if len(found) < 2 else tuple(range(processes()[1]))
    if len(ranks) < 2:
        return None
    names = [name for name, _ in model.named_parameters()]
    # ranks that have made other models before do not take them for each other
    key = hashlib.sha256(repr((name, ranks, names)).encode()).hexdigest()[:16]
    c10d: Any = torch.distributed  # some builds have no stores
    return Exchange(c10d.PrefixStore(f"halfstep/{key}", default_store()), ranks, processes()[0])
