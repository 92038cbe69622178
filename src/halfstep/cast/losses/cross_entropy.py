"""Losses that keep low inputs for the backward pass instead of fp32 copies of them.

torch saves fp32 log-probabilities, twice the bytes of the bf16 logits they came from. Here the fp32 probabilities are
computed again in the backward pass, by kernels that read low logits or for a few rows at a time, and their gradient is
rounded once. Without kernels the losses of the rows are those torch computes from ``logits.float()``, bit for bit; with
kernels sums are as exact or more so.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.arithmetic.rounded import apply, rules_off
from halfstep.formats import LOW_DTYPES
from halfstep.kernels.choose import gradient_into, kernels_take_logits, losses
from halfstep.kernels.reference import cross_entropy as plain
from halfstep.torch_private.autograd import forward_ad_level
from halfstep.torch_private.modes import are_functorch_transforms_active, is_legacy_batchedtensor

MANY = 1 << 20
"""Logits from which the Function is faster than torch on a CPU without kernels, or in fp16."""


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy in fp32, for fp16 or bf16 logits of class indices saving these; else by torch's own operator."""
    wide_weight = None if weight is None else weight.float()
    lean = (
        input.dtype in LOW_DTYPES
        and input.dim() > 1
        and target.dtype is torch.long
        and target.shape == input.shape[:1] + input.shape[2:]
        and input.numel() > 0
        and size_average is None
        and reduce is None
        and (weight is None or (weight.shape == input.shape[1:2] and not weight.requires_grad))
        and reduction in plain.REDUCTIONS
        and 0.0 <= label_smoothing <= 1.0
        and not torch.compiler.is_compiling()  # a compiler fuses the widening into the loss by itself
        and forward_ad_level() < 0
        and not input.is_nested
    )
    if not lean:
        target = target.float() if target.dtype in LOW_DTYPES else target
        return F.cross_entropy(
            input.float(), target, wide_weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    found = apply(_CrossEntropy, input, target, wide_weight, ignore_index, label_smoothing, reduction)
    return found[0]


def pays(logits: Tensor) -> bool:
    """Return whether `logits`, some 2**18 at least, are low and `cross_entropy` is no slower than torch's of fp32."""
    if logits.dtype not in LOW_DTYPES:
        return False
    if logits.numel() >= MANY:
        return True
    return logits.dtype is torch.bfloat16 and logits.device.type == "cpu" and kernels_take_logits(logits)


def differentiated(grad: Tensor) -> bool:
    """Return whether a backward pass of `grad` must be made of operators that have a derivative, or of vmap's."""
    if torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    return are_functorch_transforms_active() or is_legacy_batchedtensor(grad)


class _CrossEntropy(Function):
    """Cross entropy of low logits (N, C, ...) with class indices (N, ...)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float, reduction: str
    ) -> tuple[Tensor, Tensor]:
        taken = plain.parts(_rows(logits), (logits, target))
        found = [losses(x, labels, weight, ignored, smoothing) for x, labels in taken]
        each, lse = (torch.cat(some) if len(found) > 1 else some[0] for some in zip(*found, strict=True))
        return plain.reduced(each, target, weight, ignored, reduction).float(), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, target, weight, ctx.ignored, ctx.smoothing, ctx.reduction = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, target, weight, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        logits, target, weight, lse = ctx.saved_tensors
        with rules_off(logits.device.type):
            share = plain.shares(grads[0], target, weight, ctx.ignored, ctx.smoothing, logits.shape[1], ctx.reduction)
            if differentiated(grads[0]):
                return plain.gradient(logits, share).to(logits.dtype), None, None, None, None, None
            out = torch.empty_like(logits)
            rows = _rows(logits)
            for (result, x), of_part in zip(plain.parts(rows, (out, logits)), share.parts(rows), strict=True):
                gradient_into(result, x, of_part, lse)
        return out, None, None, None, None, None


def _rows(logits: Tensor) -> int:
    """Return how many of the first dimension of `logits` are read at a time: all, or so many are widened."""
    if kernels_take_logits(logits):
        return len(logits)
    return max(1, plain.CHUNK.get(logits.device.type, plain.LARGE_CHUNK) * len(logits) // logits.numel())
