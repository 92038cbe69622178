"""Lens: what is in the numbers of a run, what is wrong with them, and why a step went wrong; public names.

`Audit` is what `hs.audit` returns: a few training steps compared with fp32. `Monitor` samples a long run, and
`SketchWriter` writes its records to TensorBoard. `BlackBox` explains a step that is not finite: its `Verdict` names the
cause and lists changes that help (`Cure`); `replay` does the same from an evidence file. A `Magnitude` is a row of the
verdict's story. `ExponentSketch` counts the binary exponents of a tensor. An `OperatorWatch` receives every operator
that a model calls, an `OperatorCall`, with its module (`Paths`) and its line.

A name is imported when it is first used, because training alone needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.lens.verdict import Cure, Magnitude, Verdict

if TYPE_CHECKING:
    from halfstep.lens.audit.table import Audit
    from halfstep.lens.audit.watch import OperatorCall, OperatorWatch, Paths
    from halfstep.lens.box.blackbox import BlackBox, replay
    from halfstep.lens.monitor.monitor import Monitor
    from halfstep.lens.monitor.tensorboard import SketchWriter
    from halfstep.lens.sketch import ExponentSketch

__all__ = [
    "Audit", "BlackBox", "Cure", "ExponentSketch", "Magnitude", "Monitor", "OperatorCall", "OperatorWatch", "Paths",
    "SketchWriter", "Verdict", "replay",
]  # fmt: skip

_MODULES = {
    "Audit": "audit.table",
    "BlackBox": "box.blackbox",
    "ExponentSketch": "sketch",
    "Monitor": "monitor.monitor",
    "OperatorCall": "audit.watch",
    "OperatorWatch": "audit.watch",
    "Paths": "audit.watch",
    "SketchWriter": "monitor.tensorboard",
    "replay": "box.blackbox",
}
"""Name -> the module that is imported when the name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
