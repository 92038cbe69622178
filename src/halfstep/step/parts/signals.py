"""Signals: the recent history of a run, kept on its device.

For each update references to 0-dim tensors that it has computed anyway; at updates 1, 2, 4, ..., 64 and every 64th
after that norms of parameters and batch, also of a batch whose loss is large. At the same updates `silent.py` looks for
failures that no step shows. Only `Signals.read` waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.kernels.choose import norms_for
from halfstep.kernels.sharded import local
from halfstep.step.parts.silent import Kept, Learning, has_norm
from halfstep.torch_private.modes import DisableTorchFunction

UPDATES = 512
"""Updates that are remembered: a few KB on the host, and three blocks of 512 bytes each on a CUDA device."""

SAMPLED_EVERY = 64
"""Norms of all weights are read at every so many updates: a pass over the weights takes about as long as an update."""

SAMPLES = 64
"""Samples that are remembered."""

Update: TypeAlias = tuple[
    int, "Tensor | float | None", "Tensor | float", "tuple[int, int] | None", "Tensor | bool | None", "Tensor | None"
]
"""The number of its last micro-batch; the detached loss of that; norms of its gradients, of which the largest counts;
versions of these two tensors, which are the user's, who may add to them in place (None: both are numbers); 0-dim bool:
it was not applied (None: it was); what the norms are to be divided by (None: nothing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What `Signals` remembers, as plain values, the oldest first. nan: not known."""

    steps: tuple[int, ...] = ()  # of each update, the number of its last micro-batch
    losses: tuple[float, ...] = ()  # the loss of that micro-batch, unscaled
    gradients: tuple[float, ...] = ()  # norm of all before clipping, unscaled; for `hs.BlackBox` on a GPU the largest
    applied: tuple[bool, ...] = ()  # whether its gradients were finite, as far as is known
    weights: tuple[tuple[int, float], ...] = ()  # (step, norm of the parameters trained now) before sampled updates
    inputs: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(step, largest magnitude of each floating tensor of a batch, in the order of `trees.tensors`) of sampled updates,
    and of those whose loss was far above the losses before."""

    def updates(self, until: float = math.inf) -> list[tuple[int, float, float]]:
        """Return (step, loss, gradient norm) of the updates that were applied before step `until`."""
        rows = zip(self.steps, self.losses, self.gradients, self.applied, strict=True)
        return [(step, loss, norm) for step, loss, norm, applied in rows if applied and step < until]


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a model that are trained now, by their size; of sharded ones, this rank's part."""

    norms: tuple[Tensor, ...]  # 2-norms of groups of them, on their devices
    count: int  # their elements

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Take the norms; waits for nothing."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with DisableTorchFunction(), torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and not is_lazy(parameter):
                    part = local(Tensor.detach(parameter))
                    if has_norm(part):
                        kinds.setdefault((part.device, part.dtype), []).append(part)
            norms = [torch.linalg.vector_norm(norms_for(parts)) for parts in kinds.values()]
        return cls(tuple(norms), sum(part.numel() for parts in kinds.values() for part in parts))

    @property
    def norm(self) -> float:
        """The norm of all; waits for the devices."""
        return math.hypot(*map(float, self.norms))

    @property
    def mean(self) -> float:
        """The root mean square of the elements; nan if there are none; waits for the devices."""
        return self.norm / math.sqrt(self.count) if self.count else math.nan


class Signals:
    """Remembers the last updates of one run."""

    def __init__(self) -> None:
        self.learning = Learning()
        self.forget()

    def forget(self) -> None:
        """Begin anew: a checkpoint has been loaded."""
        self.learning.forget()
        self.windows, self.due = 0, 1  # updates begun so far; number of the one at which to call `sample`
        self.recent: deque[Update] = deque(maxlen=UPDATES)
        self._weights: deque[tuple[int, Weights]] = deque(maxlen=SAMPLES)
        self._inputs: deque[tuple[int, list[Tensor | None]]] = deque(maxlen=SAMPLES)
        self._kept = Kept()

    def sample(self, number: int, model: nn.Module, values: Iterable[Tensor] | None) -> None:
        """Look at buffers before micro-batch `number`, the first of a window; waits for nothing.

        Where Python sees the window, take norms of parameters and of `values`, the batch; else `values` is None.
        """
        self.due = 2 * self.due if self.due < SAMPLED_EVERY else self.due + SAMPLED_EVERY
        if values is not None:
            self._weights.append((number, Weights.of(model)))
            self.sample_batch(number, values)
        with DisableTorchFunction(), torch.no_grad():
            self._kept.look(number, self.windows, model)
        if values is not None:
            self.learning.begin(self.windows, model)

    def sample_batch(self, number: int, values: Iterable[Tensor]) -> None:
        """Take the largest magnitudes of a batch, that of micro-batch `number`; waits for nothing."""
        with DisableTorchFunction(), torch.no_grad():
            self._inputs.append((number, [_largest(t) for t in values if t.is_floating_point()]))

    def growth(self, model: nn.Module, step: int) -> tuple[int, float, float] | None:
        """Return the root mean square of the weights at the last sample until `step`, and now; waits for the device."""
        now = Weights.of(model)
        found = [(number, weights) for number, weights in self._weights if number <= step]
        if not found or found[-1][1].count != now.count:
            return None
        return found[-1][0], found[-1][1].mean, now.mean

    def saved(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return what is remembered as plain values for a file; waits for the device."""
        seen = self.read()
        return {
            "updates": [*zip(seen.steps, seen.losses, seen.gradients, seen.applied, strict=True)],
            "weights": [(number, weights.norm, weights.count) for number, weights in self._weights],
            "inputs": [*seen.inputs],
        }

    def restore(self, saved: Mapping[str, list[tuple[Any, ...]]]) -> None:
        """Remember what `saved` has returned, and nothing else."""
        self.forget()
        for number, loss, gradient, applied in saved["updates"]:
            self.recent.append((number, float(loss), float(gradient), None, not applied, None))
        for number, norm, count in saved["weights"]:
            self._weights.append((number, Weights((torch.tensor(norm, device="cpu"),), count)))
        for number, largest in saved["inputs"]:
            self._inputs.append((number, [torch.tensor(value, device="cpu") for value in largest]))

    def read(self) -> History:
        """Return what is remembered; waits for the device."""
        found = {entry[0]: entry for entry in self.recent}  # of two with one number the later one counts
        rows = [_row(entry) for entry in found.values()]
        losses, gradients, applied = zip(*rows, strict=True) if rows else ((), (), ())
        trained = self._weights[-1][1].count if self._weights else 0
        return History(
            steps=tuple(found),
            losses=losses,
            gradients=gradients,
            applied=applied,
            weights=tuple((number, seen.norm) for number, seen in self._weights if trained and seen.count == trained),
            inputs=tuple((number, tuple(map(_number, largest))) for number, largest in self._inputs if largest),
        )


def _largest(tensor: Tensor) -> Tensor | None:
    """Return the largest magnitude of a tensor, 0-dim on its device; None if it is of no kind that has one."""
    part = local(tensor)
    return torch.linalg.vector_norm(part, math.inf) if has_norm(part) else None


def _row(entry: Update) -> tuple[float, float, bool]:
    _, loss, gradient, versions, bad, scale = entry
    if versions is None or isinstance(loss, float) or isinstance(gradient, float):
        assert isinstance(loss, float) and isinstance(gradient, float)
        return loss, gradient, not bad
    one = math.nan if loss is None or loss._version != versions[0] else _number(loss)
    other = math.nan if gradient._version != versions[1] else _number(gradient)
    return one, other / (1.0 if scale is None else _number(scale)), bad is None or not bool(bad)


def _number(tensor: Tensor | None) -> float:
    """Return a number, of several ones the largest magnitude; nan for none; waits for the device."""
    if tensor is None or not tensor.numel():
        return math.nan
    values = local(tensor.detach())
    return float(values) if values.numel() == 1 else float(values.abs().max())
