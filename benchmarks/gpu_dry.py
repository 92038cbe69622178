"""Stand-ins for what only CUDA has: with them every line of the blocks of `gpu_blocks` runs on a CPU.

Nothing is measured by them: memory is 0 bytes, every replay takes 1 ms, there is one stream, a graph is the tape of the
tests, and operators of torch stand for kernels. `unittest.mock` refuses names that torch.cuda does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.loops import graphs_on_tape
from halfstep.step.graphs import RECORDERS


class Profile:
    """torch's profiler of a CPU; operators that call no other are given as kernels."""

    def __init__(self, *, activities: list[ProfilerActivity], acc_events: bool) -> None:
        assert ProfilerActivity.CUDA in activities
        self._profile = profile(activities=[ProfilerActivity.CPU], acc_events=acc_events)

    def __enter__(self) -> Profile:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)

    def key_averages(self) -> Any:
        return self._profile.key_averages()

    def events(self) -> list[Any]:
        leaves = [e for e in self._profile.events() or () if e.name.startswith("aten::") and not e.cpu_children]
        for event in leaves:
            event.device_type = DeviceType.CUDA
        return leaves


def fp8_autocast(*, enabled: bool) -> AbstractContextManager[None]:
    """Refuse fp8, as a card does that has none."""
    if enabled:
        raise RuntimeError("no fp8 on a CPU")
    return nullcontext()


@contextmanager
def stand_ins(blocks: ModuleType) -> Iterator[None]:
    """Put the stand-ins into torch.cuda and into `blocks`, the module of the blocks, until the block ends."""
    engine: Any = ModuleType("transformer_engine.pytorch")
    engine.Linear, engine.fp8_autocast = nn.Linear, fp8_autocast
    parent: Any = ModuleType("transformer_engine")
    parent.pytorch, waits = engine, [RuntimeError("a wait, as one of torch.amp's")]
    event, stream = Mock(spec=torch.cuda.Event), Mock(spec=torch.cuda.Stream)
    event.elapsed_time.return_value = 1.0

    def set_sync_debug_mode(mode: str) -> None:
        if waits and mode == "error":
            raise waits.pop()

    names: dict[str, Any] = {
        "Event": lambda enable_timing: event,
        **dict.fromkeys(("Stream", "current_stream", "default_stream"), lambda device: stream),
        "stream": lambda stream: nullcontext(),
        "device_count": lambda: 2,
        "set_device": lambda device: None,
        "get_device_name": lambda device: "no NVIDIA H100 80GB HBM3",
        "set_sync_debug_mode": set_sync_debug_mode,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 0,
        "memory_reserved": lambda device: 0,
        "mem_get_info": lambda device: (0, 0),
    }
    made = {"transformer_engine": parent, "transformer_engine.pytorch": engine}
    sys.modules.update(made)
    try:
        with patch.multiple(torch.cuda, **names), patch.object(blocks, "profile", Profile), patch.dict(RECORDERS):
            graphs_on_tape()
            yield
    finally:
        for name in made:
            del sys.modules[name]
