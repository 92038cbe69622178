"""The recorder of CUDA graphs, on an emulation of what torch keeps of a capture.

As CUDAGraph.cpp has it: up to torch 2.13 `capture_end` raises before it has restored anything; from 2.14 on it restores
its records first, and `reset` releases the pool.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfstep.kernels.triton import tables
from halfstep.step.graphs import CudaRecorder

DEFAULT = "the default stream"


class World:
    """What torch and the driver keep for captures.

    Attributes:
        current: the current stream.
        captures: the stream under capture; None: there is none.
        invalid: whether that capture has seen a forbidden operation.
        underway: the pools that the allocators record into.
        uses: how many graphs use each pool.
        begun: graphs whose capture has begun and not ended.
        draws_for_a_capture: what torch 2.11 keeps of a random generator.
    """

    def __init__(self) -> None:
        self.current: object = DEFAULT
        self.captures: object = None
        self.invalid = self.draws_for_a_capture = False
        self.underway: set[object] = set()
        self.uses: Counter[object] = Counter()
        self.begun: set[object] = set()

    def wait(self) -> None:
        """Wait for the device, which no capture allows."""
        if self.captures is not None:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def draw(self) -> None:
        assert self.draws_for_a_capture == (self.captures is not None), "Offset increment outside graph capture"

    def clean(self, graphs: int = 0) -> bool:
        """Return whether nothing is left but so many graphs."""
        self.draw()
        left = (self.captures, self.underway, self.begun, self.uses.total())
        return self.current == DEFAULT and left == (None, set(), set(), graphs)


@pytest.fixture(params=["2.11", "2.14"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(version: str, monkeypatch: pytest.MonkeyPatch) -> World:
    made, numbers, fixed = World(), count(), version == "2.14"

    class Graph:
        def __init__(self) -> None:
            self.pool: object = None
            self.ended = self.counted = False

        def capture_begin(self, pool: object = None, **named: Any) -> None:
            self.pool = next(numbers) if pool is None else pool
            assert self.pool not in made.underway, "already recording to mempool_id"
            assert self.pool not in made.uses or made.uses[self.pool] > 0, "use_count > 0"
            assert made.current != DEFAULT
            made.uses[self.pool] += 1
            made.underway.add(self.pool)
            made.begun.add(self)
            made.captures, made.invalid, made.draws_for_a_capture = made.current, False, True
            self.counted = fixed

        def capture_end(self) -> None:
            assert made.current == made.captures, "Capture must end on the same stream it began on"
            made.captures = None
            if made.invalid and not fixed:
                raise RuntimeError("capture was invalidated")
            made.begun.remove(self)
            made.underway.remove(self.pool)
            made.draws_for_a_capture = False  # what 2.14 keeps is by capture
            if made.invalid:
                raise RuntimeError("capture was invalidated")
            self.ended = self.counted = True

        def reset(self) -> None:
            made.uses[self.pool] -= self.counted
            self.ended = self.counted = False

        def replay(self) -> None:
            assert self.ended

        __del__ = reset

    if fixed:
        Graph.capture_end_pre = Graph.capture_end  # type: ignore[attr-defined]

    class Stream:
        cuda_stream = 1

        def __init__(self, device: object = None) -> None: ...

    class On:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, made.current = made.current, self.stream

        def __exit__(self, *raised: object) -> None:
            made.current = self.before

    def begin(stream: object, mode: int) -> int:
        assert mode == 1 and made.captures is None and not fixed
        made.captures, made.invalid = made.current, False
        return 0

    fakes: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": On,
        "set_stream": lambda stream: setattr(made, "current", stream),
        "device": lambda device: On(made.current),
        "synchronize": lambda *device: made.wait(),
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: next(numbers),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuStreamBeginCapture_v2=begin))
    return made


@pytest.fixture
def made(world: World) -> CudaRecorder:
    made = CudaRecorder(torch.device("cuda", 0))
    made._device = torch.device("cpu")  # where `torch.zeros` works
    return made


def cause() -> None:
    raise ValueError("the cause")


def failures(world: World) -> dict[str, Callable[[], None]]:
    def waits() -> None:
        world.draw()
        try:
            world.wait()
        except RuntimeError as error:
            raise ValueError("the cause") from error

    def elsewhere() -> None:
        world.current = "another stream"
        waits()

    return {"raises": cause, "waits": waits, "leaves another stream": elsewhere}


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("kind", ["raises", "waits", "leaves another stream"])
def test_a_failed_capture_raises_its_cause_and_leaves_nothing(
    kind: str, others: int, world: World, made: CudaRecorder
) -> None:
    kept = [made.capture(world.draw, ()) for _ in range(others)]
    for _ in range(2):
        with pytest.raises(ValueError, match="the cause") as raised:
            made.capture(failures(world)[kind], ())
        assert raised.value and world.clean(others)
    replay, result = made.capture(lambda: "result", ())
    replay()
    assert result == "result" and world.clean(others + 1)
    del replay, kept
    assert world.clean()
    made.capture(lambda: None, ())[0]()  # in a new pool: torch refuses the one that was given back


def test_an_error_at_the_end_of_a_capture_is_raised_and_leaves_nothing(world: World, made: CudaRecorder) -> None:
    def invalid() -> None:
        world.invalid = True

    with pytest.raises(RuntimeError, match="capture was invalidated") as raised:
        made.capture(invalid, ())
    assert raised.value and world.clean()


@pytest.mark.parametrize("version", ["2.11"], indirect=True)
def test_torch_s_own_context_manager_leaves_stream_pool_and_generator(world: World) -> None:
    """The twin: in the emulation a broken capture has consequences."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="capture was invalidated"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=stream):
            failures(world)["waits"]()
    assert world.draws_for_a_capture and world.underway == {pool}
    assert world.current is stream or torch.__version__ >= "2.15"
    world.current = DEFAULT
    with pytest.raises(AssertionError, match="already recording"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=stream):
            pass


@pytest.mark.parametrize("version", ["2.11"], indirect=True)
def test_a_capture_that_cannot_be_ended_is_told(
    world: World, made: CudaRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError("no driver")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ValueError, match="the cause"):
        made.capture(failures(world)["waits"], ())
    assert world.current == DEFAULT and world.underway
    (line,) = [r.getMessage() for r in caplog.records]
    assert "a capture failed (capture was invalidated) and torch's state could not be restored (no driver)" in line


def test_tables_of_graphs_that_are_gone_are_freed(
    world: World, made: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tables.Captures()
    monkeypatch.setattr(tables, "_captures", lambda: kept)
    for _ in range(4):
        replay, _ = made.capture(lambda: kept.now.append(torch.ones(1)), ())
        assert [len(each) for graph, each in kept.graphs if graph() is not None] == [1]
        assert len(kept.graphs) <= 2 and not kept.now
        del replay
    with pytest.raises(ValueError, match="the cause"):
        made.capture(failures(world)["waits"], ())
    made.capture(lambda: None, ())
    assert not kept.graphs
