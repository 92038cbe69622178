"""Recorders: work on a device is recorded once and repeated without Python.

`Graphs` uses the protocol `Recorder` and nothing else of CUDA graphs, so its bookkeeping can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch

from halfstep.kernels.triton.tables import tables_of

LOG = logging.getLogger("halfstep.step")
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of CUDA's driver

T = TypeVar("T")


class Recorder(Protocol):
    """Records what functions do on one device."""

    def warm(self, function: Callable[[], T]) -> T:
        """Call `function` where recordings are made: what it does is done, and what it needs is set up."""

    def capture(self, function: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], T]:
        """Call `function` to record what it does on the device, where nothing happens yet."""


class CudaRecorder:
    """CUDA graphs, captured on one side stream, in one memory pool as long as there are any.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (torch 2.13). One pool is enough because the graphs
    of a training step never run at the same time, and none reads freed memory of another. torch refuses to capture into
    a pool whose graphs are gone, so the next one gets a new pool.

    Note [failed captures]: an operation that a capture forbids makes `CUDAGraph.capture_end` raise. Up to torch 2.13 it
    raises in its first call of CUDA and leaves what follows undone: torch's allocators still record into the pool, and
    its random generators still draw for a capture, so that every later draw and capture fails. Ending an empty capture
    of the same stream in its place does all of that; torch would begin one with a state of its own, so the driver
    begins it. torch 2.14 needs only `reset`. ``torch.cuda.graph`` is not used: it also leaves the side stream current
    (up to torch 2.14).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those in the pool

    def warm(self, function: Callable[[], T]) -> T:
        """Call `function` on the side stream, in order with the work before and after it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], T]:
        """Capture `function`; if that fails, raise what it raised, not the error of ending a broken capture."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # the pool can use none of what is cached
            with tables_of(graph, self._device):
                try:
                    # thread_local: a data loader's thread that pins memory meanwhile would end a "global" capture
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    result = function()
                except BaseException:
                    with suppress(Exception):
                        self._end(graph)
                    graph.reset()  # what was raised may keep it alive
                    raise
                self._end(graph)
        self._graphs.add(graph)
        return graph.replay, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        torch.cuda.set_stream(self._stream)  # the function may have left another one current
        try:
            graph.capture_end()
        except Exception as error:
            if not hasattr(graph, "capture_end_pre"):
                self._end_instead(graph, error)
            graph.reset()
            raise

    def _end_instead(self, graph: torch.cuda.CUDAGraph, error: Exception) -> None:
        """End an empty capture in place of that of `graph`, which has ended with `error`; note [failed captures]."""
        try:
            mark = torch.zeros((), device=self._device)
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            status = driver.cuStreamBeginCapture_v2(ctypes.c_void_p(self._stream.cuda_stream), THREAD_LOCAL)
            if status:
                raise RuntimeError(f"cuStreamBeginCapture returned {status}")
            mark.zero_()  # torch warns of graphs without any work
            graph.capture_end()
        except Exception as again:
            LOG.warning(
                "a capture failed (%s) and torch's state could not be restored (%s): start the process anew before the "
                "next capture, or leave cuda_graph out",
                str(error).strip(),
                again,
            )


RECORDERS = {"cuda": CudaRecorder}


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for `device`, or None where there is no such thing."""
    kind = RECORDERS.get(device.type)
    return None if kind is None else kind(device)
