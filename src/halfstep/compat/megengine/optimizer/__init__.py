"""megengine.optimizer: torch's optimizers with MegEngine's arguments, whose `step` and `clear_grad` can be chained."""

from halfstep.compat.megengine.optimizer.clip_grad import clip_grad_norm, clip_grad_value
from halfstep.compat.megengine.optimizer.optimizer import SGD, Adagrad, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "clip_grad_norm", "clip_grad_value"]
