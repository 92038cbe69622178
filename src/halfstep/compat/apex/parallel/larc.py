"""LARC: layer-wise adaptive rates around any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LARC"]


class LARC:
    """Layer-wise adaptive rates around any optimizer: every gradient is scaled by the size of its parameter.

    The local rate is ``trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``; with `clip` it only ever lowers
    the group's learning rate (LARC), otherwise it multiplies it (LARS). https://arxiv.org/abs/1708.03888

    Args:
        optimizer: wrapped; amp may have initialised it or initialise the LARC.
        trust_coefficient: as above.
        clip: whether the learning rate is an upper bound.
        eps: against division by zero.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"LARC wraps an optimizer and got {type(optimizer).__name__}")
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # copy and pickle look it up before it exists
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the gradients and step the optimizer, which does no weight decay of its own meanwhile."""
        stash = getattr(self.optim, "_amp_stash", None)
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        skipping = stash is not None and stash.already_patched
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = 0.0
                for parameter in () if skipping else group["params"]:
                    if parameter.grad is not None:
                        value = parameter if stash is None else stash.master(parameter)
                        self._scale(value, parameter.grad, decay, group["lr"])
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale(self, value: Tensor, gradient: Tensor, decay: float, lr: float) -> None:
        size, grad_size = value.norm(), gradient.norm()
        rate = self.trust_coefficient * size / (grad_size + size * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        scaled = (size != 0) & (grad_size != 0)
        rate = torch.where(scaled, rate, torch.ones_like(rate))
        decayed = torch.where(scaled, torch.full_like(rate, decay), torch.zeros_like(rate))
        gradient.add_(value.to(gradient.dtype) * decayed.to(gradient.dtype)).mul_(rate.to(gradient.dtype))
