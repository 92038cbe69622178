"""halfstep: mixed-precision training in which precision is data.

One frozen `Policy` says in which number format every operator, module, parameter and gradient lives; `autocast`,
`GradScaler`, `prepare` and `TrainStep` carry it out on PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.cast import autocast, linear_cross_entropy, operator, suspended
from halfstep.errors import HalfstepError
from halfstep.events import Cure, HostStepResult, StepResult, Verdict
from halfstep.optim import Lion
from halfstep.policy import PRESETS, Plan, Policy, ScaleRule, resolve
from halfstep.policy.operators import expand as operators
from halfstep.policy.operators import name_of as operator_of
from halfstep.policy.units import Units, units
from halfstep.scale import GradScaler
from halfstep.step import Metrics, StepMetrics, TrainStep, edit_weights, prepare, prepared_policy, unprepare
from halfstep.tasks import Task
from halfstep.trees import map_tensors

if TYPE_CHECKING:
    from halfstep.lens.audit.audit import audit
    from halfstep.lens.audit.table import Audit
    from halfstep.lens.box.blackbox import BlackBox, replay
    from halfstep.lens.monitor.monitor import Monitor
    from halfstep.lens.monitor.tensorboard import SketchWriter
    from halfstep.lens.sketch import ExponentSketch

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Audit",
    "BlackBox",
    "Cure",
    "ExponentSketch",
    "GradScaler",
    "HalfstepError",
    "HostStepResult",
    "Lion",
    "Metrics",
    "Monitor",
    "Plan",
    "Policy",
    "ScaleRule",
    "SketchWriter",
    "StepMetrics",
    "StepResult",
    "Task",
    "TrainStep",
    "Units",
    "Verdict",
    "audit",
    "autocast",
    "edit_weights",
    "linear_cross_entropy",
    "map_tensors",
    "operator",
    "operator_of",
    "operators",
    "prepare",
    "prepared_policy",
    "replay",
    "resolve",
    "suspended",
    "units",
    "unprepare",
]

_LATER = {
    "Audit": "lens.audit.table",
    "BlackBox": "lens.box.blackbox",
    "ExponentSketch": "lens.sketch",
    "Monitor": "lens.monitor.monitor",
    "SketchWriter": "lens.monitor.tensorboard",
    "audit": "lens.audit.audit",
    "replay": "lens.box.blackbox",
}
"""Name -> module that is imported when somebody first asks for it."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return value
