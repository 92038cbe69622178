"""Lens: what is in the numbers of a run, what is wrong with them, and why a step went wrong; public names.

`Audit` is what `hs.audit` returns: a few training steps compared with fp32. `Monitor` samples a long run, and
`SketchWriter` writes its records to TensorBoard. `BlackBox` explains a step that is not finite: its `Verdict` names the
cause and lists changes that help (`Cure`); `Watch` is the box of a loop that is left as it is, and `replay` does the
same from an evidence file. A `Magnitude` is a row of the
verdict's story. `ExponentSketch` counts the binary exponents of a tensor. A `Tracer` hands every operator
that a block calls to a `Sink`: an `OperatorSink` receives each `OperatorCall` with its module and its line.

A name is imported when it is first used, because training alone needs none of them.
"""

from typing import TYPE_CHECKING

from halfstep.lazy import lazy
from halfstep.lens.verdict import Cure, Magnitude, Verdict

if TYPE_CHECKING:
    from halfstep.lens.audit.table import Audit
    from halfstep.lens.box.blackbox import BlackBox, replay
    from halfstep.lens.box.watch import Watch
    from halfstep.lens.monitor.monitor import Monitor
    from halfstep.lens.monitor.records import SketchWriter
    from halfstep.lens.sketch import ExponentSketch
    from halfstep.lens.tracing import OperatorCall, OperatorSink, Sink, Tracer, raised_at, user_frame, user_line

__all__ = [
    "Audit", "BlackBox", "Cure", "ExponentSketch", "Magnitude", "Monitor", "OperatorCall", "OperatorSink", "Sink",
    "SketchWriter", "Tracer", "Verdict", "Watch", "raised_at", "replay", "user_frame", "user_line",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "audit.table": "Audit",
        "box.blackbox": "BlackBox replay",
        "box.watch": "Watch",
        "monitor.monitor": "Monitor",
        "monitor.records": "SketchWriter",
        "sketch": "ExponentSketch",
        "tracing": "OperatorCall OperatorSink Sink Tracer raised_at user_frame user_line",
    },
)
