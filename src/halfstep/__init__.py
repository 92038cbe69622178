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
    from halfstep.lens.audit import audit
    from halfstep.lens.blackbox import BlackBox, replay
    from halfstep.lens.table import Audit

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Audit",
    "BlackBox",
    "Cure",
    "GradScaler",
    "HalfstepError",
    "HostStepResult",
    "Lion",
    "Metrics",
    "Plan",
    "Policy",
    "ScaleRule",
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

LAZY = {
    "Audit": "halfstep.lens.table",
    "BlackBox": "halfstep.lens.blackbox",
    "audit": "halfstep.lens.audit",
    "replay": "halfstep.lens.blackbox",
}
"""Names that are imported when somebody asks for them: name -> module."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(LAZY[name]), name)
    return value
