"""Normalisations with MindSpore's arguments and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import (
    MindSporeTypeError,
    MindSporeValueError,
    check_number,
    check_only,
    check_whole,
)
from halfstep.compat.mindspore.nn.layers.basic import Layer
from halfstep.compat.mindspore.nn.optim import NOT_DECAYED
from halfstep.compat.shared import alias
from halfstep.torch_private.modules import check_input_dim

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "LayerNorm"]


class _Norm(Layer):
    weight: Any
    bias: Any

    def begin(self, gamma_init: Any, beta_init: Any, *, trained: bool = True) -> None:
        """Initialise gamma and beta; MindSpore's optimizers leave them out of weight decay, by their names."""
        for parameter in (self.weight, self.bias):
            setattr(parameter, NOT_DECAYED, True)
            parameter.requires_grad_(bool(trained))
        self.fill("gamma_init", self.weight, gamma_init)
        self.fill("beta_init", self.bias, beta_init)


class _BatchNorm(_Norm):
    """A batch normalisation with MindSpore's arguments.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: share of the old running statistics that stays; torch's momentum is one less this.
        affine: whether gamma and beta, which there always are as in MindSpore, are trained.
        gamma_init, beta_init: as for convolutions.
        moving_mean_init, moving_var_init: how the running statistics begin, likewise.
        use_batch_statistics: True or False: always or never those of the batch; None: while training. Those
            of the batch also move the running ones.
        data_format: "NCHW".
        dtype: format of gamma and beta.
    """

    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    eps: float
    momentum: Any

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True,
        gamma_init: Any = None, beta_init: Any = None, moving_mean_init: Any = None, moving_var_init: Any = None,
        use_batch_statistics: bool | None = None, data_format: str = "NCHW", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        share = check_number(f"{name}: momentum", momentum, "the share of the old, 0 to 1")
        if not 0.0 <= share <= 1.0:
            raise MindSporeValueError(f"{name}: momentum={momentum!r}; expected the share of the old, 0 to 1")
        if use_batch_statistics not in (None, True, False):
            raise MindSporeTypeError(f"{name}: use_batch_statistics={use_batch_statistics!r}; True, False or None")
        check_only(name, "data_format", data_format, "NCHW", "transpose the input, or use torch.channels_last")
        self.make(num_features, eps=eps, momentum=1.0 - momentum, affine=True, dtype=dtype)
        for statistics in (self.running_mean, self.running_var):
            statistics.data = statistics.data.float()
        self.use_batch_statistics = use_batch_statistics
        self.begin(gamma_init, beta_init, trained=affine)
        self.fill("moving_mean_init", self.running_mean, moving_mean_init)
        self.fill("moving_var_init", self.running_var, moving_var_init)

    gamma = alias("weight", "The factor; torch's weight.")
    beta = alias("bias", "The summand; torch's bias.")
    moving_mean = alias("running_mean", "The running mean.")
    moving_variance = alias("running_var", "The running variance.")

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        check_input_dim(self.kind)(self, x)
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


class LayerNorm(_Norm, nn.LayerNorm):
    """Layer normalisation over the last dimensions.

    Args:
        normalized_shape: their sizes.
        begin_norm_axis: the first of them, -1 for that of `normalized_shape`; checked when the layer is called.
        begin_params_axis: likewise; gamma and beta have `normalized_shape`.
        gamma_init, beta_init: as for convolutions.
        epsilon: added to the variance.
        dtype: format of gamma and beta.
    """

    kind = nn.LayerNorm

    def __init__(
        self, normalized_shape: int | Sequence[int], begin_norm_axis: int = -1, begin_params_axis: int = -1,
        gamma_init: Any = "ones", beta_init: Any = "zeros", epsilon: float = 1e-7, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        for name, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis)):
            check_whole(f"LayerNorm: {name}", axis, "an int", least=-(2**31))
        self.make(shape, eps=epsilon, dtype=dtype)
        self.begin_norm_axis, self.begin_params_axis = begin_norm_axis, begin_params_axis
        self.begin(gamma_init, beta_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return `x` normalised."""
        first = x.dim() - len(self.normalized_shape)
        for name in ("begin_norm_axis", "begin_params_axis"):
            axis = getattr(self, name)
            if axis != -1 and axis % x.dim() != first:
                raise MindSporeValueError(
                    f"LayerNorm: {name}={axis} for an input of {x.dim()} dimensions and normalized_shape "
                    f"{tuple(self.normalized_shape)}, which begins at {first}; give that axis, or -1"
                )
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(_Norm, nn.GroupNorm):
    """Group normalisation.

    Args:
        num_groups: groups of channels.
        num_channels: channels.
        eps: added to the variance.
        affine: whether gamma and beta are trained.
        gamma_init, beta_init: as for convolutions.
        dtype: format of gamma and beta.
    """

    kind = nn.GroupNorm

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, gamma_init: Any = "ones",
        beta_init: Any = "zeros", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.make(num_groups, num_channels, eps=eps, affine=True, dtype=dtype)
        self.begin(gamma_init, beta_init, trained=affine)
