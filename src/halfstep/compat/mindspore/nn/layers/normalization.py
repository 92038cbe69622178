"""Normalisations with MindSpore's arguments and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.layers.initial import fill

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "LayerNorm",
]


class _BatchNorm(Cell):
    """A batch normalisation with MindSpore's arguments.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: share of the old running statistics that stays; torch's momentum is one less this.
        affine: whether there are gamma and beta.
        gamma_init, beta_init: as for convolutions.
        use_batch_statistics: True or False: always or never those of the batch; None: while training.
    """

    kind: ClassVar[Any]
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    eps: float
    momentum: Any

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = None,
        beta_init: Any = None,
        use_batch_statistics: bool | None = None,
    ) -> None:
        name = type(self).__name__
        if not 0.0 <= momentum <= 1.0:
            raise MindSporeValueError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        self.kind.__init__(self, num_features, eps=eps, momentum=1.0 - momentum, affine=affine)
        self.training = False
        self.use_batch_statistics = use_batch_statistics
        fill(f"{name}: gamma_init", self.weight, gamma_init)
        fill(f"{name}: beta_init", self.bias, beta_init)

    @property
    def gamma(self) -> Any:
        """The factor; torch's weight."""
        return self.weight

    @property
    def beta(self) -> Any:
        """The summand; torch's bias."""
        return self.bias

    @property
    def moving_mean(self) -> Any:
        """The running mean."""
        return self.running_mean

    @property
    def moving_variance(self) -> Any:
        """The running variance."""
        return self.running_var

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        self.kind._check_input_dim(self, x)
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        if batch and not self.training:  # those of the batch, and the running ones stay as they are
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if batch:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, batch, self.momentum, self.eps
        )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Batch normalisation of (batch, channels) or (batch, channels, length)."""

    kind = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch normalisation of (batch, channels, height, width)."""

    kind = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """Batch normalisation of (batch, channels, depth, height, width)."""

    kind = nn.BatchNorm3d


class LayerNorm(Cell, nn.LayerNorm):
    """Layer normalisation over the last dimensions."""

    def __init__(
        self, normalized_shape: int | Sequence[int], gamma_init: Any = "ones", beta_init: Any = "zeros",
        epsilon: float = 1e-5,
    ) -> None:  # fmt: skip
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        nn.LayerNorm.__init__(self, shape, eps=epsilon)
        self.training = False
        fill("LayerNorm: gamma_init", self.weight, gamma_init)
        fill("LayerNorm: beta_init", self.bias, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(Cell, nn.GroupNorm):
    """Group normalisation."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        nn.GroupNorm.__init__(self, num_groups, num_channels, eps=eps, affine=affine)
        self.training = False

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
