"""megengine.functional.loss: losses, in fp32 whatever the format of the predictions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import StepError

__all__ = ["binary_cross_entropy", "cross_entropy", "hinge_loss", "l1_loss", "square_loss"]


def cross_entropy(
    pred: Tensor, label: Tensor, axis: int = 1, with_logits: bool = True, label_smooth: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of `pred` and the class labels.

    Args:
        pred: logits, or probabilities without `with_logits`.
        label: integers of any width.
        axis: that of the classes.
        with_logits: whether `pred` are logits.
        label_smooth: share of the label that is spread over all classes.
        reduction: "mean", "sum" or "none".
    """
    pred = pred.movedim(axis, 1) if pred.dim() > 1 else pred
    if with_logits:
        return F.cross_entropy(pred, label.long(), reduction=_reduction(reduction), label_smoothing=label_smooth)
    logarithms = torch.log(pred)
    loss = F.nll_loss(logarithms, label.long(), reduction=_reduction(reduction))
    if not label_smooth:
        return loss
    spread = -logarithms.float().mean(1 if pred.dim() > 1 else 0)
    return (1.0 - label_smooth) * loss + label_smooth * _reduced(spread, reduction)


def binary_cross_entropy(pred: Tensor, label: Tensor, with_logits: bool = True, reduction: str = "mean") -> Tensor:
    """Return the binary cross entropy of logits, or of probabilities without `with_logits`."""
    function = F.binary_cross_entropy_with_logits if with_logits else F.binary_cross_entropy
    return function(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def l1_loss(pred: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean distance."""
    return F.l1_loss(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def square_loss(pred: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean squared distance."""
    return F.mse_loss(pred, label.to(pred.dtype), reduction=_reduction(reduction))


def hinge_loss(pred: Tensor, label: Tensor, norm: str = "L1", reduction: str = "mean") -> Tensor:
    """Return the hinge loss, summed over the classes: labels are 1 and -1."""
    if str(norm).upper() not in ("L1", "L2"):
        raise StepError(f"hinge_loss(norm={norm!r}): expected 'L1' or 'L2'")
    margin = torch.relu(1.0 - pred.float() * label.float())
    return _reduced((margin if norm.upper() == "L1" else margin * margin).sum(1), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    reduction = _reduction(reduction)
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def _reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise StepError(f"reduction={reduction!r}; expected 'mean', 'sum' or 'none'")
    return reduction
