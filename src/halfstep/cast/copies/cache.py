"""Low copies of fp32 weights, frozen ones too, each made once per region.

torch's own cache is keyed by the tensor alone, so it returns a stale copy after an in-place update and the wrong format
where regions of two formats nest; and it never keeps a frozen weight, which is cast at every use. Here the key is
tensor, version, address and format. The cache belongs to one thread and ends with its outermost region: nothing tells
of a write through ``.data``, which is how momentum encoders are updated, so no copy may outlive a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

__all__ = ["WeightCasts", "address"]


def address(tensor: Tensor) -> int:
    """Return where the values of `tensor` are; 0 for a fake one, which has none."""
    return 0 if is_fake(tensor) else tensor.data_ptr()


def _witness(source: Tensor, low: Tensor) -> Hashable:
    """Return what changes when `source` gets another value, or its copy is written into."""
    return source._version, address(source), -1 if low.is_inference() else low._version


class WeightCasts:
    """The casts of one thread: (weight or view of one, version, format) -> low tensor with its autograd edge.

    Beside them it holds the one activation cast last, for what three layers read one after the other: query, key and
    value, or the two halves of a gated unit. Each reader gets an edge of its own, so that their gradients are summed in
    fp32, as after a cast for each. The activation itself is held weakly, and only what autograd computed is held at
    all: nobody else writes into its memory. A low copy that somebody wrote into is not handed out again.
    """

    __slots__ = ("_casts", "_latest")

    def __init__(self) -> None:
        self._casts: dict[Hashable, tuple[Tensor, Hashable, Tensor]] = {}
        self._latest: tuple[weakref.ref[Tensor], Hashable, bool, Tensor] | None = None

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`, from the cache if this very value was cast before.

        The cast is recorded by autograd even under `torch.no_grad`, so that a later use with gradients finds its edge.
        Casts made in inference mode serve inference mode only.
        """
        inference = torch.is_inference_mode_enabled()
        if inference and weight.is_inference():  # it has no version that would tell of a change
            return weight.to(dtype)
        return self._kept((id(weight), dtype, inference), weight, weight, dtype)

    def cast_view(self, view: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `view`, a view of `weight`, in `dtype`; the same part of the same value is cast once."""
        inference = torch.is_inference_mode_enabled()
        if inference and weight.is_inference():
            return view.to(dtype)
        place = (view.storage_offset(), view.shape, view.stride(), view.requires_grad)
        return self._kept((id(weight), dtype, inference, place), weight, view, dtype)

    def _kept(self, key: Hashable, weight: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
        known = self._casts.get(key)
        if known is not None and known[0] is weight and known[1] == _witness(weight, known[2]):
            return known[2]
        if torch.is_grad_enabled():
            low = value.to(dtype)
        else:
            with torch.enable_grad():
                low = value.to(dtype)
        self._casts[key] = (weight, _witness(weight, low), low)
        return low

    def cast_latest(self, activation: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `activation` in `dtype`, from the cache if it was the activation cast last."""
        if activation.grad_fn is None:
            return activation.to(dtype)
        known, recording = self._latest, torch.is_grad_enabled()
        if known is not None and known[0]() is activation and known[3].dtype is dtype and known[2] is recording:
            if known[1] == _witness(activation, known[3]):
                if not recording:
                    return known[3]
                again: Tensor = _Reader.apply(activation, known[3].detach())  # type: ignore[no-untyped-call]
                return again
        low = activation.to(dtype)
        self._latest = (weakref.ref(activation, self._forget), _witness(activation, low), recording, low)
        return low

    def _forget(self, activation: weakref.ref[Tensor]) -> None:
        """Let go of the low copy of an activation that is gone."""
        if self._latest is not None and self._latest[0] is activation:
            self._latest = None

    def clear(self) -> None:
        """Forget every cast."""
        self._casts.clear()
        self._latest = None


class _Reader(torch.autograd.Function):
    """One more edge from a low copy to the activation it was cast from."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = activation.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
