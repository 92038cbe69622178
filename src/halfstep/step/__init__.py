"""The training step: the one place where casting, scaling and weights meet."""

from halfstep.step.prepare import edit_weights, prepare, unprepare
from halfstep.step.train_step import TrainStep

__all__ = ["TrainStep", "edit_weights", "prepare", "unprepare"]
