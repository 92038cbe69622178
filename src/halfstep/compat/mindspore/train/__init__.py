"""``mindspore.train``: `Model`, the managers, and `amp` under its older address."""

from halfstep.compat.mindspore.nn.loss_scale import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from halfstep.compat.mindspore.train import amp
from halfstep.compat.mindspore.train.model import Model

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager", "Model", "amp"]
