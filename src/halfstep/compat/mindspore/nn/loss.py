"""Losses, and networks with their loss: `WithLossCell` for training, `WithEvalCell` for evaluation.

A loss cell always runs in fp32, inside a low network too: it is recognised by its torch base class.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.formats import LOW_DTYPES
from halfstep.torch_private.modules import TorchLoss

__all__ = [
    "BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "LossBase", "MSELoss", "SoftmaxCrossEntropyWithLogits",
    "WithEvalCell", "WithLossCell",
]  # fmt: skip


class LossBase(Cell, TorchLoss):
    """Base of losses; ``get_loss(x)`` reduces by `reduction`.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, reduction: str = "mean") -> None:
        known = reduction in ("mean", "sum", "none")
        checks.check_value(f"{type(self).__name__}: reduction", reduction, known, "one of 'mean', 'sum', 'none'")
        Cell.__init__(self)
        self.reduction = reduction

    def get_loss(self, x: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        """Return `x` times `weights`, reduced."""
        x = x * weights
        return x if self.reduction == "none" else (x.mean() if self.reduction == "mean" else x.sum())


class MSELoss(LossBase):
    """Mean squared difference."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.mse_loss(logits, labels.to(logits.dtype), reduction=self.reduction)


class L1Loss(LossBase):
    """Mean absolute difference."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.l1_loss(logits, labels.to(logits.dtype), reduction=self.reduction)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross entropy of logits with class numbers (``sparse=True``) or with rows of probabilities.

    As in MindSpore `reduction` is "none" unless given: a training cell then minimises the sum.
    """

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        checks.check_bool("SoftmaxCrossEntropyWithLogits: sparse", sparse)
        self.sparse = sparse

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, reduced."""
        if self.sparse:
            if labels.is_floating_point():
                raise MindSporeTypeError(
                    f"SoftmaxCrossEntropyWithLogits(sparse=True) takes class numbers and got labels of {labels.dtype}; "
                    "use sparse=False for rows of probabilities"
                )
            return F.cross_entropy(logits, labels.long(), reduction=self.reduction)
        if labels.shape != logits.shape:
            raise MindSporeValueError(
                f"SoftmaxCrossEntropyWithLogits(sparse=False) takes labels of the logits' shape {tuple(logits.shape)} "
                f"and got {tuple(labels.shape)}; use sparse=True for class numbers"
            )
        return F.cross_entropy(logits, labels.to(logits.dtype), reduction=self.reduction)


class CrossEntropyLoss(LossBase):
    """Cross entropy of logits with class numbers or probabilities; the mean by default."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        labels = labels.to(logits.dtype) if labels.is_floating_point() else labels.long()
        weight: Any = self.weight
        return F.cross_entropy(
            logits, labels, weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


class BCEWithLogitsLoss(LossBase):
    """Binary cross entropy of logits.

    Args:
        reduction: "mean", "sum" or "none".
        weight: of each element, broadcast.
        pos_weight: of positive labels, broadcast.
    """

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(self, reduction: str = "mean", weight: Tensor | None = None, pos_weight: Tensor | None = None) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


def as_fp32(value: Any) -> Any:
    """Return `value` with its low tensors in fp32; containers keep their types."""
    return hs.trees.map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in LOW_DTYPES else tensor)


class WithLossCell(Cell):
    """A network and its loss: ``cell(data, label)`` is the loss, which is always computed in fp32.

    Args:
        backbone: any torch module.
        loss_fn: called as ``loss_fn(output, label)``.
    """

    def __init__(self, backbone: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        checks.check_network("WithLossCell", backbone, loss_fn)
        self.backbone, self.loss_fn = backbone, loss_fn

    backbone_network = property(lambda self: self.backbone, doc="The network without its loss.")

    def construct(self, data: Any, label: Any) -> Tensor:
        """Return the loss."""
        return cast(Tensor, self.loss_fn(as_fp32(self.backbone(data)), as_fp32(label)))


class WithEvalCell(Cell):
    """A network and its loss: ``cell(data, label)`` is (loss, outputs, label).

    Args:
        network: any torch module.
        loss_fn: called as ``loss_fn(output, label)``; None leaves the loss out.
        add_cast_fp32: whether the outputs are returned in fp32; the loss is computed from fp32 in any case.
    """

    def __init__(self, network: nn.Module, loss_fn: Callable[..., Any] | None, add_cast_fp32: bool = False) -> None:
        super().__init__()
        checks.check_network("WithEvalCell", network, callable if loss_fn is None else loss_fn)
        checks.check_bool("WithEvalCell: add_cast_fp32", add_cast_fp32)
        self.network, self.loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Any, label: Any) -> tuple[Any, Any, Any]:
        """Return (loss, outputs, label)."""
        outputs = self.network(data)
        loss = None if self.loss_fn is None else self.loss_fn(as_fp32(outputs), as_fp32(label))
        return loss, (as_fp32(outputs) if self.add_cast_fp32 else outputs), label
