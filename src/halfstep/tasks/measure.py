"""Measurements: differences with their intervals, and counted bytes; times are measured in `halfstep.timing`.

"The same result" is shown by an interval inside a margin that was fixed beforehand (two one-sided tests, Schuirmann
1987), because a difference that is merely not significant shows nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from halfstep.timing import CONFIDENCE

SHARED = (type, ModuleType, FunctionType, MethodType, str)  # code and names, shared by all
WITHIN = "within the margin"
ENOUGH_SEEDS = 5  # fewer runs give an indication, not a verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A metric's paired difference from fp32 over the seeds."""

    mean: float  # mean of candidate minus fp32
    low: float | None  # lower end of the interval of that mean (Student's t); None with one seed
    high: float | None  # upper end
    # WITHIN (the interval lies inside it), "better" or "worse" (outside), "undecided", or "diverged" (not finite)
    verdict: str
    enough: bool  # whether there were enough seeds for a verdict; with fewer it is an indication


def difference(
    values: Sequence[float], reference: Sequence[float], margin: float, *, higher: bool, confidence: float = CONFIDENCE
) -> Difference:  # fmt: skip
    """Compare final metrics with those of fp32, seed by seed; `higher`: whether a higher metric is better."""
    pairs = [a - b for a, b in zip(values, reference, strict=True)]
    enough = len(pairs) >= ENOUGH_SEEDS
    if not all(map(math.isfinite, pairs)):
        return Difference(mean=math.nan, low=None, high=None, verdict="diverged", enough=enough)
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return Difference(mean=mean, low=None, high=None, verdict="undecided", enough=False)
    half = student_quantile(0.5 + confidence / 2, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    low, high = mean - half, mean + half
    if -margin <= low and high <= margin:
        verdict = WITHIN
    elif low > margin:
        verdict = "better" if higher else "worse"
    elif high < -margin:
        verdict = "worse" if higher else "better"
    else:
        verdict = "undecided"
    return Difference(mean=mean, low=low, high=high, verdict=verdict, enough=enough)


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of `values`, nan if one is not finite or there is none."""
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a probability between 0.5 and 1, to about 1e-9."""
    low, high = 0.0, 1.0
    while _student_tail(high, freedom) > 1.0 - probability:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, freedom) > 1.0 - probability else (low, middle)
    return (low + high) / 2


def _student_tail(t: float, freedom: int) -> float:
    """Return P(T > t) for t >= 0: finite sums over the angle atan(t / sqrt(freedom)) (Abramowitz & Stegun 26.7.3-4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    term, total = (1.0, 0.0) if freedom % 2 == 0 else (cosine, 0.0)
    for k in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if freedom % 2 == 0:
        return (1.0 - math.sin(angle) * total) / 2
    return 0.5 - (angle + math.sin(angle) * total) / math.pi


def state_bytes(*roots: object) -> int:
    """Return the bytes of every tensor that attributes, containers and gradients of `roots` lead to, each once."""
    found: dict[int, int] = {}  # address of a storage -> its bytes
    seen: dict[int, object] = {}  # holds what it has seen: no address comes twice
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, SHARED):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            made_of = getattr(item, "__tensor_flatten__", None)
            if made_of is None:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            else:  # a tensor out of others has no memory of its own
                waiting += [getattr(item, name) for name in made_of()[0]]
            waiting.append(item.grad if item.is_leaf else None)
        elif isinstance(item, WeakValueDictionary):
            continue  # keeps nothing alive; it only registers other optimizers and models
        elif isinstance(item, WeakKeyDictionary):
            waiting += item.values()
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        else:
            slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]
    return sum(found.values())


class SavedForBackward(saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass while it is open, parameters excepted; it changes no result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._kept: dict[int, Tensor] = {}  # keeps them alive, so that no address comes twice

    def _keep(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._weights:
            self._kept.setdefault(address, tensor.detach())
        return tensor

    def __enter__(self) -> SavedForBackward:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        """Bytes of all storages kept so far."""
        return sum(t.untyped_storage().nbytes() for t in self._kept.values())
