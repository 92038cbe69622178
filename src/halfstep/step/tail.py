"""The tail of a step: one reading pass over the gradients, then unscale, clip, judge and update as one factor.

torch.amp with clipping walks the gradients four times (unscale, norm, clip, step). Here one pass gives every tensor's
norm; the total says whether all is finite (the predicate), how far to clip, and, only if somebody asks, which
parameters are to blame. Unscaling and clipping become one factor that a fused optimizer applies while it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from halfstep.kernels.pick import norms_for, total_norm
from halfstep.scale.fused import must_not_skip, skips_itself, step_with_flag

__all__ = ["Verdict", "apply", "clip_factor", "judge", "prefer_fused", "takes_predicate"]

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, so equal settings clip equally
FUSED = (Adam, AdamW, SGD, Adagrad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one reading pass over the gradients says; device tensors only.

    Attributes:
        norms: (number of gradients,) fp32 2-norms of the scaled gradients.
        norm: 0-dim fp32, total 2-norm of the unscaled gradients.
        bad: 0-dim bool, whether that norm is not finite.
    """

    norms: Tensor
    norm: Tensor
    bad: Tensor


def judge(gradients: Sequence[Tensor], inverse_scale: Tensor | None) -> Verdict:
    """Read `gradients` once. `inverse_scale`: 0-dim fp32, or None where nothing is scaled."""
    norms = norms_for(gradients)
    if hasattr(norms, "full_tensor"):  # sharded gradients: every rank must come to the same verdict
        norms = norms.full_tensor()
    norm = total_norm(norms)
    if inverse_scale is not None:
        norm = norm * inverse_scale
    return Verdict(norms=norms, norm=norm, bad=~torch.isfinite(norm))


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """Return min(1, clip_norm / (norm + 1e-6)), 0-dim fp32: the factor torch.nn.utils.clip_grad_norm_ applies."""
    return (clip_norm / (norm + CLIP_EPS)).clamp(max=1.0)


def clip_values_(gradients: Sequence[Tensor], factor: Tensor | None, limit: float) -> None:
    """Unscale `gradients` in place by `factor` and clamp every element to [-limit, limit]."""
    dense = list(gradients)
    if factor is not None:
        torch._foreach_mul_(dense, factor)
    torch._foreach_clamp_min_(dense, -limit)
    torch._foreach_clamp_max_(dense, limit)


def prefer_fused(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Let `optimizer` use torch's fused form if its user chose no form and every parameter allows it.

    Only before the first step: the forms keep their step counters on different devices.
    """
    if not isinstance(optimizer, FUSED) or _stepped(optimizer):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            return
    if not parameters or not all(
        p.dtype is torch.float32 and p.device.type in {"cpu", "cuda"} and type(p.data) is Tensor for p in parameters
    ):
        return
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = True, False
    optimizer._step_supports_amp_scaling = True  # torch's marker, set by its __init__


def _stepped(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` has state that a step left (Adagrad makes some, with step 0, when it is built)."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def takes_predicate(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` reads found_inf and grad_scale on the device (torch's fused optimizers do)."""
    return skips_itself(optimizer) and not must_not_skip(optimizer)


def apply(optimizer: Optimizer, gradients: Sequence[Tensor], factor: Tensor | None, bad: Tensor) -> bool:
    """Step `optimizer` with ``gradients * factor`` unless `bad`; return whether the host had to read `bad`.

    Args:
        optimizer: holds `gradients` (or the precise copies of them) in its parameters.
        gradients: what the optimizer reads; multiplied in place where it cannot apply a factor itself.
        factor: 0-dim fp32 or None for 1.
        bad: 0-dim bool: leave parameters, optimizer state and step counts as they are.
    """
    if takes_predicate(optimizer):
        step_with_flag(optimizer, None if factor is None else factor.reciprocal(), bad.to(torch.float32), (), {})
        return False
    if not bool(bad):
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        optimizer.step()
    return True
