"""The training step: the one place where casting, scaling and weights meet."""

from halfstep.step.metrics import Metrics, StepMetrics
from halfstep.step.prepare import edit_weights, prepare, prepared_policy, unprepare
from halfstep.step.train_step import TrainStep

__all__ = ["Metrics", "StepMetrics", "TrainStep", "edit_weights", "prepare", "prepared_policy", "unprepare"]
