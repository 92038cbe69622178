"""halfstep: mixed-precision training in which precision is data.

One frozen `Policy` states in which number format every operator, module, parameter and gradient lives; `autocast`,
`GradScaler`, `prepare` and `TrainStep` carry it out on PyTorch. Names for special uses are in `hs.policy`, `hs.step`,
`hs.lens`, `hs.formats`, `hs.errors`, `hs.trees`, `hs.integrations` and `halfstep.testing`.
"""

from typing import TYPE_CHECKING

from halfstep.lazy import lazy

if TYPE_CHECKING:
    from halfstep import checkpoints as checkpoints
    from halfstep import errors as errors
    from halfstep import formats as formats
    from halfstep import integrations as integrations
    from halfstep import lens as lens
    from halfstep import policy as policy
    from halfstep import step as step
    from halfstep import trees as trees
    from halfstep.advise.lint import lint
    from halfstep.advise.plan import plan
    from halfstep.advise.tune import tune
    from halfstep.binding import edit_weights, exported, lowered, prepare, prepared_policy, shard, unprepare
    from halfstep.cast import autocast, linear_cross_entropy, operator, suspended
    from halfstep.checkpoints import load, on_preemption
    from halfstep.checkpoints.save import save
    from halfstep.errors import HalfstepError
    from halfstep.kernels.optimizers.lion import Lion
    from halfstep.lens import BlackBox, ExponentSketch, Monitor, SketchWriter
    from halfstep.lens.audit.audit import audit
    from halfstep.lens.mismatch import mismatch
    from halfstep.policy import Policy, ScaleRule, resolve
    from halfstep.scale import GradScaler
    from halfstep.step import Loss, TrainStep, warm
    from halfstep.tasks import Task
    from halfstep.trees import map_tensors as map_tensors

__version__ = "0.1.0"

__all__ = [
    "BlackBox", "ExponentSketch", "GradScaler", "HalfstepError", "Lion", "Loss", "Monitor", "Policy", "ScaleRule",
    "SketchWriter", "Task", "TrainStep", "audit", "autocast", "edit_weights", "exported", "linear_cross_entropy",
    "lint", "load", "mismatch", "lowered", "on_preemption", "operator", "plan", "prepare", "prepared_policy",
    "resolve", "save", "shard", "suspended", "tune", "unprepare", "warm",
]  # fmt: skip

_FILES = {
    "advise.lint": "lint",
    "advise.plan": "plan",
    "advise.tune": "tune",
    "binding": "edit_weights exported lowered prepare prepared_policy shard unprepare",
    "cast": "autocast linear_cross_entropy operator suspended",
    "checkpoints": "load on_preemption save",
    "errors": "HalfstepError",
    "kernels.optimizers.lion": "Lion",
    "lens": "BlackBox ExponentSketch Monitor SketchWriter",
    "lens.audit.audit": "audit",
    "lens.mismatch": "mismatch",
    "policy": "Policy ScaleRule resolve",
    "scale": "GradScaler",
    "step": "Loss TrainStep warm",
    "tasks": "Task",
    "trees": "map_tensors",
}
"""File that is imported when one of its names is first used -> these names."""

__getattr__ = lazy(__name__, _FILES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
