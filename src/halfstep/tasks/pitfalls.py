"""Pitfalls: settings of this machine and process that spoil mixed precision or its measurement. Each with a remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

import halfstep as hs
from halfstep.tasks.speed import DeviceSpeed

NOISE = 0.1  # identical programs that differ by more than this make every ratio here doubtful
BUSY = 0.25  # load average a core, before anything was measured
TF32_GAIN = 1.3

LOWER = "oneDNN may compute fp32 products in a lower format; unset it for a true fp32"
UNUSED = "oneDNN may leave units of this CPU unused; unset it"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"), LOWER),
    **dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"), UNUSED),
    "ATEN_CPU_CAPABILITY": "torch's own CPU kernels may leave units of this CPU unused; unset it",
    "NVIDIA_TF32_OVERRIDE": "CUDA libraries ignore torch's tf32 settings; unset it",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "fp32 products on CUDA are computed in tf32 unless the program says no",
}
"""Environment variables that change what a format means or how fast it is -> what they do, and the remedy."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_granted(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' time a container grants this process, or None if all or unknown."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return None


def load_average() -> float:
    """Return how many processes wanted a core in the last minute, on average; 0.0 where the system does not count."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def threads_to_use(threads: int, cores: int, load: float) -> int:
    """Return with how many of torch's `threads` to measure: a thread that waits for a busy core would be timed too."""
    return threads if load <= BUSY * cores else max(1, min(threads, cores - math.ceil(load - BUSY)))


def pitfalls(
    speeds: Sequence[DeviceSpeed], *, load: float = 0.0, threads: int | None = None, cores: int | None = None,
    granted: float | None = None, environ: Mapping[str, str] = {},
) -> Iterator[str]:  # fmt: skip
    """Yield what to know about this machine and process, one line each; `load`: the average before measuring."""
    threads = torch.get_num_threads() if threads is None else threads
    cores = usable_cores() if cores is None else cores
    yield from _threads(threads, cores, granted, environ)
    yield from (f"{name}={environ[name]}: {what}" for name, what in VARIABLES.items() if environ.get(name))
    yield from _torch()
    yield from (line for speed in speeds if speed.device == "cuda" for line in _cuda(speed))
    if load > BUSY * cores:
        yield (
            f"other programs kept this machine busy (load average {load:.1f} on {cores} cores before measuring): the "
            "speeds are of fewer threads than training would have; run this again when it is quiet"
        )
    works = [(f"{work.work} on {speed.device}", work.control) for speed in speeds for work in speed.works]
    spread, worst = max(((max(c.high, 1 / c.low) - 1.0, name) for name, c in works), default=(0.0, ""))
    if spread > NOISE:
        yield (
            f"identical fp32 programs differed by up to {spread:.0%} ({worst}): "
            "differences finer than that are not resolved here"
        )


def _threads(threads: int, cores: int, granted: float | None, environ: Mapping[str, str]) -> Iterator[str]:
    if granted is not None and threads > granted:
        yield (
            f"torch runs {threads} threads in a container granted {granted:g} cores' time: they stall each other; "
            f"torch.set_num_threads({max(1, int(granted))})"
        )
    elif threads < cores:
        by = next((f"{name}={environ[name]}" for name in THREAD_VARIABLES if environ.get(name)), "")
        if by or 2 * threads < cores:  # half of the cores is torch's choice where each core has two hardware threads
            remedy = f"unset {by.partition('=')[0]} ({by})" if by else f"torch.set_num_threads({cores})"
            yield f"torch runs {threads} of {cores} cores; {remedy}"


def _torch() -> Iterator[str]:
    if not torch.backends.mkldnn.is_available():
        yield "this torch has no oneDNN: on x86 CPUs its bf16 and fp16 products run without the CPU's units"
    if torch.version.cuda is None and torch.version.hip is None and Path("/dev/nvidia0").exists():
        yield f"there is an NVIDIA GPU and this torch ({torch.__version__}) is a build for CPUs; install a CUDA build"
    elif torch.version.cuda is not None and not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        yield f"there is an NVIDIA GPU that torch (CUDA {torch.version.cuda}) cannot use; look at the driver's version"

    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        yield (
            f"torch.get_float32_matmul_precision() is {precision!r}: fp32 products may use a lower format, so "
            "fp32 is no longer the reference; torch.set_float32_matmul_precision('highest')"
        )
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms are on: some operators run slower kernels or refuse to run, in every format"
    if not torch.is_autocast_cache_enabled():
        yield "autocast's cache is off: a weight used several times in a step is cast every time"


def _cuda(speed: DeviceSpeed) -> Iterator[str]:
    if not torch.backends.cudnn.is_available():
        yield "cuDNN is missing: convolutions run in torch's own kernels, in low formats without their units"
    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    if len(capabilities) > 1:
        words = " and ".join(f"{major}.{minor}" for major, minor in capabilities)
        yield f"the GPUs differ (compute capability {words}): the oldest decides; CUDA_VISIBLE_DEVICES chooses"
    tf32 = max(
        (s.faster.median for w in speed.works[:1] for s in w.speeds if s.label == "tf32" and s.faster), default=0.0
    )
    if tf32 >= TF32_GAIN and torch.get_float32_matmul_precision() == "highest":
        yield (
            f"what stays fp32 runs without tf32, which is {tf32:.2g} times as fast in matrix products; "
            "torch.set_float32_matmul_precision('high') if 10 bits of mantissa will do there"
        )
    if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction and hs.policy.units("cuda").fp16:
        yield (
            "partial sums of fp16 products may be added in fp16 (torch's default) and overflow; "
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False if a run skips steps"
        )
