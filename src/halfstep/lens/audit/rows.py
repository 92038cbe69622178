"""Rows: what an audit measures of one operator of one module in one role, added up over calls; masks are left out.

Signs are faults of an operator that its error alone does not show: softmaxes that only the format made one-hot, terms
that vanish in a sum, and integers made of floating numbers (buckets, bins, cells of a grid) that come out otherwise
than in fp32. Each is counted in the `Tally` of the operator to blame.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.formats import FP32, Format, float64_of, format_of
from halfstep.kernels.reference.exponents import LARGEST, merge_
from halfstep.lens.calls import Args, Kwargs, storage, weak_storage
from halfstep.lens.sketch import ExponentSketch, Sketches, number_of
from halfstep.trees import graph_of, tensors

ROLES = ("activation", "activation gradient", "weight", "weight gradient", "update", "state")

UNCHANGED = ("module", "op", "role", "parameter", "line", "calls", "scale", "pace", "cancels", "decides")
PER_STEP = ("numel", "bytes", "casts", "cast_bytes")
"""Numbers of a `Tally` that an `AuditRow` has as they are, and divided by the steps."""

MASKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDS = frozenset(torch.finfo(dtype).max for dtype in MASKED_DTYPES)
"""Largest finite numbers: what overflows becomes inf, so a number that is exactly this was written on purpose."""

HUGE = 1e30  # from here on a constant is a mask also where it is not the end of a format


@dataclass(frozen=True, slots=True)
class Hidden:
    """Which numbers of a tensor are masks: those up to `low`, and those from `high` on."""

    low: float = -math.inf
    high: float = math.inf

    def of(self, tensor: Tensor) -> Tensor:
        """Return where `tensor` is a mask, infinities of a masked side included."""
        found = torch.zeros_like(tensor, dtype=torch.bool)
        if self.low > -math.inf:
            found |= tensor <= self.low
        if self.high < math.inf:
            found |= tensor >= self.high
        return found

    def __or__(self, other: Hidden | None) -> Hidden:
        """Return what hides the masks of both."""
        return self if other is None else Hidden(max(self.low, other.low), min(self.high, other.high))


def hidden_in(tensor: Tensor, largest: float) -> Hidden | None:
    """Return which numbers of a real tensor, whose largest finite magnitude is `largest`, are masks; None: none are."""
    if largest not in ENDS and largest < HUGE:
        return None
    ends = []
    for side in (-1, 1):
        if largest in ENDS:
            found = bool((tensor == side * largest).any())
        else:
            near = tensor[(side * tensor >= largest / 2) & tensor.isfinite()]
            found = near.numel() > 1 and bool((near == side * largest).all())
        ends.append(side * (largest if found else math.inf) / 2)
    return None if ends == [-math.inf, math.inf] else Hidden(*ends)


def added_masks(values: Any) -> Hidden | None:
    """Return the masks among the terms of a sum: constants, which need no gradient. None if there are none."""
    found: Hidden | None = None
    for value in values:
        if isinstance(value, Tensor) and value.dtype in MASKED_DTYPES and not value.requires_grad and value.numel() > 1:
            ends = (abs(float(end)) for end in value.detach().aminmax())
            more = hidden_in(value.detach(), max(filter(math.isfinite, ends), default=0.0))
            found = more if found is None else found | more
    return found


@dataclass(slots=True)
class ErrorSums:
    """How far tensors are from what they should be: sums over elements, added up over calls."""

    difference: float = 0.0  # sum of squared differences, where both are finite
    reference: float = 0.0  # sum of squares of what should be
    worst: float = 0.0  # largest relative error of one call
    count: int = 0  # elements compared
    flushed: int = 0  # elements that are zero and should not be: too small for the format
    lost: int = 0  # elements that are not finite, or at the format's limit, and should be finite and within it

    @torch.no_grad()
    def add(
        self, actual: Tensor, wanted: Tensor, form: Format, scale: float = 1.0, *, hidden: Hidden | None = None
    ) -> float:
        """Return the relative error of `actual`, numbers of `form` that carry a factor `scale`, to `wanted` without."""
        wide = torch.float64 if wanted.dtype is torch.float64 else torch.float32
        found, wanted = actual.to(wide), wanted.to(wide)
        if scale != 1.0:
            wanted = wanted * scale
        if hidden is not None:
            seen = ~(hidden.of(found) | hidden.of(wanted))
            found, wanted = found[seen], wanted[seen]
        apart = found - wanted
        difference, reference = _square(apart), _square(wanted)
        if not math.isfinite(difference) or not math.isfinite(reference):
            wanted = torch.where(wanted.abs() > HUGE, math.inf, wanted)
            both = found.isfinite() & wanted.isfinite()
            self.lost += int((~found.isfinite() & wanted.isfinite()).sum())
            apart, wanted = float64_of(apart[both]), torch.where(wanted.isfinite(), wanted, 0.0)
            difference, reference = _square(apart), _square(float64_of(wanted))
        if not form.has_inf:
            self.lost += int(((found.abs() >= form.max) & (wanted.abs() > form.max)).sum())
        if form.is_narrow:
            self.flushed += int(((found == 0) & (wanted != 0) & (wanted.abs() < form.smallest_normal)).sum())
        self.count += found.numel()
        if scale != 1.0:
            difference, reference = difference / scale**2, reference / scale**2
        self.difference += difference
        self.reference += reference
        error = _ratio(difference, reference)
        self.worst = max(self.worst, error)
        return error

    @property
    def error(self) -> float:
        """The norm of all differences over that of what should be there; nan of nothing."""
        return _ratio(self.difference, self.reference) if self.count else math.nan


def _square(tensor: Tensor) -> float:
    flat = tensor.reshape(-1)
    return float(flat.dot(flat))


def _ratio(difference: float, reference: float) -> float:
    if reference:
        return math.sqrt(difference / reference)
    return math.inf if difference else 0.0


def form_of(tensor: Tensor) -> Format:
    """Return the format whose numbers `tensor` holds; fp32 for float64, which has none here."""
    return FP32 if tensor.dtype is torch.float64 else format_of(tensor.dtype)


@dataclass(slots=True)
class Tally:
    """One row while it is made; see `AuditRow`."""

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
    sketch: Sketches | None = None  # as stored
    wide: Sketches | None = None  # as it should be, without a loss scale, where the format may have lost some
    local: ErrorSums = field(default_factory=ErrorSums)  # against the same operator in a wide format
    whole: ErrorSums = field(default_factory=ErrorSums)  # against the fp32 run of the model
    summed: ErrorSums = field(default_factory=ErrorSums)  # sums of gradients against fp32 sums of the same
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)  # "swallowed", ... -> its part, and its whole
    masked: int = 0
    given: float = 0.0
    pace: float = 0.0
    cancels: bool = False
    decides: bool = False
    stochastic: bool = False

    def see(self, tensor: Tensor, form: Format | None = None) -> Hidden | None:
        """Add one tensor; return which of its numbers are masks, which are left out of the sketch."""
        self.form = form or form_of(tensor)
        self.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        self.calls += 1
        self.numel += tensor.numel()
        self.bytes += tensor.numel() * tensor.element_size()
        self.sketch, hidden, count = _merged(self.sketch, tensor)
        self.masked += count
        return hidden

    def add_wanted(self, tensor: Tensor) -> None:
        """Add one tensor as it should be."""
        self.wide, _, _ = _merged(self.wide, tensor)

    def add_share(self, name: str, part: float, whole: float) -> None:
        """Add to one of the shares."""
        parts, wholes = self.shares.get(name, (0, 0))
        self.shares[name] = parts + part, wholes + whole

    def row(self, steps: int, seconds: float, rule: str, reason: str) -> AuditRow:
        """Return the finished row over `steps` steps whose operators took `seconds`."""
        assert self.sketch is not None
        (sketch,), form, local = self.sketch.read(), self.form, self.local
        count = max(sketch.count + self.masked, 1)
        shares: dict[str, Any] = {name: part / whole for name, (part, whole) in self.shares.items() if whole}
        return AuditRow(
            **shares,
            **{name: getattr(self, name) for name in UNCHANGED},
            **{name: round(getattr(self, name) / steps) for name in PER_STEP},
            dtype=", ".join(sorted(self.dtypes)),
            format=form.name,
            rule=rule,
            reason=reason,
            time=self.seconds / seconds if seconds else 0.0,
            amax=sketch.largest,
            smallest=sketch.smallest if sketch.largest else 0.0,
            headroom=sketch.headroom(form),
            zeros=sketch.zeros / count,
            subnormal=sum(sketch.subnormal(form)) / 2,
            underflow=local.flushed / max(local.count, 1),
            overflow=local.lost / max(local.count, 1),
            nonfinite=(sketch.infs + sketch.nans) / count,
            masked=self.masked / count,
            error=local.error,
            worst=local.worst if local.count else math.nan,
            accumulated=self.whole.error,
            given=self.given if self.whole.count else math.nan,
            summed=self.summed.error,
            missing=self.whole.flushed / max(self.whole.count, 1),
            sketch=sketch,
            wide=None if self.wide is None else self.wide.read()[0],
        )


def _merged(sketch: Sketches | None, tensor: Tensor) -> tuple[Sketches, Hidden | None, int]:
    """Return `sketch`, made if there is none, with `tensor` added but for its masks; these; and how many they are."""
    tensor = Tensor.detach(tensor)
    made, hidden, count = Sketches.of(tensor), None, 0
    if tensor.dtype in MASKED_DTYPES and tensor.layout is torch.strided:
        hidden = hidden_in(tensor, number_of(int(made.rows[0, LARGEST])))
    if hidden is not None:
        seen = tensor[~hidden.of(tensor)]
        made, count = Sketches.of(seen), tensor.numel() - seen.numel()
    if sketch is not None:
        merge_(sketch.rows, made.rows)
    return sketch or made, hidden, count


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """What an audit found about one operator of one module in one role.

    Shares are fractions from 0 to 1; errors are relative: the norm of the differences over the norm of what should be
    there. nan: unknown.

    Attributes:
        op: public short name of the operator; for an update the optimizer's class, for its state with the state's name
            ("Adam.exp_avg_sq"), "buffer" for a low buffer.
        masked: share of elements that are masks: constants at the end of a format (``torch.finfo(dtype).min``), and
            what has been added to them. No other number of the row counts them.
        error, worst: against the same operator in the shadow format on the same inputs: what this operator alone loses,
            in all calls, and the largest of one. Of an activation gradient: of what its backward pass makes of it.
        summed: of a gradient over the micro-batches of a window: against the fp32 sum of the same gradients.
        swallowed, swallowed_mass: share of changes smaller than half an ulp of what they change, of an update or a
            state, and of their size. Of a sum: of the elements of one term that are too small to change the other.
        pace: of a state that is a moving average: the share of it that is new at each step; 0.0 if not known.
        cancels: whether the gradient is a sum that would be zero but for rounding: no digit of it means anything.
        otherwise: share of the integers that are made of it, and choose other numbers, that are not those of fp32.
        saturated: share of a softmax's rows, or of a sigmoid's or tanh's elements, that only the format made one-hot.
    """

    module: str  # dotted name, "" for the root or code outside of it
    op: str
    role: str  # one of `ROLES`: what the operator gives, what comes back to it, and so on
    parameter: str = ""  # dotted name of the parameter, or ""
    calls: int  # tensors seen in all steps
    dtype: str  # torch's, as in "bfloat16"; several with a comma where calls differ
    format: str  # the format of the numbers; differs from dtype where a format is simulated
    rule: str = ""  # the policy's rule for the operator, "" for none
    reason: str = ""  # why it has this rule
    line: str = ""  # the user's line that calls it, "file.py:12 source text"
    numel: int  # elements a step
    bytes: int  # bytes a step
    casts: int = 0  # casts of its arguments a step
    cast_bytes: int = 0  # bytes that these write in a step
    time: float = 0.0  # share of the time of all operators, forward (activation) or backward (activation gradient)
    amax: float  # largest finite magnitude
    smallest: float  # smallest magnitude that is not zero
    headroom: float  # bits between amax and the largest number of the format
    zeros: float  # share of zeros
    subnormal: float  # share of numbers below the format's smallest normal one
    underflow: float = 0.0  # share of elements that are zero and would not be in a wide format, on the same inputs
    overflow: float = 0.0  # share of elements that are not finite, or saturated, and would not be in a wide format
    nonfinite: float = 0.0  # share of elements that are inf or nan, deliberate ones (masks) included
    masked: float = 0.0
    error: float = math.nan
    worst: float = math.nan
    accumulated: float = math.nan  # against the fp32 run of the whole model
    given: float = math.nan  # the same of its inputs, the worst of them; nan where they come from nowhere
    summed: float = math.nan
    missing: float = 0.0  # share of elements that are zero and are not in the fp32 run
    swallowed: float = math.nan
    swallowed_mass: float = math.nan
    pace: float = 0.0
    cancels: bool = False
    decides: bool = False  # whether it is given integers or booleans, which may have come out otherwise in fp32
    otherwise: float = math.nan
    saturated: float = math.nan
    scale: float = 1.0  # the loss scale that gradients carry
    sketch: ExponentSketch = field(repr=False, compare=False)  # of the numbers as stored
    wide: ExponentSketch | None = field(default=None, repr=False, compare=False)  # without format and loss scale

    @property
    def form(self) -> Format:
        """The format of its numbers."""
        return format_of(self.format)

    def record(self) -> dict[str, Any]:
        """Return the row as plain values, without sketches: a record for a DataFrame."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in {"sketch", "wide"}}


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
    return f"{value:.3g}" if math.isfinite(value) else ""


