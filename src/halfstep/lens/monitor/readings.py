"""Readings: what a sampler has gathered, made into records once it has arrived on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from halfstep.formats import Format
from halfstep.lens.monitor.records import ActivationRecord, MonitorRecord, ParameterRecord
from halfstep.lens.monitor.sampler import GOOD, MOVABLE, RATIO, STATES, UNMOVED, Sampler, name_of
from halfstep.lens.sketch import ExponentSketch
from halfstep.weights import WeightStore

__all__ = ["Load", "Readings"]


@dataclass
class Load:
    """A record on its way to the host."""

    step: int
    samples: int
    paces: dict[int, tuple[float, float]]
    parts: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


class Readings:
    """Makes records.

    Args:
        sampler: whose gatherings they are.
        store: what stands behind low parameters, or None.
        format: the low format that shares speak of.
    """

    def __init__(self, sampler: Sampler, store: WeightStore | None, format: Format) -> None:
        self._sampler, self._store, self._format = sampler, store, format
        self._largest: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def record(self, load: Load) -> MonitorRecord:
        """Return what `load` says, whose tensors have arrived."""
        sampler, states = self._sampler, self._sampler.low_states()
        parameters: dict[int, ParameterRecord] = {}
        outputs: dict[int, ExponentSketch] = {}
        scale = 1.0
        for numbers, (gradients, weights, sums, returned, *rest) in load.parts:
            seen: list[ExponentSketch | None] = [*ExponentSketch.from_rows(weights)] or [None] * len(numbers)
            found = zip(numbers, ExponentSketch.from_rows(gradients), seen, sums.tolist(), strict=True)
            for number, sketch, weight, totals in found:
                if sketch.count:
                    pace = load.paces.get(number, (0.0, 1.0))
                    low = bool(states.get(number))
                    silent = self._silence(sampler.names[number], sketch, load.samples, totals)
                    parameters[number] = self._parameter(number, (sketch, weight), totals, pace, low, silent)
            for number, sketch in enumerate(ExponentSketch.from_rows(returned)):
                outputs.setdefault(number, ExponentSketch()).merge_(sketch)
            scale = float(rest[0]) if rest else scale
        activations = (
            ActivationRecord(
                module=sampler.leaves[n][0],
                kind=type(sampler.leaves[n][1]).__name__,
                dtype=sampler.dtypes[n],
                sketch=sketch,
            )
            for n, sketch in sorted(outputs.items())
            if sketch.count
        )
        return MonitorRecord(
            step=load.step,
            samples=load.samples,
            scale=scale,
            parameters=tuple(parameters[n] for n in sorted(parameters)),
            activations=tuple(activations),
        )

    def _silence(self, name: str, gradient: ExponentSketch, samples: int, sums: list[float]) -> int:
        """Return for how many samples in a row all of a gradient has been zero, of those that were applied."""
        applied = int(sums[GOOD]) if self._sampler.weights else samples
        self._silent[name] = self._silent.get(name, 0) + applied if gradient.zeros == gradient.count else 0
        return self._silent[name]

    def _parameter(
        self,
        number: int,
        sketches: tuple[ExponentSketch, ExponentSketch | None],
        sums: list[float],
        pace: tuple[float, float],
        low_state: bool,
        silent: int,
    ) -> ParameterRecord:
        gradient, weight = sketches
        name, parameter = self._sampler.names[number], self._sampler.parameters[number]
        store = self._store if self._store is not None and parameter in self._store else None
        stochastic = store is not None and store.name == "stochastic"
        dtype = name_of(parameter.dtype)
        before, now = self._largest.get(name, 0.0), gradient.largest
        self._largest[name] = now
        good, movable = sums[GOOD], sums[MOVABLE]
        return ParameterRecord(
            name=name,
            dtype=dtype,
            precise=dtype if store is None or stochastic else "fp32",
            gradient=gradient,
            weight=weight,
            format=self._format,
            update_ratio=sums[RATIO] / good if good else math.nan,
            swallowed=sums[UNMOVED] / movable if movable and not stochastic else math.nan,
            frozen_state=max(sums[STATES:]) / movable if movable and low_state else math.nan,
            decay=pace[0] if good else 0.0,
            pace=pace[1],
            drift=math.log2(now / before) if now and before else math.nan,
            stochastic=stochastic,
            silent=silent,
        )
