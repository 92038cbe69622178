"""The training step: the one place where casting, scaling and weights meet; public names.

`TrainStep` returns a `StepResult`, whose ``host()`` is a `HostStepResult`; `TrainStep.metrics` returns `Metrics`, a
collection of `StepMetrics`.
"""

from halfstep.events import HostStepResult, StepResult
from halfstep.kernels.choose import cpu_kernels
from halfstep.step.checkpoints.preemption import on_preemption
from halfstep.step.exported import exported
from halfstep.step.lowered import lowered
from halfstep.step.metrics import Metrics, MetricsLogger, StepMetrics
from halfstep.step.prepare import edit_weights, prepare, prepared_policy, unprepare
from halfstep.step.save import Loaded, Saving, load, save
from halfstep.step.shard import shard
from halfstep.step.train_step import TrainStep

__all__ = [
    "HostStepResult",
    "Loaded",
    "Metrics",
    "MetricsLogger",
    "Saving",
    "StepMetrics",
    "StepResult",
    "TrainStep",
    "cpu_kernels",
    "edit_weights",
    "exported",
    "load",
    "lowered",
    "on_preemption",
    "prepare",
    "prepared_policy",
    "save",
    "shard",
    "unprepare",
]