def cells(row: AuditRow) -> dict[str, str]:
    """Return the row as text, by `COLUMNS` and those that a page has besides."""
    shares = ("underflow", "subnormal", "error", "accumulated", "time")
    return {
        "module": row.module or "(root)",
        "operator": f"{row.op} {row.parameter.rpartition('.')[2]}" if row.parameter else row.op,
        "role": row.role,
        "format": row.format,
        "amax": three_digits(row.amax),
        "headroom": f"{row.headroom:.1f}" if math.isfinite(row.headroom) else "",
        "zero": percent(row.zeros),
        "inf, nan": percent(row.nonfinite),
        **{name: percent(getattr(row, name)) for name in shares},
        "casts": str(row.casts or ""),
        "kB": f"{row.bytes / 1e3:.3g}",
        "rule": row.rule,
    }


SUMS = frozenset({"add", "sub"})
"""Operators of two terms: one may be too small for the other, or a mask that is written onto it."""

NEAR_ONE = 2.0**-12  # a number of fp32 this far below 1 is not yet 1; in fp16 and bf16 it may be


def is_index(tensor: Tensor) -> bool:
    """Return whether `tensor` holds integers or booleans."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def note_signs(tally: Tally, op: str, args: Args, kwargs: Kwargs, output: Tensor, wide: Tensor) -> None:
    """Count in `tally` the faults in `output`, the result of one call in a low format; `wide` is its shadow's."""
    if op in {"softmax", "sigmoid", "tanh"}:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        _saturation(tally, op, output.detach(), wide, dim if isinstance(dim, int) else -1)
    elif op in SUMS and output.requires_grad and output.numel() > 1:
        _swallowed_addends(tally, output.detach(), args)


