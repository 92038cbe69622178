"""SketchWriter: sketches over time for TensorBoard, as histograms over binary exponents.

A bar over e stands for the numbers with ``2**e <= |x| < 2**(e + 1)``. Zeros, infinities and nan have no exponent; their
shares are curves, like underflow, headroom and what updates do.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.lens.monitor.records import MonitorRecord
from halfstep.lens.sketch import ExponentSketch

__all__ = ["SketchWriter"]

NEEDED = ("add_scalar", "add_histogram_raw")


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
        close = getattr(self.writer, "close", None)
        if close is not None:
            close()


def _opened(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise HalfstepError(
            f"writing event files to {str(folder)!r} needs the package tensorboard ({error}); install it, or pass a "
            "writer of your own with add_scalar and add_histogram_raw"
        ) from error
    return SummaryWriter(str(folder))
