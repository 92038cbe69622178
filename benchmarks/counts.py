"""What one step does, counted: operators, casts and their bytes, reads by the host, bytes kept and in use.

On a CPU all of it is seen by a dispatch mode; an operator is one kernel or a few. On a GPU kernels are counted by the
profiler and waits for the device by torch's sync debug mode. Compiled and captured steps show neither operators nor
casts to a dispatch mode: those are None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import Batch
from benchmarks.loops import Run, device_of
from halfstep.tasks.measure import SavedForBackward, state_bytes

COPIES = ("aten::copy_", "aten::_foreach_copy_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """One step in numbers; None: not countable for this candidate.

    Attributes:
        operators: calls of operators that are not views: on a CPU what stands for kernel launches.
        launches: kernels launched, on a GPU.
        host_reads: values of the device that the host waited for.
        casts: casts of more than one element between floating formats that wrote a tensor.
        cast_bytes: read and written by them.
        saved_bytes: kept between forward and backward, parameters excepted.
        state_bytes: of parameters, buffers, optimizer state and precise weights between steps.
        peak_bytes: those and the most that a step adds to them at one time.
    """

    operators: int | None
    launches: int | None
    host_reads: int | None
    casts: int | None
    cast_bytes: int | None
    saved_bytes: int | None
    state_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Seen:
    """What a dispatch mode saw.

    Attributes:
        operators: calls of operators that are not views.
        host_reads: values read by the host.
        casts: casts that wrote a tensor.
        cast_bytes: read and written by them.
        weights: casts of weights to fewer bits in the forward pass: the weight, what its copy was written into (None: a
            new tensor), and the copy's format.
    """

    operators: int = 0
    host_reads: int = 0
    casts: int = 0
    cast_bytes: int = 0
    weights: list[tuple[Tensor, Tensor | None, torch.dtype]] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Counts while it is open; changes nothing.

    Args:
        run: whose steps it sees.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.run, self.seen = run, Seen()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            self.seen.host_reads += 1
        elif not func.is_view and name not in {"aten::detach", "aten::empty", "aten::empty_like"}:
            self.seen.operators += 1
        if name == "aten::_to_copy":
            self._see(args[0], out, made=True)
        elif name == "aten::copy_":
            self._see(args[1], args[0], made=False)
        elif name == "aten::_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self._see(source, target, made=False)
        return out

    def _see(self, source: Tensor, target: Tensor, *, made: bool) -> None:
        if source.dtype == target.dtype or source.numel() < 2:
            return
        if not (source.is_floating_point() and target.is_floating_point()):
            return
        self.seen.casts += 1
        self.seen.cast_bytes += source.numel() * (source.element_size() + target.element_size())
        stages = self.run.stages
        lowered = target.element_size() < source.element_size()
        if lowered and stages is not None and stages.stage == "forward" and isinstance(source, nn.Parameter):
            self.seen.weights.append((source, None if made else target, target.dtype))


def watch(run: Run, batch: Batch) -> tuple[Seen, int]:
    """Train one step of an eager run under watch; return what was seen and the bytes saved for backward."""
    assert run.stages is not None
    kept = SavedForBackward(run.model)
    run.stages.around = kept  # emulated fp16 operators compute their backward pass by functions that take no such hooks
    try:
        with Watch(run) as mode:
            run.stages.run(lambda: run.step(batch))
    finally:
        run.stages.around = nullcontext()
    return mode.seen, kept.bytes


def allocated(call: Callable[[], Any], device: str) -> int:
    """Return the most bytes that `call` had in use at one time beyond those before it: every allocation counts."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return allocations(call)[1]


def allocations(call: Callable[[], Any]) -> tuple[int, int]:
    """Return what `call` has allocated on the CPU beyond what it freed, its result included, and the most it had."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        result = call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    used = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        used += event.nbytes()
        most = max(most, used)
    del result
    return used, most


def launches(call: Callable[[], Any], device: str) -> int:
    """Return the kernels that `call` launches on a GPU; a captured graph is one launch."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        torch.cuda.synchronize(device)
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return sum(e.count for e in record.key_averages() if e.key.startswith(names))


def waits(call: Callable[[], Any]) -> int:
    """Return how often `call` made the host wait for the GPU."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in heard)


def count(run: Run, batch: Batch) -> tuple[Counts, Seen]:
    """Count one step of `run` (three, to be exact); also return what a dispatch mode saw of it."""
    device = device_of(run.model)

    def step() -> Tensor:
        return run.step(batch)

    seen, saved = (Seen(), None) if run.stages is None else watch(run, batch)
    eager, cuda = run.stages is not None, device != "cpu"
    state = state_bytes(*run.holds)
    return Counts(
        operators=seen.operators if eager else None,
        launches=launches(step, device) if cuda else None,
        host_reads=waits(step) if cuda else seen.host_reads if eager else None,
        casts=seen.casts if eager else None,
        cast_bytes=seen.cast_bytes if eager else None,
        saved_bytes=saved,
        state_bytes=state,
        peak_bytes=state + allocated(step, device),
    ), seen
