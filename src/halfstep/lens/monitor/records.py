"""Records: what `Monitor` has seen, as plain values, and as histograms of TensorBoard over binary exponents.

A bar over e stands for the numbers with ``2**e <= |x| < 2**(e + 1)``. Zeros, infinities and nan have no exponent; their
shares are curves, like underflow, headroom and what updates do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.formats import Format
from halfstep.lens.sketch import Bounds, ExponentSketch

NEEDED = ("add_scalar", "add_histogram_raw")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRecord:
    """One parameter over the samples of a record. nan: not sampled, or not available.

    Attributes:
        name: dotted name.
        dtype: format its weight is stored in, e.g. "bf16".
        precise: format of the value that the optimizer moves: "fp32" where masters or halves stand behind low weights.
        gradient: sketch of the gradient as the backward pass left it, with the loss scale in it.
        weight: sketch of the precise value before the update; None if weights are not watched.
        format: the low format of shares.
        update_ratio: norm of the update over norm of the weight, mean over samples.
        swallowed: share of elements with a gradient whose precise value an update did not change: it was smaller than
            half an ulp. nan under stochastic rounding, which makes up for it, and at a learning rate of 0.
        frozen_state: share of elements with a gradient for which a low optimizer state stayed as it was; the largest
            over its states. nan without low states, or where halfstep rounds them stochastically.
        decay: what an update takes off a weight relative to it, learning rate times weight decay (decoupled or not).
        pace: its learning rate over the largest it has had, 1 if that is a tensor.
        drift: bits by which the largest gradient grew since the record before.
        stochastic: whether the weight is rounded stochastically.
        silent: samples in a row, over records, in which all of its gradient was zero, though updates were applied.
    """

    name: str
    dtype: str
    precise: str
    gradient: ExponentSketch
    weight: ExponentSketch | None
    format: Format
    update_ratio: float = math.nan
    swallowed: float = math.nan
    frozen_state: float = math.nan
    decay: float = 0.0
    pace: float = 1.0
    drift: float = math.nan
    stochastic: bool = False
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
    """What one leaf module has returned over the samples of a record.

    Attributes:
        module: dotted path.
        kind: name of its class.
        dtype: format of its last output's dtype, e.g. "fp16".
        sketch: of all floating tensors it returned.
    """

    module: str
    kind: str
    dtype: str
    sketch: ExponentSketch


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorRecord:
    """What was sampled since the record before.

    Attributes:
        step: updates made when the last sample was taken.
        samples: updates sampled.
        scale: loss scale of the last sample.
        parameters: those that had a gradient.
        activations: modules that ran, if activations are watched.
    """

    step: int
    samples: int
    scale: float
    parameters: tuple[ParameterRecord, ...]
    activations: tuple[ActivationRecord, ...] = field(default=())

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
