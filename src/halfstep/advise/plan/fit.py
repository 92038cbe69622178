"""Fit: GPUs by name, whether a plan fits one, and the largest batch that does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from halfstep.advise.plan.ledger import PlanError
from halfstep.errors import did_you_mean
from halfstep.schema import packaged_toml

if TYPE_CHECKING:
    from halfstep.advise.plan.memory import MemoryPlan

GIB = 2**30

TOLERANCE = 0.1  # share of a planned peak by which the real one may differ; `tests/advise/plan` holds plans to it
MOST_PLANS = 12  # plans made in the search for the largest batch; four are enough where bytes are affine in the batch
MOST = 1 << 20  # the largest batch that is tried

CONTEXT = 0.6
"""GiB that a process takes besides what torch allocates: the driver's context and loaded kernels.

Seen: 0.25 GiB for a bare context on an RTX 3090 (https://github.com/invoke-ai/InvokeAI/issues/9413), 0.54 GiB on an
RTX PRO 6000 (https://github.com/ggml-org/llama.cpp/pull/23604), 0.6 GiB in logs of an H200. NCCL's buffers come on top.
"""

ALIASES = {"a100": "a100-80", "v100": "v100-32", "a10": "a10g"}
"""What a card of several sizes means without one: the larger; a verdict names the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, read from `gpus.toml`."""

    name: str  # as `hs.plan` takes it
    title: str  # the maker's name
    sold: float  # gigabytes, as advertised; 0 for a size given by hand
    total: float  # GiB that the driver gives to a process
    formats: tuple[str, ...]  # low formats with matrix units
    source: str = ""  # the maker's page
    seen: str = ""  # where `total` was printed

    @property
    def usable(self) -> int:
        """Return the bytes that torch can allocate: the total without the driver's context."""
        return int((self.total - CONTEXT) * GIB)


@cache
def _table() -> dict[str, Gpu]:
    rows = packaged_toml("advise/plan/gpus.toml")
    return {name: Gpu(name=name, **{**row, "formats": tuple(row["formats"])}) for name, row in rows.items()}


def gpu_names() -> tuple[str, ...]:
    """Return the names in the table."""
    return tuple(_table())


def gpu_named(name: str) -> Gpu:
    """Return the GPU called `name` in any case ("h200", "A100-80"), or one with a size given as "96GiB"."""
    wanted = re.sub(r"^(nvidia|amd|geforce|rtx|tesla|instinct)[ -]*", "", name.strip().lower())
    wanted = re.sub(r"^(rtx)[ -]*", "", wanted).replace(" ", "-").removesuffix("gb")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in _table():
        return _table()[wanted]
    size = re.fullmatch(r"(\d+(?:\.\d+)?)-?gib", wanted)
    if size is not None and float(size[1]) > CONTEXT:
        return Gpu(name=name, title=f"a GPU with {size[1]} GiB", sold=0, total=float(size[1]), formats=("bf16", "fp16"))
    raise PlanError(
        f"unknown GPU {name!r}{did_you_mean(wanted, _table())}; there are {', '.join(_table())}, and a size such as "
        "96GiB for another one (what torch prints as its total capacity)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A plan beside a GPU."""

    gpu: str  # the GPU's name
    title: str  # the maker's name of it
    usable: int  # bytes that torch can allocate on it
    need: int  # bytes of the plan's highest point, preparation and first step included
    when: str  # that point: "step", "first step" or "preparation"
    verdict: str  # "fits" or "does not fit", if also for a peak a tenth higher or lower; else "undecided"

    @property
    def spare(self) -> int:
        """Return the bytes left at the highest point; negative if they are missing."""
        return self.usable - self.need


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest batch that fits."""

    batch: int | None  # 0 if a batch of one does not fit; None if none was found: the peak does not grow with it
    need: int  # bytes of its highest point; 0 without one
    plans: int  # how many plans were made to find it; both `batch` and `batch` + 1 were planned
    proved: bool  # `batch` + 1 was planned and does not fit. The search ends after 12 plans, and at 1,048,576


def fit_of(plan: MemoryPlan, gpu: Gpu | str) -> Fit:
    """Return whether `plan` fits `gpu`."""
    card = gpu_named(gpu) if isinstance(gpu, str) else gpu
    points = {"step": plan.peak_bytes, "first step": plan.first_peak, "preparation": plan.setup_peak}
    when, need = max(points.items(), key=lambda item: item[1])  # of equal ones the first
    verdict = "undecided"
    if need * (1 + TOLERANCE) <= card.usable:
        verdict = "fits"
    elif need * (1 - TOLERANCE) > card.usable:
        verdict = "does not fit"
    return Fit(gpu=card.name, title=card.title, usable=card.usable, need=need, when=when, verdict=verdict)


def largest_batch(plan_of: Callable[[int], MemoryPlan], first: MemoryPlan, batch: int, gpu: Gpu | str) -> Largest:
    """Return the largest batch that `fits`, planned and not extrapolated; `first` is the plan of `batch`, the start."""
    need = {batch: fit_of(first, gpu).need}
    room = fit_of(first, gpu).usable / (1 + TOLERANCE)

    def fits(size: int) -> bool:
        if size not in need:
            need[size] = fit_of(plan_of(size), gpu).need
        return need[size] <= room

    low, high = (batch, MOST + 1) if fits(batch) else (0, batch)
    other = 2 * batch if low else max(1, batch // 2)
    while high - low > 1 and len(need) < MOST_PLANS:
        low, high = (max(low, other), high) if fits(other) else (low, min(high, other))
        if low and need[low] <= need[min(need)] and low >= 2 * min(need) and high > MOST:
            return Largest(batch=None, need=need[low], plans=len(need), proved=False)
        other = _guess(need, room, low, high)
    proved = high - low == 1 and high <= MOST
    return Largest(batch=low, need=need.get(low, 0), plans=len(need), proved=proved)


def _guess(need: dict[int, int], room: float, low: int, high: int) -> int:
    # by the line through the two largest sizes that fit, if that stays below `high`: beyond the batch from which
    # activations make the peak, bytes are a line. Else by the line through `low` and `high`, or two that do not fit
    fitting = sorted(size for size in need if size <= low)[-2:]
    over = sorted(size for size in need if size >= high)[:2]
    for small, large in (pair for pair in (fitting, [low, high] if low and over else over) if len(pair) == 2):
        slope = (need[large] - need[small]) / (large - small)
        guess = int(small + (room - need[small]) / slope) if slope > 0 else high
        if guess < high:
            return max(guess, low + 1)
    return min(high - 1, MOST if high > MOST else (low + high) // 2)
