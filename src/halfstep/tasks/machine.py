"""The machine that numbers are measured on, what of torch a measurement leaves as it was, and what spoils it here."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import halfstep as hs
from halfstep.errors import TaskError, did_you_mean
from halfstep.schema import packaged_toml
from halfstep.torch_private.devices import has_mkldnn

if TYPE_CHECKING:
    from halfstep.tasks.speed import DeviceSpeed

UNITS = ("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "fphp", "asimdhp")
"""Instruction sets in /proc/cpuinfo (x86 flags, ARM features) that decide how fast low formats are."""


def machine() -> dict[str, Any]:
    """Return what decides the numbers: processor, cores, accelerator, versions and torch's switches; plain values."""
    model, flags = _processor()
    kind = _type_here()
    named = getattr(torch.get_device_module(kind), "get_device_name", None) if kind else None
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "instruction_sets": [name for name in UNITS if name in flags],
        "accelerator": kind if named is None else str(named()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": has_mkldnn,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@contextmanager
def threads_of_torch(wanted: int) -> Iterator[None]:
    """Set the number of torch's threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def generators_kept() -> AbstractContextManager[None]:
    """Return a block after which torch's generators go on as before it: the CPU's and the accelerator's (not mps)."""
    kind = _type_here()
    if kind in {"", "mps"}:  # torch.mps.get_rng_state has no device, which fork_rng gives it
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(device_type=kind)


def _type_here() -> str:
    """Return the type of this machine's accelerator, "" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def device_types() -> tuple[str, ...]:
    """Return the device types that this machine has, the default first."""
    return tuple(filter(None, (_type_here(), "cpu")))


def device_type(wanted: str) -> str:
    """Return `wanted` if this machine has it; for "" the accelerator, if there is one, else "cpu"."""
    there = device_types()
    if wanted and wanted not in there:
        raise TaskError(f"device {wanted!r} is not here{did_you_mean(wanted, there)}; there is {' and '.join(there)}")
    return wanted or there[0]


def _processor() -> tuple[str, frozenset[str]]:
    """Return the processor's name and its flags; on systems without /proc/cpuinfo the name alone."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or fields.get("CPU part") or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("Features") or "").split())


# ------------------------------------------------------------------ what spoils mixed precision, or its measurement

NOISE = 0.1  # identical programs that differ by more than this make every ratio here doubtful
BUSY = 0.25  # load average a core, before anything was measured
TF32_GAIN = 1.3

VARIABLES, TEXTS = packaged_toml("tasks/pitfalls.toml").values()

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


def threads_to_use(threads: int, cores: int, load: float) -> int:
    """Return with how many of torch's `threads` to measure: a thread that waits for a busy core would be timed too."""
    return threads if load <= BUSY * cores else max(1, min(threads, cores - math.ceil(load - BUSY)))


def threads_here() -> tuple[int, float]:
    """Return with how many threads to measure now, and how many processes wanted a core in the last minute, on average.

    The second is 0.0 where the system does not count.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return threads_to_use(torch.get_num_threads(), usable_cores(), load), load


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
        yield TEXTS["busy"].format(load=load, cores=cores)
    works = [(f"{work.work} on {speed.device}", work.control) for speed in speeds for work in speed.works]
    spread, worst = max(((max(c.high, 1 / c.low) - 1.0, name) for name, c in works), default=(0.0, ""))
    if spread > NOISE:
        yield TEXTS["spread"].format(spread=spread, worst=worst)


def _threads(threads: int, cores: int, granted: float | None, environ: Mapping[str, str]) -> Iterator[str]:
    if granted is not None and threads > granted:
        yield TEXTS["stalled"].format(threads=threads, granted=granted, wanted=max(1, int(granted)))
    elif threads < cores:
        by = next((f"{name}={environ[name]}" for name in THREAD_VARIABLES if environ.get(name)), "")
        if by or 2 * threads < cores:  # half of the cores is torch's choice where each core has two hardware threads
            remedy = f"unset {by.partition('=')[0]} ({by})" if by else f"torch.set_num_threads({cores})"
            yield TEXTS["idle"].format(threads=threads, cores=cores, remedy=remedy)


def _torch() -> Iterator[str]:
    has_gpu = Path("/dev/nvidia0").exists()
    if not torch.backends.mkldnn.is_available():
        yield TEXTS["no_onednn"]
    if torch.version.cuda is None and torch.version.hip is None and has_gpu:
        yield TEXTS["cpu_build"].format(torch=torch.__version__)
    elif torch.version.cuda is not None and not torch.cuda.is_available() and has_gpu:
        yield TEXTS["driver"].format(cuda=torch.version.cuda)
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        yield TEXTS["precision"].format(precision=precision)
    if torch.are_deterministic_algorithms_enabled():
        yield TEXTS["deterministic"]
    if not torch.is_autocast_cache_enabled():
        yield TEXTS["no_cache"]


def _cuda(speed: DeviceSpeed) -> Iterator[str]:
    if not torch.backends.cudnn.is_available():
        yield TEXTS["no_cudnn"]
    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    if len(capabilities) > 1:
        yield TEXTS["gpus_differ"].format(words=" and ".join(f"{major}.{minor}" for major, minor in capabilities))
    tf32 = max(
        (s.faster.median for w in speed.works[:1] for s in w.speeds if s.label == "tf32" and s.faster), default=0.0
    )
    if tf32 >= TF32_GAIN and torch.get_float32_matmul_precision() == "highest":
        yield TEXTS["no_tf32"].format(tf32=tf32)
    if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction and hs.policy.units("cuda").fp16:
        yield TEXTS["low_sums"]
