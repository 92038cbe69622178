"""Recorders: work on a device is recorded once and repeated without Python.

`Graphs` uses the protocol `Recorder` and nothing else of CUDA graphs, so its bookkeeping can be tested on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

__all__ = ["CudaRecorder", "Recorder", "recorder_for"]

T = TypeVar("T")


class Recorder(Protocol):
    """Records what functions do on one device."""

    def warm(self, function: Callable[[], T]) -> T:
        """Call `function` where recordings are made: what it does is done, and what it needs is set up."""

    def capture(self, function: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], T]:
        """Call `function` to record what it does on the device, where nothing happens yet.

        Args:
            function: what is recorded; it may not wait for the device.
            generators: random generators it uses besides the device's default one.

        Returns:
            A function that does what was recorded, with the same tensors; and what `function` returned, whose tensors
            are filled by each repetition.
        """


class CudaRecorder:
    """CUDA graphs, one memory pool for all of them, captured on one side stream.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (torch 2.13). One pool is enough because the graphs
    of a training step never run at the same time, and none reads freed memory of another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

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
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        failure: BaseException | None = None
        result: list[T] = []
        try:
            # thread_local: a data loader's thread that pins memory meanwhile would end a "global" capture
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    result.append(function())
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            if failure is None or failure is error:
                raise
            raise failure from None
        return graph.replay, result[0]


RECORDERS = {"cuda": CudaRecorder}


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for `device`, or None where there is no such thing."""
    kind = RECORDERS.get(device.type)
    return None if kind is None else kind(device)
