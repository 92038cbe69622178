"""The training step: the place where casting, scaling and weights meet; public names.

`TrainStep` returns a `StepResult`, whose ``host()`` is a `HostStepResult`; `TrainStep.metrics` returns `Metrics`, a
collection of `StepMetrics`.
"""

from halfstep.events import HostStepResult, StepResult
from halfstep.kernels.choose import cpu_kernels
from halfstep.step.loss import Loss
from halfstep.step.part import Part
from halfstep.step.parts.metrics import Metrics, MetricsLogger, StepMetrics
from halfstep.step.train_step import TrainStep
from halfstep.step.warming import warm

__all__ = [
    "HostStepResult", "Loss", "Metrics", "MetricsLogger", "Part", "StepMetrics", "StepResult", "TrainStep",
    "cpu_kernels", "warm",
]  # fmt: skip
