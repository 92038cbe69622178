"""Cells: layers, losses, optimizers and training steps. Every cell is a torch module."""

from halfstep.compat.mindspore.nn import layers, loss
from halfstep.compat.mindspore.nn.cell import Cell, CellList, SequentialCell
from halfstep.compat.mindspore.nn.layers import *  # noqa: F403  # each file lists its names
from halfstep.compat.mindspore.nn.loss import *  # noqa: F403
from halfstep.compat.mindspore.nn.loss_scale import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from halfstep.compat.mindspore.nn.optim import SGD, Adam, AdamWeightDecay, Momentum, Optimizer
from halfstep.compat.mindspore.nn.step import TrainOneStepCell, TrainOneStepWithLossScaleCell

__all__ = [
    "SGD", "Adam", "AdamWeightDecay", "Cell", "CellList", "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell",
    "Momentum", "Optimizer", "SequentialCell", "TrainOneStepCell", "TrainOneStepWithLossScaleCell",
]  # fmt: skip
__all__ += layers.__all__
__all__ += loss.__all__
