"""Rows: what an audit measures of one operator of one module in one role, added up over calls."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import FP32, Format, format_of
from halfstep.lens.audit.comparison import ErrorSums, Hidden, merged
from halfstep.lens.sketch import ExponentSketch, Sketches

__all__ = ["COLUMNS", "ROLES", "AuditRow", "Tally", "cells", "form_of", "percent", "row_of", "three_digits"]

ROLES = ("activation", "activation gradient", "weight", "weight gradient", "update", "state")

UNCHANGED = ("module", "op", "role", "parameter", "line", "calls", "scale", "pace", "cancels", "decides")
PER_STEP = ("numel", "bytes", "casts", "cast_bytes")
"""Numbers of a `Tally` that an `AuditRow` has as they are, and divided by the steps."""


def form_of(tensor: Tensor, otherwise: Format = FP32) -> Format:
    """Return the format whose numbers `tensor` holds; `otherwise` for float64, which has none here."""
    return otherwise if tensor.dtype is torch.float64 else format_of(tensor.dtype)


@dataclass(slots=True)
class Tally:
    """One row while it is made.

    Attributes:
        form: the format of its numbers.
        local: against the same operator in a wide format on the same inputs.
        whole: against the fp32 run of the whole model.
        sketch: of the numbers as they are stored.
        wide: of the numbers as they should be, without a loss scale, where the format may have lost some.
    """

    module: str
    op: str
    role: str
    parameter: str = ""
    line: str = ""
    form: Format = FP32
    dtypes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    numel: int = 0
    bytes: int = 0
    casts: int = 0
    cast_bytes: int = 0
    seconds: float = 0.0
    scale: float = 1.0
    sketch: Sketches | None = None
    wide: Sketches | None = None
    local: ErrorSums = field(default_factory=ErrorSums)
    whole: ErrorSums = field(default_factory=ErrorSums)
    moved: int = 0
    swallowed: int = 0
    mass: float = 0.0
    swallowed_mass: float = 0.0
    saturated: int = 0
    rows: int = 0
    masked: int = 0
    decided: int = 0
    otherwise: int = 0
    given: float = 0.0
    pace: float = 0.0
    cancels: bool = False
    decides: bool = False
    stochastic: bool = False
    summed: ErrorSums = field(default_factory=ErrorSums)

    def see(self, tensor: Tensor, form: Format | None = None) -> Hidden | None:
        """Add one tensor; return which of its numbers are masks, which are left out of the sketch."""
        self.form = form or form_of(tensor)
        self.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        self.calls += 1
        self.numel += tensor.numel()
        self.bytes += tensor.numel() * tensor.element_size()
        self.sketch, hidden, count = merged(self.sketch, tensor)
        self.masked += count
        return hidden

    def add_wanted(self, tensor: Tensor) -> None:
        """Add one tensor as it should be."""
        self.wide, _, _ = merged(self.wide, tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """What an audit found about one operator of one module in one role.

    Shares are fractions from 0 to 1; errors are relative: the norm of the differences over the norm of what should be
    there. nan: unknown.

    Attributes:
        module: dotted name, "" for the root or code outside of it.
        op: public short name of the operator; for an update the optimizer's class, for its state with the state's name
            ("Adam.exp_avg_sq"), "buffer" for a low buffer.
        role: one of `ROLES`: activation (what the operator gives), activation gradient (what comes back to it), weight,
            weight gradient, update (of a weight), state (of the optimizer, or a low buffer).
        parameter: dotted name of the parameter, or "".
        calls: tensors seen in all steps.
        dtype: torch's, as in "bfloat16"; several with a comma where calls differ.
        format: the format of the numbers; differs from dtype where a format is simulated.
        rule: the policy's rule for the operator, "" for none.
        reason: why it has that rule.
        line: the user's line that calls it, "file.py:12 source text".
        numel: elements a step.
        bytes: bytes a step.
        casts: casts of its arguments a step.
        cast_bytes: bytes written by these casts a step.
        time: share of the time of all operators, forward (activation) or backward (activation gradient).
        amax: largest finite magnitude.
        smallest: smallest magnitude that is not zero.
        headroom: bits between amax and the largest number of the format.
        zeros: share of zeros.
        subnormal: share of numbers below the format's smallest normal one.
        underflow: share of elements that are zero and would not be in a wide format, on the same inputs.
        overflow: share of elements that are not finite, or saturated, and would not be in a wide format.
        nonfinite: share of elements that are inf or nan, deliberate ones (masks) included.
        masked: share of elements that are masks: constants at the end of a format (``torch.finfo(dtype).min``), and
            what has been added to them. No other number of the row counts them.
        error: against the same operator in the shadow format on the same inputs: what this operator alone loses. Of an
            activation gradient: of the gradients that its backward pass makes of it.
        worst: the largest such error of one call.
        accumulated: against the fp32 run of the whole model.
        given: the same of its inputs, the worst of them; nan where they come from nowhere.
        summed: of a gradient over the micro-batches of a window: against the fp32 sum of the same gradients.
        missing: share of elements that are zero and are not in the fp32 run.
        swallowed: share of changes smaller than half an ulp of what they change; of an update or a state. Of a sum: the
            share of the elements of one term that are too small to change the other.
        swallowed_mass: the same, weighted by the size of the change.
        pace: of a state that is a moving average: the share of it that is new at each step; 0.0 if not known.
        cancels: whether the gradient is a sum that would be zero but for rounding: no digit of it means anything.
        decides: whether it is given integers or booleans, which may have come out otherwise in fp32.
        otherwise: share of the integers that are made of it, and choose other numbers, that are not those of fp32.
        saturated: share of a softmax's rows, or of a sigmoid's or tanh's elements, that only the format made one-hot.
        scale: the loss scale that gradients carry.
        sketch: of the numbers as stored; `wide`: as they would be without the format and the loss scale, or None.
    """

    module: str
    op: str
    role: str
    parameter: str = ""
    calls: int
    dtype: str
    format: str
    rule: str = ""
    reason: str = ""
    line: str = ""
    numel: int
    bytes: int
    casts: int = 0
    cast_bytes: int = 0
    time: float = 0.0
    amax: float
    smallest: float
    headroom: float
    zeros: float
    subnormal: float
    underflow: float = 0.0
    overflow: float = 0.0
    nonfinite: float = 0.0
    masked: float = 0.0
    error: float = math.nan
    worst: float = math.nan
    accumulated: float = math.nan
    given: float = math.nan
    summed: float = math.nan
    missing: float = 0.0
    swallowed: float = math.nan
    swallowed_mass: float = math.nan
    pace: float = 0.0
    cancels: bool = False
    decides: bool = False
    otherwise: float = math.nan
    saturated: float = math.nan
    scale: float = 1.0
    sketch: ExponentSketch = field(repr=False, compare=False)
    wide: ExponentSketch | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """Return the row as plain values, without sketches: a record for a DataFrame."""
        names = (f.name for f in dataclasses.fields(self) if f.name not in {"sketch", "wide"})
        return {name: getattr(self, name) for name in names}


def row_of(tally: Tally, steps: int, seconds: float, rule: str, reason: str) -> AuditRow:
    """Return the finished row of `tally` over `steps` steps whose operators took `seconds`."""
    assert tally.sketch is not None
    (sketch,), form = tally.sketch.read(), tally.form
    count = max(sketch.count + tally.masked, 1)
    changes = tally.moved > 0
    return AuditRow(
        **{name: getattr(tally, name) for name in UNCHANGED},
        **{name: round(getattr(tally, name) / steps) for name in PER_STEP},
        dtype=", ".join(sorted(tally.dtypes)),
        format=form.name,
        rule=rule,
        reason=reason,
        time=tally.seconds / seconds if seconds else 0.0,
        amax=sketch.largest,
        smallest=sketch.smallest if sketch.largest else 0.0,
        headroom=sketch.headroom(form),
        zeros=sketch.zeros / count,
        subnormal=sum(sketch.subnormal(form)) / 2,
        underflow=tally.local.share(tally.local.flushed),
        overflow=tally.local.share(tally.local.lost),
        nonfinite=(sketch.infs + sketch.nans) / count,
        masked=tally.masked / count,
        error=tally.local.error,
        worst=tally.local.worst if tally.local.count else math.nan,
        accumulated=tally.whole.error,
        given=tally.given if tally.whole.count else math.nan,
        summed=tally.summed.error,
        missing=tally.whole.share(tally.whole.flushed),
        swallowed=tally.swallowed / tally.moved if changes else math.nan,
        swallowed_mass=tally.swallowed_mass / tally.mass if changes and tally.mass else math.nan,
        otherwise=tally.otherwise / tally.decided if tally.decided else math.nan,
        saturated=tally.saturated / tally.rows if tally.rows else math.nan,
        sketch=sketch,
        wide=None if tally.wide is None else tally.wide.read()[0],
    )


COLUMNS = ("module", "operator", "role", "format", "amax", "headroom", "zero", "inf, nan", "underflow", "subnormal",
           "error", "accumulated", "time")  # fmt: skip


def percent(share: float) -> str:
    """Return a share in per cent with two digits; "" for none or unknown."""
    if math.isnan(share) or share <= 0.0:
        return ""
    if share >= 0.0995:
        return f"{100 * min(share, 99.9):.0f} %"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "<0.001 %"


def three_digits(value: float) -> str:
    """Return a number with three digits; "" if it is unknown."""
    if math.isnan(value) or math.isinf(value):
        return ""
    return f"{value:.3g}"


def cells(row: AuditRow) -> tuple[str, ...]:
    """Return the row as text, a cell for each of `COLUMNS`."""
    operator = f"{row.op} {row.parameter.rpartition('.')[2]}" if row.parameter else row.op
    return (
        row.module or "(root)",
        operator,
        row.role,
        row.format,
        three_digits(row.amax),
        f"{row.headroom:.1f}" if math.isfinite(row.headroom) else "",
        percent(row.zeros),
        percent(row.nonfinite),
        percent(row.underflow),
        percent(row.subnormal),
        percent(row.error),
        percent(row.accumulated),
        percent(row.time),
    )
