"""Records: what `Monitor` has seen, as plain values, and as histograms of TensorBoard over binary exponents.

A bar over e stands for the numbers with ``2**e <= |x| < 2**(e + 1)``. Zeros, infinities and nan have no exponent; their
shares are curves, like underflow, headroom and what updates do.

`symptoms` finds in a record where precision is being lost, and what to do about it. Its thresholds are shares that a
healthy run does not reach; each has its reason beside it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import Format, format_of
from halfstep.lens.finding import ROOM, Finding
from halfstep.lens.rise import GRADIENTS, LOSS, WEIGHTS, Rise
from halfstep.lens.sketch import Bounds, ExponentSketch
from halfstep.step.parts.silent import NOISE

NEEDED = ("add_scalar", "add_histogram_raw")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRecord:
    """One parameter over the samples of a record. nan: not sampled, or not available.

    Attributes:
        precise: format of the value that the optimizer moves: "fp32" where masters or halves stand behind low weights.
        swallowed: share of elements with a gradient whose precise value an update did not change: it was smaller than
            half an ulp. nan under stochastic rounding, which makes up for it, and at a learning rate of 0.
        frozen_state: share of elements with a gradient for which a low optimizer state stayed as it was; the largest
            over its states. nan without low states, or where halfstep rounds them stochastically.
        decay: what an update takes off a weight relative to it, learning rate times weight decay (decoupled or not).
        silent: samples in a row, over records, in which all of its gradient was zero, though updates were applied.
    """

    name: str  # dotted name
    dtype: str  # format its weight is stored in, e.g. "bf16"
    precise: str
    gradient: ExponentSketch  # sketch of the gradient as the backward pass left it, with the loss scale in it
    weight: ExponentSketch | None  # sketch of the precise value before the update; None if weights are not watched
    format: Format  # the low format of shares
    update_ratio: float = math.nan  # norm of the update over norm of the weight, mean over samples
    swallowed: float = math.nan
    frozen_state: float = math.nan
    decay: float = 0.0
    pace: float = 1.0  # its learning rate over the largest it has had, 1 if that is a tensor
    drift: float = math.nan  # bits by which the largest gradient grew since the record before
    stochastic: bool = False  # whether the weight is rounded stochastically
    silent: int = 0

    @property
    def underflow(self) -> Bounds:
        """Share of the gradient that rounds to zero in the low format, at the scale it has.

        0 for a gradient that was computed in that format: then what was lost is among `zeros`.
        """
        return self.gradient.underflow(self.format)

    @property
    def subnormal(self) -> Bounds:
        """Share of the gradient that is subnormal in the low format: precision is lost there, and zero is near."""
        return self.gradient.subnormal(self.format)

    @property
    def headroom(self) -> float:
        """Bits from the largest gradient to the largest number of the low format, at the scale it has."""
        return self.gradient.headroom(self.format)

    @property
    def zeros(self) -> float:
        """Share of the gradient's elements that are zero."""
        return self.gradient.zeros / self.gradient.count if self.gradient.count else 0.0

    @property
    def nonfinite(self) -> float:
        """Share of the gradient's elements that are inf or nan."""
        return (self.gradient.infs + self.gradient.nans) / self.gradient.count if self.gradient.count else 0.0

    @property
    def amax(self) -> float:
        """Largest finite magnitude of the gradient, scaled."""
        return self.gradient.largest


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationRecord:
    """What one leaf module has returned over the samples of a record."""

    module: str  # dotted path
    kind: str  # name of its class
    dtype: str  # format of its last output's dtype, e.g. "fp16"
    sketch: ExponentSketch  # of all floating tensors it returned


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorRecord:
    """What was sampled since the record before."""

    step: int  # updates made when the last sample was taken
    samples: int  # updates sampled
    scale: float  # loss scale of the last sample
    parameters: tuple[ParameterRecord, ...]  # those that had a gradient
    activations: tuple[ActivationRecord, ...] = field(default=())  # modules that ran, if activations are watched

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the record but `step`, by name: ``scale``, ``underflow/NAME``, ``zeros/NAME``, ..."""
        found = {"scale": self.scale}
        for p in self.parameters:
            found |= {f"underflow/{p.name}": p.underflow[1], f"subnormal/{p.name}": p.subnormal[1]}
            for what in ("zeros", "nonfinite", "headroom", "update_ratio", "swallowed"):
                found[f"{what}/{p.name}"] = getattr(p, what)
        return found

    def sketches(self) -> dict[str, ExponentSketch]:
        """Return the sketches of the record: ``gradient/NAME``, ``weight/NAME``, ``activation/MODULE``."""
        found = {}
        for p in self.parameters:
            found[f"gradient/{p.name}"] = p.gradient
            if p.weight is not None:
                found[f"weight/{p.name}"] = p.weight
        return found | {f"activation/{a.module}": a.sketch for a in self.activations}

    def __str__(self) -> str:
        """Return a readable table, what is not finite first, then the worst underflow."""
        lines = [f"step {self.step}: {self.samples} samples, scale {self.scale:g}"]
        for p in sorted(self.parameters, key=lambda p: (-p.nonfinite, -p.underflow[1] - p.subnormal[1], p.name)):
            parts = [f"inf or nan {p.nonfinite:.1%}"] if p.nonfinite else []
            parts += [f"underflow {p.underflow[0]:.1%}", f"subnormal {p.subnormal[1]:.1%}"]
            parts += [f"zeros {p.zeros:.1%}", f"headroom {p.headroom:.1f} bits"]
            parts += [] if math.isnan(p.update_ratio) else [f"update/weight {p.update_ratio:.2g}"]
            parts += [] if math.isnan(p.swallowed) else [f"swallowed {p.swallowed:.1%}"]
            lines.append(f"  {p.name} ({p.dtype}): {', '.join(parts)}")
        return "\n".join(lines)


class SketchWriter:
    """Writes what a `Monitor` has seen to TensorBoard.

    Histograms have the tags of `MonitorRecord.sketches`, curves those of `MonitorRecord.numbers`. For a whole run there
    is `hs.integrations.loggers.TensorBoard`, which is built on it.

    Args:
        target: a folder for event files, or a SummaryWriter (or anything with its `add_scalar` and
            `add_histogram_raw`).

    Raises:
        HalfstepError: a folder, and the package tensorboard is not installed; or neither a folder nor a writer.

    Examples:
        >>> monitor = hs.Monitor(hs.TrainStep(model, optimizer, loss_fn), every=100)
        >>> writer = hs.SketchWriter("runs/today")
        >>> for record in monitor.poll():
        ...     writer.add(record)
    """

    def __init__(self, target: Any) -> None:
        if not isinstance(target, (str, Path)) and not all(hasattr(target, name) for name in NEEDED):
            raise HalfstepError(f"SketchWriter takes a folder or a writer with {' and '.join(NEEDED)}, not {target!r}")
        self.writer: Any = _opened(target) if isinstance(target, (str, Path)) else target

    def add(self, record: MonitorRecord) -> None:
        """Write one record, at its step."""
        for tag, sketch in record.sketches().items():
            self.add_sketch(tag, sketch, record.step)
        for tag, value in record.numbers().items():
            if math.isfinite(value):
                self.writer.add_scalar(tag, value, global_step=record.step)

    def add_sketch(self, tag: str, sketch: ExponentSketch, step: int) -> None:
        """Write the histogram of a sketch's exponents; nothing if it has no number but zero."""
        if not sketch.nonzero:
            return
        counts, edges = sketch.bars()
        middles = [e + 0.5 for e in edges[:-1]]
        self.writer.add_histogram_raw(
            tag=tag,
            min=math.log2(sketch.smallest),
            max=math.log2(sketch.largest),
            num=sketch.nonzero,
            sum=sum(c * m for c, m in zip(counts, middles, strict=True)),
            sum_squares=sum(c * m * m for c, m in zip(counts, middles, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def close(self) -> None:
        """Write out what is buffered, if the writer can be closed."""
        getattr(self.writer, "close", lambda: None)()


def _opened(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HalfstepError(
            f"writing event files to {str(folder)!r} needs the package tensorboard ({error}); install it, or pass a "
            "writer of your own with add_scalar and add_histogram_raw"
        ) from error
    return SummaryWriter(str(folder))


ROLES = {LOSS: "loss", GRADIENTS: "weight gradient", WEIGHTS: "weight"}  # what has run away -> the role of a finding

AROUND, SPARSE = 6, 0.05
"""So many binades around the end of a format's full precision are searched for a gap: two in a row with so few numbers,
beside those below the end."""

SUBNORMAL = 0.25
"""Of the numbers that are left: a gradient spreads over some ten bits, so much in the last ones means many below."""

SUBNORMAL_BESIDE_ZEROS = 0.1
ZEROS = 0.5  # where half of a gradient is zero, which dropout and ReLU do too, less of the rest has to be subnormal

SWALLOWED = 0.5
"""Half of the updates changed nothing. In fp32 that is rare; bf16 weights without masters reach it in fine-tuning."""

ENDING = 0.1  # a schedule that ends near zero ends with updates that even fp32 swallows, and nothing is wrong with that
FROZEN = 0.5  # half of the entries of a low state stay as they are although there is a gradient
SLACK = 64  # averages over ranks and micro-batches divide numbers of a format by so much at most
SILENT = 0.5  # share of the parameters without a gradient from which on the loss, not the model, is the reason

AGAIN = 2
"""Samples in a row: what begins as zero on purpose (a gate, an adapter) lets gradients through after an update."""


def symptoms(record: MonitorRecord, format: Format) -> Iterator[Finding]:
    """Iterate over what is wrong in `record`, a run whose low format is `format`: a finding for each place."""
    near_zero = format.is_narrow and any(
        _rounded(p.gradient, format) and p.gradient.subnormal(format)[1] > 0 for p in record.parameters
    )
    largest: dict[str, float] = {}
    for parameter in record.parameters:
        module = parameter.name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), parameter.amax)
    yield from _of_silence(record, format)
    for parameter in record.parameters:
        yield from _of_bad_gradient(parameter, record)
        if parameter.amax >= NOISE * format.eps * largest[parameter.name.rpartition(".")[0]]:
            yield from _of_gradient(parameter, format, near_zero)
        yield from _of_update(parameter)
        yield from _of_weight(parameter)
    for activation in record.activations:
        yield from _of_activation(activation, format)


def of_rise(found: Rise, batch: str, rate: float) -> Finding:
    """Return the finding of a run that runs away at the learning rate `rate`, 0.0 for none.

    `batch` says in words with which outlier that began, "" for none.
    """
    if batch:
        cause, remedy = f"{batch}, and then {found}", "leave such batches out, or clamp their values"
    else:
        cause = f"{found}; the learning rate is {rate:.3g}" if rate else str(found)
        remedy = "lower the learning rate, or warm it up"
    remedy += f"; clip gradients (clip_norm=1.0); go back to a checkpoint from before step {found.first + 1}"
    return Finding(kind="divergence", role=ROLES[found.what], severity=1.0, cause=cause, remedy=remedy)


def _of(
    place: ParameterRecord | ActivationRecord, kind: str, role: str, severity: float, cause: str, remedy: str
) -> Finding:
    name = place.name if isinstance(place, ParameterRecord) else ""
    module = name.rpartition(".")[0] if isinstance(place, ParameterRecord) else place.module
    return Finding(kind=kind, role=role, module=module, parameter=name, severity=severity, cause=cause, remedy=remedy)


def _of_bad_gradient(parameter: ParameterRecord, record: MonitorRecord) -> Iterator[Finding]:
    """Yield a gradient that is not finite at a scale of 1 or less; a higher scale falls by itself."""
    weights = (p.weight for p in record.parameters if p.weight is not None)
    if not parameter.nonfinite or record.scale > 1.0 or any(w.infs or w.nans for w in weights):
        return  # weights that are not finite are the graver finding, and the reason
    sketch, share = parameter.gradient, parameter.nonfinite
    what = "nan" if not sketch.infs else "inf" if not sketch.nans else "inf or nan"
    much = "all" if share == 1.0 else f"{share:.2g}"
    many = f"in {record.samples} samples" if record.samples > 1 else "in one sample"
    cause = f"{much} of its gradient is {what} {many}, at a loss scale of {record.scale:g}"
    remedy = "ask step.explain() (TrainStep keeps what it takes), or hs.audit with such a batch"
    yield _of(parameter, "bad_gradient", "weight gradient", share, cause, remedy)


def _of_silence(record: MonitorRecord, format: Format) -> Iterator[Finding]:
    """Name gradients that are all zero in most of the model, where what is left is small: they are below the format."""
    silent = [p for p in record.parameters if p.silent >= AGAIN]
    if not format.is_narrow or len(silent) < max(SILENT * len(record.parameters), 1):
        return
    if max((p.amax for p in record.parameters), default=0.0) >= format.smallest_normal:
        return  # the loss gets through: these are experts at rest, or closed gates
    for parameter in silent:
        many = f"{len(silent)} of {len(record.parameters)} parameters"
        cause = f"all of its gradient is zero, in {many}, sample by sample"
        remedy = f"raise the loss scale (scale='auto' does by itself), or use bf16, if {format.name} is too narrow for "
        remedy += "this loss; or the graph is cut: look whether the loss depends on the parameters"
        yield _of(parameter, "underflow", "weight gradient", 1.0, cause, remedy)


def _of_gradient(parameter: ParameterRecord, format: Format, near_zero: bool) -> Iterator[Finding]:
    sketch, role = parameter.gradient, "weight gradient"
    if not sketch.count or not format.is_narrow:
        return
    zeros, low = parameter.zeros, sketch.subnormal(format)[1]
    if sketch.nonzero and _rounded(sketch, format) and not _apart(sketch, format):
        if low >= SUBNORMAL or (low >= SUBNORMAL_BESIDE_ZEROS and zeros >= ZEROS):
            bits = math.log2(sketch.best_scale(format))
            raised = f"multiply the loss scale by at least 2**{bits:g}" if bits > 0 else "use bf16"
            cause = f"{low:.0%} of its gradient is subnormal in {format.name} and {zeros:.0%} is zero already"
            remedy = f"{raised} (scale='auto' raises it by itself), or give its module the rule 'fp32'"
            yield _of(parameter, "underflow", role, low, cause, remedy)
    elif zeros == 1.0 and near_zero:
        cause = f"all of its gradient is zero, and other gradients are near the smallest number of {format.name}"
        remedy = "raise the loss scale (scale='auto' does by itself), or use bf16"
        yield _of(parameter, "underflow", role, 1.0, cause, remedy)
    if sketch.nonzero and not format.has_inf and sketch.largest == format.max:
        yield _of(parameter, "saturation", role, 1.0, *_clipped("gradient", format))


def _of_update(parameter: ParameterRecord) -> Iterator[Finding]:
    low = parameter.precise != "fp32"
    ending = not low and parameter.pace < ENDING
    precise = "keep precise weights: policy field master='auto' (or 'split', 'kahan', 'stochastic')"
    if not parameter.stochastic and not ending and parameter.swallowed >= SWALLOWED:
        share = parameter.swallowed
        cause = f"{share:.0%} of its updates are below half an ulp of its {parameter.precise} weights"
        slow = "raise the learning rate, or train fewer, smaller numbers: even fp32 does not hold these updates"
        yield _of(parameter, "swallowed_update", "update", share, cause, precise if low else slow)
    half_ulp = format_of(parameter.precise).eps / 4 if parameter.precise in ("bf16", "fp16") else 0.0
    # Where weight decay is most of what moves the weight, its loss is not hidden by other updates.
    alone = not parameter.gradient.nonzero or parameter.update_ratio < parameter.decay
    if not parameter.stochastic and 0 < parameter.decay < half_ulp and alone:
        taken = f"its weight decay takes {parameter.decay:.1g} of a weight"
        cause = f"{taken}, below half an ulp of {parameter.precise}"
        yield _of(parameter, "swallowed_update", "update", 1.0, cause, precise)
    if parameter.frozen_state >= FROZEN:
        share = parameter.frozen_state
        cause = f"{share:.0%} of a low optimizer state does not move although there is a gradient"
        remedy = "keep optimizer states in fp32, or state='low', which rounds stochastically to bf16"
        yield _of(parameter, "low_state", "state", share, cause, remedy)


def _of_weight(parameter: ParameterRecord) -> Iterator[Finding]:
    sketch = parameter.weight
    if sketch is None:
        return
    if sketch.infs or sketch.nans:
        share = (sketch.infs + sketch.nans) / sketch.count
        cause = f"{sketch.infs} of its weights are infinite and {sketch.nans} are nan"
        remedy = "go back to a checkpoint from before; no later step can mend them"
        yield _of(parameter, "bad_state", "weight", share, cause, remedy)
    if parameter.dtype != "fp32" and (room := sketch.headroom(parameter.dtype)) < ROOM:
        cause, remedy = _near_end("weight", room, format_of(parameter.dtype))
        yield _of(parameter, "overflow_risk", "weight", 1.0, cause, remedy)


def _of_activation(activation: ActivationRecord, format: Format) -> Iterator[Finding]:
    sketch, role = activation.sketch, "activation"
    if activation.dtype != "fp32":
        format = format_of(activation.dtype)
        # exactly the largest number is a mask
        if (room := sketch.headroom(format)) < ROOM and sketch.largest != format.max:
            yield _of(activation, "overflow_risk", role, 1.0, *_near_end(role, room, format))
    elif sketch.nonzero and not format.has_inf and sketch.largest == format.max:
        yield _of(activation, "saturation", role, 1.0, *_clipped(role, format))
    if format.is_narrow and _rounded(sketch, format) and (low := sketch.subnormal(format)[1]) >= SUBNORMAL:
        cause = f"{low:.0%} of what it returns is subnormal in {format.name}"
        remedy = "give the module the rule 'fp32', use bf16, or scale its inputs"
        yield _of(activation, "underflow", role, low, cause, remedy)


def _near_end(what: str, room: float, format: Format) -> tuple[str, str]:
    cause = f"the largest {what} is {room:.2f} bits below the largest number of {format.name}, {format.max:g}"
    return cause, "give the module the rule 'fp32', or use bf16"


def _clipped(what: str, format: Format) -> tuple[str, str]:
    cause = f"the largest {what} is exactly {format.max:g}, where {format.name} cuts off"
    return cause, "lower the scale of these numbers, or give the module a wider format by a module rule"


def _apart(sketch: ExponentSketch, format: Format) -> bool:
    """Return whether a gap lies between the subnormal numbers and the others: those are rounding errors of zeros.

    Numbers that a format cuts off fall off steadily towards its end. The gradient of a bias of keys is zero in exact
    arithmetic, because a softmax does not change when all of its inputs rise alike.
    """
    end = round(math.log2(format.smallest_normal))
    counts = sketch.exponents
    small = sum(count for e, count in counts.items() if e < end)
    for gap in range(end - AROUND, end + AROUND):
        above = sum(count for e, count in counts.items() if e > gap + 1)
        if counts.get(gap, 0) + counts.get(gap + 1, 0) < SPARSE * small < above:
            return True
    return False


def _rounded(sketch: ExponentSketch, format: Format) -> bool:
    """Return whether the numbers look like numbers of `format`: none is (much) smaller than its smallest."""
    return bool(sketch.nonzero) and sketch.smallest >= format.smallest_subnormal / SLACK