def _saturation(tally: Tally, op: str, output: Tensor, wide: Tensor, dim: int) -> None:
    """Count what the format alone makes 1: rows of a softmax, elements of a sigmoid or tanh.

    A softmax is one-hot if a probability is 1 that is not in fp32, or if all others are 0 that are not.
    """
    rows = op == "softmax" and output.dim() > 0
    found, wanted = (output.amax(dim), wide.amax(dim)) if rows else (output.abs(), wide.abs())
    hit = (found == 1) & (wanted < 1 - NEAR_ONE)
    if rows:
        hit |= ((output != 0).sum(dim) == 1) & ((wide != 0).sum(dim) > 1)
    tally.add_share("saturated", int(hit.sum()), found.numel())


NOTABLE = 0.1  # in a smaller share of a sum's elements a lost term is not counted
MASK = -1e4  # a term from here down is a mask


def _swallowed_addends(tally: Tally, output: Tensor, args: tuple[Any, ...]) -> None:
    """Count elements of a sum that are exactly one of its terms although the other is not zero.

    Of the two terms the one counts that loses more of its size. A term that is computed from the other alone, such as
    that of a series, carries no new information and may be lost.
    """
    terms = [a for a in args[:2] if isinstance(a, Tensor) and a.is_floating_point() and a.numel() > 1]
    if len(terms) < 2:
        return
    lost: tuple[float, float, int, int] = (0.0, 1.0, 0, 1)
    size = output.abs()
    for term, other in (terms, terms[::-1]):
        low, rest = term.detach(), other.detach()
        same = size == rest.abs()
        if int(torch.count_nonzero(same)) < NOTABLE * output.numel() or _follows(term, other):
            continue
        counts = ((low != 0) & (rest > MASK) & rest.isfinite()).expand_as(output)
        gone = counts & same
        sizes = low.float().abs().nan_to_num_(0.0, 0.0, 0.0).expand_as(output)
        mass = float((sizes * counts).sum())
        found = float((sizes * gone).sum()), mass, int(gone.sum()), int(counts.sum())
        if mass and found[0] / mass >= lost[0] / lost[1]:
            lost = found
    if not lost[2]:
        lost = (0.0, float(torch.linalg.vector_norm(terms[1].detach().float(), 1)), 0, output.numel())
    tally.add_share("swallowed_mass", lost[0], lost[1])
    tally.add_share("swallowed", lost[2], lost[3])


