"""Symptoms: what in a record of `Monitor` says that precision is being lost, and what to do about it.

Thresholds are for shares that a healthy run does not reach; each says why it is where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.formats import Format, format_of
from halfstep.lens.records import ActivationRecord, MonitorRecord, ParameterRecord
from halfstep.lens.sketch import ExponentSketch

__all__ = ["Symptom", "symptoms"]

SUBNORMAL = 0.25
"""Of the numbers that are left: a gradient spreads over some ten bits, so much in the last ones means many below."""

SUBNORMAL_BESIDE_ZEROS = 0.1
ZEROS = 0.5
"""Where half of a gradient is zero, which dropout and ReLU do too, less of the rest has to be subnormal."""

SWALLOWED = 0.5
"""Half of the updates changed nothing. In fp32 that is rare; bf16 weights without masters reach it in fine-tuning."""

ENDING = 0.1
"""A schedule that ends near zero ends with updates that even fp32 swallows, and nothing is wrong with that."""

FROZEN = 0.5
"""Half of the entries of a low state stay as they are although there is a gradient."""

SLACK = 64
"""Averages over ranks and micro-batches divide numbers of a format by so much at most."""

NOISE = 4
"""Roundings, as a factor of eps: a gradient so much smaller than another one of its module is what rounding left of
zero, such as that of a bias before BatchNorm."""

NAMES = {
    "underflow": "gradients or activations become zero",
    "swallowed_update": "updates are too small to change weights",
    "low_state": "an optimizer state is too coarse to move",
    "saturating": "numbers are at the end of their format",
    "bad_state": "weights are inf or nan",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """One thing that is wrong in one place.

    Attributes:
        kind: a key of `NAMES`.
        role: "gradient", "weight", "update", "state" or "activation".
        where: a parameter's name or a module's path.
        share: how much of it is affected, 0 to 1.
        text: what was seen.
        remedy: what to change.
    """

    kind: str
    role: str
    where: str
    share: float
    text: str
    remedy: str


def symptoms(record: MonitorRecord, format: Format) -> Iterator[Symptom]:
    """Iterate over what is wrong in `record`, a run whose low format is `format`."""
    near_zero = any(_subnormal(p.gradient, format) > 0 and _rounded(p.gradient, format) for p in record.parameters)
    largest: dict[str, float] = {}
    for parameter in record.parameters:
        module = parameter.name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), parameter.amax)
    for parameter in record.parameters:
        if parameter.amax >= NOISE * format.eps * largest[parameter.name.rpartition(".")[0]]:
            yield from _of_gradient(parameter, format, near_zero)
        yield from _of_update(parameter)
        yield from _of_weight(parameter)
    for activation in record.activations:
        yield from _of_activation(activation, format)


def _of_gradient(parameter: ParameterRecord, format: Format, near_zero: bool) -> Iterator[Symptom]:
    sketch, name = parameter.gradient, parameter.name
    if not sketch.count or format.smallest_normal < 2.0**-100:  # fp32's and bf16's range
        return
    zeros, low = parameter.zeros, _subnormal(sketch, format)
    if sketch.nonzero and _rounded(sketch, format):
        if low >= SUBNORMAL or (low >= SUBNORMAL_BESIDE_ZEROS and zeros >= ZEROS):
            bits = math.log2(sketch.best_scale(format))
            raised = f"multiply the loss scale by at least 2**{bits:g}" if bits > 0 else "use bf16"
            yield Symptom(
                kind="underflow",
                role="gradient",
                where=name,
                share=low,
                text=f"{low:.0%} of its gradient is subnormal in {format.name} and {zeros:.0%} is zero already",
                remedy=f"{raised} (scale='auto' raises it by itself), or give its module the rule 'fp32'",
            )
    elif zeros == 1.0 and near_zero:
        yield Symptom(
            kind="underflow",
            role="gradient",
            where=name,
            share=1.0,
            text=f"all of its gradient is zero, and other gradients are near the smallest number of {format.name}",
            remedy="raise the loss scale (scale='auto' does by itself), or use bf16",
        )
    if sketch.nonzero and not format.has_inf and sketch.largest == format.max:
        yield _clipped(name, "gradient", format)


def _of_update(parameter: ParameterRecord) -> Iterator[Symptom]:
    name, low = parameter.name, parameter.precise != "fp32"
    ending = not low and parameter.pace < ENDING
    if not parameter.stochastic and not ending and parameter.swallowed >= SWALLOWED:
        yield Symptom(
            kind="swallowed_update",
            role="update",
            where=name,
            share=parameter.swallowed,
            text=f"{parameter.swallowed:.0%} of its updates are below half an ulp of its {parameter.precise} weights",
            remedy=(
                "keep precise weights: policy field master='auto' (or 'split', 'kahan', 'stochastic')"
                if low
                else "raise the learning rate, or train fewer, smaller numbers: even fp32 does not hold these updates"
            ),
        )
    half_ulp = format_of(parameter.precise).eps / 4 if parameter.precise in ("bf16", "fp16") else 0.0
    if not parameter.stochastic and 0 < parameter.decay < half_ulp and _alone(parameter):
        yield Symptom(
            kind="swallowed_update",
            role="update",
            where=name,
            share=1.0,
            text=f"its weight decay takes {parameter.decay:.1g} of a weight, below half an ulp of {parameter.precise}",
            remedy="keep precise weights: policy field master='auto' (or 'split', 'kahan', 'stochastic')",
        )
    if parameter.frozen_state >= FROZEN:
        yield Symptom(
            kind="low_state",
            role="state",
            where=name,
            share=parameter.frozen_state,
            text=f"{parameter.frozen_state:.0%} of a low optimizer state does not move although there is a gradient",
            remedy="keep optimizer states in fp32, or state='low', which rounds stochastically to bf16",
        )


def _alone(parameter: ParameterRecord) -> bool:
    """Return whether weight decay is most of what moves the weight: then its loss is not hidden by other updates."""
    return not parameter.gradient.nonzero or parameter.update_ratio < parameter.decay


def _of_weight(parameter: ParameterRecord) -> Iterator[Symptom]:
    sketch = parameter.weight
    if sketch is None:
        return
    if sketch.infs or sketch.nans:
        share = (sketch.infs + sketch.nans) / sketch.count
        yield Symptom(
            kind="bad_state",
            role="weight",
            where=parameter.name,
            share=share,
            text=f"{sketch.infs} of its weights are infinite and {sketch.nans} are nan",
            remedy="go back to a checkpoint from before; no later step can mend them",
        )
    if parameter.dtype != "fp32" and (room := sketch.headroom(parameter.dtype)) < 1:
        yield _near_end(parameter.name, "weight", room, format_of(parameter.dtype))


def _of_activation(activation: ActivationRecord, format: Format) -> Iterator[Symptom]:
    sketch, name = activation.sketch, activation.module
    if activation.dtype != "fp32":
        format = format_of(activation.dtype)
        if (room := sketch.headroom(format)) < 1:
            yield _near_end(name, "activation", room, format)
    elif sketch.nonzero and not format.has_inf and sketch.largest == format.max:
        yield _clipped(name, "activation", format)
    low = _subnormal(sketch, format)
    if format.smallest_normal > 2.0**-100 and _rounded(sketch, format) and low >= SUBNORMAL:
        yield Symptom(
            kind="underflow",
            role="activation",
            where=name,
            share=low,
            text=f"{low:.0%} of what it returns is subnormal in {format.name}",
            remedy="give the module the rule 'fp32', use bf16, or scale its inputs",
        )


def _near_end(where: str, role: str, room: float, format: Format) -> Symptom:
    return Symptom(
        kind="saturating",
        role=role,
        where=where,
        share=1.0,
        text=f"the largest {role} is {room:.2f} bits below the largest number of {format.name}, {format.max:g}",
        remedy="give the module the rule 'fp32', or use bf16",
    )


def _clipped(where: str, role: str, format: Format) -> Symptom:
    return Symptom(
        kind="saturating",
        role=role,
        where=where,
        share=1.0,
        text=f"the largest {role} is exactly {format.max:g}, where {format.name} cuts off",
        remedy="lower the scale of these numbers, or give the module a wider format by a module rule",
    )


def _subnormal(sketch: ExponentSketch, format: Format) -> float:
    return sketch.subnormal(format)[1]


def _rounded(sketch: ExponentSketch, format: Format) -> bool:
    """Return whether the numbers look like numbers of `format`: none is (much) smaller than its smallest."""
    return bool(sketch.nonzero) and sketch.smallest >= format.smallest_subnormal / SLACK
