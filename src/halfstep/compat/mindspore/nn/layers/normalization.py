"""Normalisations with MindSpore's arguments and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.layers.initial import fill, made_of, only
from halfstep.compat.mindspore.nn.optim import NOT_DECAYED

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
        moving_mean_init, moving_var_init: how the running statistics begin, likewise.
        use_batch_statistics: True or False: always or never those of the batch; None: while training. Those
            of the batch also move the running ones.
        data_format: "NCHW".
        dtype: format of gamma and beta.
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
        moving_mean_init: Any = None,
        moving_var_init: Any = None,
        use_batch_statistics: bool | None = None,
        data_format: str = "NCHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        name = type(self).__name__
        if isinstance(momentum, bool) or not isinstance(momentum, (int, float)):
            raise MindSporeTypeError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if not 0.0 <= momentum <= 1.0:
            raise MindSporeValueError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        only(name, "data_format", data_format, "NCHW", "transpose the input, or use torch.channels_last")
        # As in MindSpore there always are gamma and beta; without `affine` they are not trained.
        self.kind.__init__(self, num_features, eps=eps, momentum=1.0 - momentum, affine=True)
        self.training = False
        made_of(self, dtype)
        for statistics in (self.running_mean, self.running_var):
            statistics.data = statistics.data.float()
        _not_decayed(self.weight, self.bias)
        self.weight.requires_grad_(bool(affine))
        self.bias.requires_grad_(bool(affine))
        self.use_batch_statistics = use_batch_statistics
        fill(f"{name}: gamma_init", self.weight, gamma_init)
        fill(f"{name}: beta_init", self.bias, beta_init)
        fill(f"{name}: moving_mean_init", self.running_mean, moving_mean_init)
        fill(f"{name}: moving_var_init", self.running_var, moving_var_init)

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
    """Layer normalisation over the last dimensions.

    Args:
        normalized_shape: their sizes.
        begin_norm_axis: the first of them, -1 for what `normalized_shape` says; checked when the layer is called.
        begin_params_axis: likewise; gamma and beta have `normalized_shape`.
        gamma_init, beta_init: as for convolutions.
        epsilon: added to the variance.
        dtype: format of gamma and beta.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], begin_norm_axis: int = -1, begin_params_axis: int = -1,
        gamma_init: Any = "ones", beta_init: Any = "zeros", epsilon: float = 1e-7, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        for name, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis)):
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise MindSporeTypeError(f"LayerNorm: {name}={axis!r} is a {type(axis).__name__}; expected an int")
        nn.LayerNorm.__init__(self, shape, eps=epsilon)
        self.training = False
        self.begin_norm_axis, self.begin_params_axis = begin_norm_axis, begin_params_axis
        made_of(self, dtype)
        _not_decayed(self.weight, self.bias)
        fill("LayerNorm: gamma_init", self.weight, gamma_init)
        fill("LayerNorm: beta_init", self.bias, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised.

        Raises:
            MindSporeValueError: an axis that is not the first of the last dimensions.
        """
        first = x.dim() - len(self.normalized_shape)
        for name in ("begin_norm_axis", "begin_params_axis"):
            axis = getattr(self, name)
            if axis != -1 and axis % x.dim() != first:
                raise MindSporeValueError(
                    f"LayerNorm: {name}={axis} for an input of {x.dim()} dimensions and normalized_shape "
                    f"{tuple(self.normalized_shape)}, which begins at {first}; give that axis, or -1"
                )
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(Cell, nn.GroupNorm):
    """Group normalisation.

    Args:
        num_groups: groups of channels.
        num_channels: channels.
        eps: added to the variance.
        affine: whether gamma and beta are trained.
        gamma_init, beta_init: as for convolutions.
        dtype: format of gamma and beta.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, gamma_init: Any = "ones",
        beta_init: Any = "zeros", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        nn.GroupNorm.__init__(self, num_groups, num_channels, eps=eps, affine=True)
        self.training = False
        made_of(self, dtype)
        _not_decayed(self.weight, self.bias)
        self.weight.requires_grad_(bool(affine))
        self.bias.requires_grad_(bool(affine))
        fill("GroupNorm: gamma_init", self.weight, gamma_init)
        fill("GroupNorm: beta_init", self.bias, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def _not_decayed(*parameters: Any) -> None:
    """Mark gamma and beta: MindSpore's optimizers leave them out of weight decay, by their names."""
    for parameter in parameters:
        setattr(parameter, NOT_DECAYED, True)