def _follows(term: Tensor, other: Tensor) -> bool:
    """Return whether everything that `term` depends on with a gradient goes through `other`."""
    known = term.grad_fn is not None and other.grad_fn is not None
    return known and not any(node.name().endswith("AccumulateGrad") for node in graph_of(term, without=other))


class Integers:
    """Follows integers from the conversion that makes them to what they choose, in one step."""

    def __init__(self) -> None:
        self._makers: dict[StorageWeakRef, Tally] = {}
        # place -> tensor, kept so that its memory is not given to another; whose numbers it is made of; how many differ
        self._known: dict[int, tuple[Tensor, Tally, int, int]] = {}
        self._counted: set[int] = set()

    def made(self, output: Tensor, tally: Tally) -> None:
        """Note that the numbers of `output` are those of `tally`."""
        self._makers[weak_storage(output)] = tally

    def converted(self, source: Any, result: Tensor, wanted: Tensor | None) -> None:
        """Compare integers that have been made of `source` with those of the fp32 run."""
        dense = isinstance(source, Tensor) and source.layout is torch.strided and result.layout is torch.strided
        if not dense or wanted is None or wanted.shape != result.shape or not result.numel():
            return
        tally = self._makers.get(weak_storage(source)) if source.is_floating_point() else None
        if tally is not None:
            self._known[storage(result)] = result, tally, int((result != wanted).sum()), result.numel()

    def follow(self, values: Any, result: Any) -> None:
        """Follow integers through an operator on integers."""
        if self._known and isinstance(result, Tensor) and result.layout is torch.strided and is_index(result):
            for tensor in tensors(values):
                known = self._known.get(storage(tensor))
                if known is not None:
                    self._known.setdefault(storage(result), (result, *known[1:]))

    def choose(self, given: Iterable[Tensor]) -> None:
        """Count integers that choose floating numbers, once."""
        for tensor in given if self._known else ():
            known = self._known.get(storage(tensor)) if is_index(tensor) else None
            if known is not None and storage(tensor) not in self._counted:
                self._counted.add(storage(tensor))
                known[1].add_share("otherwise", *known[2:])
