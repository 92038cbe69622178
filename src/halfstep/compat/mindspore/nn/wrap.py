"""Networks with their loss: `WithLossCell` for training, `WithEvalCell` for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from halfstep.compat.mindspore.checks import MindSporeTypeError, check_bool
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.loss import as_fp32

__all__ = ["WithEvalCell", "WithLossCell"]


class WithLossCell(Cell):
    """A network and its loss: ``cell(data, label)`` is the loss, which is always computed in fp32.

    Args:
        backbone: any torch module.
        loss_fn: called as ``loss_fn(output, label)``.
    """

    def __init__(self, backbone: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        _check("WithLossCell", backbone, loss_fn)
        self.backbone, self.loss_fn = backbone, loss_fn

    @property
    def backbone_network(self) -> nn.Module:
        """The network without its loss."""
        return self.backbone

    def construct(self, data: Any, label: Any) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.loss_fn(as_fp32(self.backbone(data)), as_fp32(label))
        return loss


class WithEvalCell(Cell):
    """A network and its loss: ``cell(data, label)`` is (loss, outputs, label).

    Args:
        network: any torch module.
        loss_fn: called as ``loss_fn(output, label)``; None leaves the loss out.
        add_cast_fp32: whether the outputs are returned in fp32; the loss is computed from fp32 in any case.
    """

    def __init__(self, network: nn.Module, loss_fn: Callable[..., Any] | None, add_cast_fp32: bool = False) -> None:
        super().__init__()
        _check("WithEvalCell", network, loss_fn or as_fp32)
        check_bool("WithEvalCell: add_cast_fp32", add_cast_fp32)
        self.network, self.loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Any, label: Any) -> tuple[Any, Any, Any]:
        """Return (loss, outputs, label)."""
        outputs = self.network(data)
        loss = None if self.loss_fn is None else self.loss_fn(as_fp32(outputs), as_fp32(label))
        return loss, (as_fp32(outputs) if self.add_cast_fp32 else outputs), label


def _check(where: str, network: object, loss_fn: object) -> None:
    if not isinstance(network, nn.Module):
        raise MindSporeTypeError(f"{where}: the network is a {type(network).__name__}; expected a Cell or torch module")
    if not callable(loss_fn):
        raise MindSporeTypeError(f"{where}: loss_fn={loss_fn!r} is not callable; expected a Cell such as nn.MSELoss()")
