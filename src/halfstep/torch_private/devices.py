"""Devices and memory: the custom backend's name, a CPU's instruction sets, addresses of storages."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import _disable_profiler_legacy, _enable_profiler_legacy  # type: ignore[attr-defined]

get_privateuse1_backend_name = torch._C._get_privateuse1_backend_name
has_mkldnn = torch._C._has_mkldnn
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

raw_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Returns the number of a CUDA device's current stream, given the device's index; None in a torch without CUDA."""

storage_key = attrgetter("_cdata")
"""The address of a storage's C object: equal for all views of one storage."""


def mps_generator(module: Any) -> torch.Generator:
    """Return the generator of Apple's GPUs, given their module `torch.mps`."""
    found: torch.Generator = module._get_default_mps_generator()
    return found


def cpu_instructions() -> dict[str, bool]:
    """Return which instruction sets for low formats this CPU has, for versions of torch without a public query."""
    queries = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_fp16": "_is_amx_fp16_supported",
    }
    return {name: bool(getattr(torch.cpu, query, bool)()) for name, query in queries.items()}


def cpu_allocations(call: Callable[[], object]) -> list[int]:
    """Return what `call` takes from this thread's CPU allocator, bytes in order; what is given back is negative.

    The public profilers write lines of their own to the standard error. None may be open already.
    """
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        call()
    finally:
        events: Any = _disable_profiler_legacy()
    return [e.cpu_memory_usage() for thread in events for e in thread if e.kind() == "memory_alloc"]
