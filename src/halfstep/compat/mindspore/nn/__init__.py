"""Cells: layers, losses, optimizers and training steps. Every cell is a torch module."""

from halfstep.compat.mindspore.nn.cell import Cell, CellList, SequentialCell
from halfstep.compat.mindspore.nn.layers import *  # noqa: F403  # the layers are listed there
from halfstep.compat.mindspore.nn.layers import __all__ as _layers
from halfstep.compat.mindspore.nn.loss import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    LossBase,
    MSELoss,
    SoftmaxCrossEntropyWithLogits,
)
from halfstep.compat.mindspore.nn.optim import SGD, Adam, AdamWeightDecay, Momentum, Optimizer
from halfstep.compat.mindspore.nn.scale import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from halfstep.compat.mindspore.nn.step import TrainOneStepCell, TrainOneStepWithLossScaleCell
from halfstep.compat.mindspore.nn.wrap import WithEvalCell, WithLossCell

__all__ = [
    "SGD",
    "Adam",
    "AdamWeightDecay",
    "BCEWithLogitsLoss",
    "Cell",
    "CellList",
    "CrossEntropyLoss",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleUpdateCell",
    "L1Loss",
    "LossBase",
    "MSELoss",
    "Momentum",
    "Optimizer",
    "SequentialCell",
    "SoftmaxCrossEntropyWithLogits",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithEvalCell",
    "WithLossCell",
    *_layers,
]
