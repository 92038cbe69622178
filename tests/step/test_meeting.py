"""Waits for other ranks around a checkpoint: bounded, and their errors name the rank. One process plays both ranks."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from halfstep import meeting
from halfstep.errors import CheckpointError
from halfstep.meeting import Meeting, announce, store_under

LIMIT = 500.0  # seconds of a clock that only naps move


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process the given one of two ranks."""
    if not hasattr(dist, "FileStore"):
        pytest.skip("this torch has no FileStore")
    store = dist.FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    now = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda seconds: None)
    monkeypatch.setattr(meeting, "time", clock)

    def rank(number: int) -> None:
        monkeypatch.setattr(meeting, "processes", lambda: (number, 2))

    return rank


def _announce_ended(rank: int) -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    store_under("processes").set(str(rank), pickle.dumps((meeting._machine(), process.pid, "1")))
    process.wait()
    return process.pid


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_rank_whose_process_has_ended_is_named_at_once(play: Any) -> None:
    play(1)
    process = _announce_ended(0)
    with pytest.raises(
        CheckpointError, match=rf"hs\.load: rank 0 will not come: its process {process} on this machine"
    ):
        Meeting("hs.load", 1).publish(None, limit=LIMIT)
    play(0)
    _announce_ended(1)
    with pytest.raises(CheckpointError, match=r"hs\.save: rank 1 will not come"):
        Meeting("hs.save", 2).gather("mine", limit=LIMIT)
    assert Meeting("hs.save", 3).publish("last", limit=LIMIT, last=True) == "last"  # it has done its part


def test_a_rank_that_runs_or_is_not_known_is_waited_for_and_named(play: Any) -> None:
    for known in (False, True):
        if known:
            play(0)
            announce()
            assert meeting.facts_of(os.getpid())[1] or not Path("/proc/self/stat").exists()
        play(1)
        with pytest.raises(CheckpointError, match=r"hs\.load has waited 0:08:2\d for ranks \[0\] to call it too"):
            Meeting("hs.load", 1 + known).publish(None, limit=LIMIT)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_what_a_rank_has_said_counts_after_it_has_ended(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(0)
    spoken = Meeting("hs.save", 1)
    play(1)
    _announce_ended(0)
    listening = Meeting("hs.save", 1)
    looked = meeting.facts_of

    def facts_of(process: int) -> tuple[int, str]:
        spoken._store.set("1/0", pickle.dumps("the plan"))  # while the other rank finds that it has ended
        return looked(process)

    monkeypatch.setattr(meeting, "facts_of", facts_of)
    assert listening.publish(None, limit=LIMIT) == "the plan"


def test_a_lost_store_is_an_error_in_words(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(1)
    waiting = Meeting("hs.save", 1)

    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(waiting, "_store", Lost())
    with pytest.raises(CheckpointError, match=r"hs\.save: rank 1 has lost the store of the process group"):
        waiting.publish(None)
