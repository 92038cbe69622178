"""halfstep: mixed-precision training in which precision is data.

One frozen `Policy` states in which number format every operator, module, parameter and gradient lives; `autocast`,
`GradScaler`, `prepare` and `TrainStep` carry it out on PyTorch. Names for special uses are in `hs.policy`, `hs.step`,
`hs.lens`, `hs.formats`, `hs.errors`, `hs.trees`, `hs.integrations` and `halfstep.testing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep import checkpoints as checkpoints
from halfstep import errors as errors
from halfstep import formats as formats
from halfstep import policy as policy
from halfstep import step as step
from halfstep import trees as trees
from halfstep.binding import edit_weights, exported, lowered, prepare, prepared_policy, shard, unprepare
from halfstep.cast import autocast, linear_cross_entropy, operator, suspended
from halfstep.checkpoints import load, on_preemption, save
from halfstep.errors import HalfstepError
from halfstep.kernels.optimizers.lion import Lion
from halfstep.policy import Policy, ScaleRule, resolve
from halfstep.scale import GradScaler
from halfstep.step import Loss, TrainStep, warm
from halfstep.tasks import Task
from halfstep.trees import map_tensors as map_tensors

if TYPE_CHECKING:
    from halfstep import integrations as integrations
    from halfstep import lens as lens
    from halfstep.advise.lint import lint
    from halfstep.advise.plan import plan
    from halfstep.advise.tune import tune
    from halfstep.lens import BlackBox, ExponentSketch, Monitor, SketchWriter
    from halfstep.lens.audit.audit import audit
    from halfstep.lens.mismatch import mismatch

__version__ = "0.1.0"

__all__ = [
    "BlackBox",
    "ExponentSketch",
    "GradScaler",
    "HalfstepError",
    "Lion",
    "Loss",
    "Monitor",
    "Policy",
    "ScaleRule",
    "SketchWriter",
    "Task",
    "TrainStep",
    "audit",
    "autocast",
    "edit_weights",
    "exported",
    "linear_cross_entropy",
    "lint",
    "load",
    "mismatch",
    "lowered",
    "on_preemption",
    "operator",
    "plan",
    "prepare",
    "prepared_policy",
    "resolve",
    "save",
    "shard",
    "suspended",
    "tune",
    "unprepare",
    "warm",
]

_LATER = {
    "BlackBox": "lens",
    "ExponentSketch": "lens",
    "Monitor": "lens",
    "SketchWriter": "lens",
    "audit": "lens.audit.audit",
    "mismatch": "lens.mismatch",
    "plan": "advise.plan",
    "tune": "advise.tune",
    "lint": "advise.lint",
}
"""Name -> the module that is imported when the name is first used; training alone needs none of them."""


def __getattr__(name: str) -> Any:
    if name in ("integrations", "lens"):
        return import_module(f"{__name__}.{name}")
    if name in _LATER:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
