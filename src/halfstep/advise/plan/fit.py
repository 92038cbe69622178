"""Fit: whether a plan fits a GPU, and the largest batch that does. In: plans and a GPU. Out: `Fit`, `Largest`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.advise.plan.gpus import GIB, Gpu, gpu_named

if TYPE_CHECKING:
    from halfstep.advise.plan.memory import MemoryPlan

__all__ = ["TOLERANCE", "Fit", "Largest", "fit_of", "largest_batch"]

TOLERANCE = 0.1
"""Share of a planned peak by which the real one may differ; `tests/advise/plan` holds plans to it."""

MOST_PLANS = 12
"""Plans made in the search for the largest batch; four are enough where bytes are affine in the batch."""

MOST = 1 << 20
"""The largest batch that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A plan beside a GPU.

    Attributes:
        gpu: the GPU's name.
        title: the maker's name of it.
        usable: bytes that torch can allocate on it.
        need: bytes of the plan's highest point, preparation and first step included.
        when: that point: "step", "first step" or "preparation".
        verdict: "fits" or "does not fit", if that also holds for a peak that is a tenth higher or lower; else
            "undecided".
    """

    gpu: str
    title: str
    usable: int
    need: int
    when: str
    verdict: str

    @property
    def spare(self) -> int:
        """Return the bytes left at the highest point; negative if they are missing."""
        return self.usable - self.need


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest batch that fits.

    Attributes:
        batch: its size; 0 if a batch of one does not fit; None if none was found: the peak does not grow with it.
        need: bytes of its highest point; 0 without one.
        plans: how many plans were made to find it; both `batch` and `batch` + 1 were planned.
        proved: whether `batch` + 1 was planned and does not fit. The search ends after 12 plans, and at 1,048,576.
    """

    batch: int | None
    need: int
    plans: int
    proved: bool


def fit_of(plan: MemoryPlan, gpu: Gpu | str) -> Fit:
    """Return whether `plan` fits `gpu`.

    Raises:
        PlanError: unknown GPU.
    """
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
    """Return the largest batch that `fits`, planned and not extrapolated.

    The bytes of two batches give a line, the line a guess, and the guess is planned, until a batch fits and the next
    one does not.

    Args:
        plan_of: returns the plan of a batch size.
        first: the plan of `batch`.
        batch: a size to start from.
        gpu: its name.
    """
    need = {batch: fit_of(first, gpu).need}
    room = fit_of(first, gpu).usable / (1 + TOLERANCE)

    def fits(size: int) -> bool:
        if size not in need:
            need[size] = fit_of(plan_of(size), gpu).need
        return need[size] <= room

    low, high = (batch, MOST + 1) if fits(batch) else (0, batch)
    other = 2 * batch if low else max(1, batch // 2)
    while high - low > 1 and len(need) < MOST_PLANS:
        if fits(other):
            low = max(low, other)
        else:
            high = min(high, other)
        if low and need[low] <= need[min(need)] and low >= 2 * min(need) and high > MOST:
            return Largest(batch=None, need=need[low], plans=len(need), proved=False)
        other = _guess(need, room, low, high)
    proved = high - low == 1 and high <= MOST
    return Largest(batch=low, need=need.get(low, 0), plans=len(need), proved=proved)


def _guess(need: dict[int, int], room: float, low: int, high: int) -> int:
    """Return the size to plan next, between `low`, which fits, and `high`, which does not.

    By the line through the two largest sizes that fit, if that stays below `high`: beyond the batch from which
    activations make the peak, bytes are a line. Else by the line through `low` and `high`, or two that do not fit.
    """
    fitting = sorted(size for size in need if size <= low)[-2:]
    pairs = [(fitting[0], fitting[1])] if len(fitting) == 2 else []
    over = sorted(size for size in need if size >= high)[:2]
    if low and over:
        pairs.append((low, high))
    elif len(over) == 2:
        pairs.append((over[0], over[1]))
    for small, large in pairs:
        slope = (need[large] - need[small]) / (large - small)
        guess = int(small + (room - need[small]) / slope) if slope > 0 else high
        if guess < high:
            return max(guess, low + 1)
    return min(high - 1, MOST if high > MOST else (low + high) // 2)


UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))


def unit_of(size: float) -> tuple[str, int]:
    """Return name and bytes of the unit that suits `size`: GiB as torch prints a GPU's memory, or less."""
    return next((unit for unit in UNITS if abs(size) >= unit[1]), ("B", 1))


def gib(size: float) -> str:
    """Return bytes for readers, with three digits."""
    unit, one = unit_of(size)
    number = size / one
    digits = 0 if one == 1 or abs(number) >= 100 else 2 if abs(number) < 10 else 1
    return f"{number:,.{digits}f} {unit}"
