"""``apex.normalization``: layer and RMS norms under Apex's names; torch's, fused where torch has a kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine",
]  # fmt: skip


class _Fused(nn.Module):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """Layer normalisation; torch.nn.LayerNorm.

    Args:
        normalized_shape: the last axes.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and a bias.
        memory_efficient: Apex keeps the output and not the input for backward; torch keeps the input, with the same
            result.
    """


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """Normalisation by the root of the mean square; torch.nn.RMSNorm. The arguments are those of `FusedLayerNorm`."""


class _Mixed(_Fused):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, *, memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        if not elementwise_affine:
            name = type(self).__name__
            remedy = f"there is no weight; use {name.removeprefix('Mixed')}"
            raise RuntimeError(f"{name}(elementwise_affine=False): {remedy}")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self: Any, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, self.weight.dtype)
        parameters = [p.to(wide) for p in (self.weight, getattr(self, "bias", None)) if p is not None]
        made: Tensor = self._function(input.to(wide), self.normalized_shape, *parameters, self.eps)
        return made.to(self.weight.dtype)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """`FusedLayerNorm` whose result has the format of its weight, whatever that of the input."""

    _function = staticmethod(F.layer_norm)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """`FusedRMSNorm` whose result has the format of its weight, whatever that of the input."""

    _function = staticmethod(F.rms_norm)


def fused_layer_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return `input` normalised over the last axes."""
    return F.layer_norm(input, _shape(normalized_shape), None, None, eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """Return `input` normalised over the last axes, times `weight`, plus `bias`."""
    return F.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return `input` divided by the root of its mean square over the last axes."""
    return F.rms_norm(input, _shape(normalized_shape), None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` divided by the root of its mean square over the last axes, times `weight`."""
    return F.rms_norm(input, _shape(normalized_shape), weight, eps)


def _shape(normalized_shape: Any) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
