"""linear_cross_entropy: the loss of a linear layer's outputs, a part of them at a time, so that no logits are saved.

Over a large vocabulary the logits are most of what a language model saves. One of two things is saved instead:

- The gradients of input, weight and bias, computed in the forward pass right behind the logits of some rows
  (`GradientsAhead`); the backward pass multiplies them by the gradient that arrives. Three products, as without this
  function. They have no derivative, and are taken only where they are no larger than low logits would be.
- The input and a sum for each row (`LinearCrossEntropy`); the backward pass computes the logits of some classes again,
  a fourth product. Second derivatives, torch.func, fewest bytes, saved and moved: parts of rows read and write the
  weight's whole gradient each. Always on accelerators, in fp16, where gradients that precede the loss scale round to 0,
  and for losses that are not reduced, whose gradients are no multiples of one.

(Liger, github.com/linkedin/Liger-Kernel, and torch, nn.LinearCrossEntropyOptions, have the first way in other forms.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from halfstep.arguments import COUNT, FLAG, FRACTION, INDEX, NONE, TENSOR, check, one_of
from halfstep.cast.arithmetic.emulate import EMULATED
from halfstep.cast.arithmetic.rounded import apply
from halfstep.cast.losses.cross_entropy import cross_entropy
from halfstep.cast.losses.linear_functions import GradientsAhead, LinearCrossEntropy
from halfstep.cast.rules.dispatch import tensors_of
from halfstep.cast.state import STATE
from halfstep.errors import LossError
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels.choose import KERNEL_TYPES, load_kernels
from halfstep.kernels.reference.cross_entropy import CHUNK, LARGE_CHUNK, REDUCTIONS
from halfstep.policy.resolve import units
from halfstep.torch_private.autograd import forward_ad_level
from halfstep.torch_private.modes import are_functorch_transforms_active

ENOUGH, LARGE = 512, 1 << 22
"""Rows or classes of a part at least, and its logits, where a CPU's kernels read low logits. In parts of few rows
adding up the weight's gradient takes longer than its product (50,257 classes, 768 features, all products: 41 rows at a
time take 1.7 times as long as 256, and 512 as 256); every part waits for all threads."""

FEWEST, WHOLE = 5, 64
"""Parts at least on an accelerator, and what the number of their classes is a multiple of. A part's logits, which their
gradient overwrites, are a tenth of all logits and gradients; each part reads and writes the input's fp32 gradient."""

NOT_COUNTED = -100  # torch's default for targets that do not count


class Settings(NamedTuple):
    """How losses are made of logits: the arguments of `linear_cross_entropy` but for the tensors of the product."""

    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    chunk: int | None = None
    recompute: bool = False

    @property
    def ignored(self) -> int:
        """The target that does not count."""
        return NOT_COUNTED if self.ignore_index is None else self.ignore_index


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    recompute: bool = False,
) -> Tensor:
    """Cross entropy of ``F.linear(input, linear_weight, linear_bias)`` without holding or saving these logits.

    Named as F.linear_cross_entropy of torch 2.13 is; on older versions it is there too. In a region the product has the
    rule of `linear` and the loss that of `cross_entropy`: with a low product and an fp32 loss, as in `mixed` and
    `pure`, logits are rounded once to the low format, and all sums are fp32. torch.func and torch.compile work, with
    `recompute` second derivatives; these, and transforms of torch.func, hold all logits while they run.

    Args:
        input: (F,) or (..., F), fp32, fp64, fp16 or bf16.
        linear_weight: (C, F); with more dimensions, (C, d1, ..., F), the losses are computed from all logits.
        target: class indices int64 of the shape of `input` without its last dimension. Class probabilities, of the
            shape of the logits, are as large as these, which then are all computed at once.
        linear_bias: (C,) or None.
        weight: of the classes, (C,) or None.
        reduction: "mean" (over the weights of the targets that count), "sum" or "none".
        ignore_index: class indices that do not count; None is -100.
        label_smoothing: from 0 to 1.
        chunk: as many logits exist at a time as so many rows have; None: as many as stay in a core's cache (4 MiB of
            fp32) on a CPU, of low logits 2**22 or those of 512 rows or classes; elsewhere 2**24 or a fifth of all.
        recompute: save the input and compute the logits again in the backward pass, for second derivatives and the
            fewest bytes. False: on a CPU save the gradients of input, weight and bias, computed in the forward pass,
            except in fp16, with reduction="none", under torch.func, and where these have more elements than the logits.

    Returns:
        0-dim, or with reduction="none" of the shape of `target`; fp32, or fp64 of fp64 inputs.

    Raises:
        LossError: shapes, formats or settings that do not belong together; the message names them. In a backward pass
            with create_graph=True: the gradients were computed in the forward pass, and `recompute` is needed.

    Examples:
        >>> hidden, head = torch.randn(4, 16), nn.Linear(16, 1000)
        >>> loss = hs.linear_cross_entropy(hidden, head.weight, torch.tensor([1, 2, 3, 4]), linear_bias=head.bias)
        >>> loss.backward()
    """
    tensors = (input, linear_weight, target, linear_bias, weight)
    if not torch.compiler.is_compiling():
        check(
            "linear_cross_entropy",
            LossError,
            input=(input, TENSOR),
            linear_weight=(linear_weight, TENSOR),
            target=(target, TENSOR),
            linear_bias=(linear_bias, TENSOR | NONE),
            weight=(weight, TENSOR | NONE),
            reduction=(reduction, one_of(*REDUCTIONS)),
            ignore_index=(ignore_index, INDEX | NONE),
            label_smoothing=(label_smoothing, FRACTION),
            chunk=(chunk, COUNT | NONE),
            recompute=(recompute, FLAG),
        )
    named: dict[str, Any] = {
        "linear_bias": linear_bias,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "chunk": chunk,
        "recompute": recompute,
    }
    if torch.compiler.is_compiling():  # which traces modes around torch's own functions only
        mode = STATE.mode
        if mode is not None and mode.active(tensors_of((input, linear_weight, linear_bias), mode.devices)):
            handler = mode.handlers.get(linear_cross_entropy)
            if handler is not None:
                return cast(Tensor, handler(mode, linear_cross_entropy, tensors[:3], named))
    elif has_torch_function(tensors):
        return handle_torch_function(linear_cross_entropy, tensors, *tensors[:3], **named)
    device = input.device.type
    settings = Settings(weight, reduction, ignore_index, label_smoothing, chunk, recompute)
    if not torch.is_autocast_enabled(device):
        emulating = input.dtype is torch.float16 and not units(device).fp16
        return fused_loss(input, linear_weight, linear_bias, target, settings, emulating=emulating)
    low = torch.get_autocast_dtype(device)  # torch.autocast without rules of ours: linear is on its list everywhere
    low_input, low_weight, low_bias = (
        t.to(low) if t is not None and t.dtype in POLICY_DTYPES else t for t in (input, linear_weight, linear_bias)
    )
    with torch.autocast(device, enabled=False):
        return fused_loss(low_input, low_weight, low_bias, target, settings)  # type: ignore[arg-type]


def fused_loss(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    settings: Settings,
    *,
    emulating: bool = False,
) -> Tensor:
    """Compute `linear_cross_entropy` of tensors that are in their formats already, with autocast off."""
    _check(input, linear_weight, linear_bias, target, settings)
    lean = (
        target.dtype is torch.long
        and linear_weight.dim() == 2
        and not (settings.weight is not None and settings.weight.requires_grad)
        and input.numel() > 0
        and linear_weight.numel() > 0
        and forward_ad_level() < 0
    )
    if not lean:
        linear = EMULATED["linear"] if emulating else F.linear
        loss = cross_entropy if input.dtype in LOW_DTYPES else F.cross_entropy
        return loss_in_parts(input, linear_weight, linear_bias, target, settings, linear=linear, loss=loss)
    rows, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    weight = settings.weight
    if weight is not None:
        weight = weight.to(torch.float64 if input.dtype is torch.float64 else torch.float32)
    product = (rows, linear_weight, linear_bias)
    needs = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in product)
    arguments = (*product, labels, weight, settings.ignored, settings.label_smoothing, settings.reduction)
    compiling = torch.compiler.is_compiling()

    def run(function: type[Function], *last: Any) -> Any:
        return function.apply(*arguments, *last) if compiling else apply(function, *arguments, *last)

    needs = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in product)
    of_rows, of_classes = _parts(rows, linear_weight, settings.chunk)
    if _takes_gradients_ahead(product, needs, settings):
        return cast(Tensor, run(GradientsAhead, of_rows, needs))
    found: Tensor = run(LinearCrossEntropy, of_classes, emulating)[0]
    return found.view(target.shape) if settings.reduction == "none" else found


def loss_in_parts(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    settings: Settings,
    *,
    linear: Callable[..., Tensor] = F.linear,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> Tensor:
    """Compute what `linear_cross_entropy` means, `linear` and then `loss`, with all logits at once."""
    rows = input.reshape(-1, input.shape[-1]) if input.dim() > 2 else input
    classes, *places = linear_weight.shape[:-1]
    logits = linear(rows, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten())
    logits = logits.reshape(*rows.shape[:-1], classes, *places)
    given = loss(
        logits,
        target.reshape(*rows.shape[:-1], *target.shape[input.dim() - 1 :]),
        settings.weight,
        ignore_index=settings.ignored,
        reduction=settings.reduction,
        label_smoothing=settings.label_smoothing,
    )
    return given.reshape(*input.shape[:-1], *places) if settings.reduction == "none" else given


def _check(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, settings: Settings
) -> None:
    """Raise LossError for arguments that do not belong together, before anything is computed."""
    if input.dim() < 1 or linear_weight.dim() < 2 or (linear_weight.dim() > 2 and input.dim() != 2):
        raise LossError(
            f"linear_cross_entropy takes input (..., F) and linear_weight (C, F), or (N, F) and (C, d1, ..., F); got "
            f"{_shape(input)} and {_shape(linear_weight)}"
        )
    if input.shape[-1] != linear_weight.shape[-1]:
        raise LossError(
            f"linear_cross_entropy: the last dimensions of input {_shape(input)} and linear_weight "
            f"{_shape(linear_weight)} are the features and must be equal"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise LossError(
            f"linear_cross_entropy: linear_bias must have the shape {tuple(linear_weight.shape[:-1])}, that of "
            f"linear_weight without its last dimension; got {_shape(linear_bias)}"
        )
    formats = {t.dtype for t in (input, linear_weight, linear_bias) if t is not None}
    if len(formats) > 1 or not formats <= POLICY_DTYPES | {torch.float64}:
        names = ", ".join(sorted(str(f).removeprefix("torch.") for f in formats))
        raise LossError(
            f"linear_cross_entropy: input, linear_weight and linear_bias must have one floating format; got {names}; "
            "call it inside hs.autocast or hs.TrainStep, which cast them, or cast them yourself"
        )
    rows, (classes, *places) = input.shape[:-1], linear_weight.shape[:-1]
    of_indices, of_shares = (*rows, *places), (*rows, classes, *places)
    if not (
        (target.dtype is torch.long and target.shape == of_indices)
        or (target.is_floating_point() and target.shape == of_shares)
    ):
        raise LossError(
            f"linear_cross_entropy: target must be class indices, int64 of shape {of_indices}, or class probabilities, "
            f"floating of shape {of_shares}; got {str(target.dtype).removeprefix('torch.')} of shape {_shape(target)}"
        )
    if target.is_floating_point() and settings.ignore_index is not None:
        raise LossError(
            f"linear_cross_entropy: ignore_index={settings.ignore_index} is a class index, and target holds "
            "class probabilities; leave ignore_index out"
        )
    if settings.weight is not None and settings.weight.shape != (classes,):
        raise LossError(
            f"linear_cross_entropy: weight must have one value a class, shape ({classes},); got "
            f"{_shape(settings.weight)}"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# ------------------------------------------------------------------ a part at a time


def _parts(input: Tensor, linear_weight: Tensor, chunk: int | None) -> tuple[int, int]:
    """Return how many rows, or else how many classes, a part has."""
    rows, classes, device = len(input), len(linear_weight), input.device.type
    if chunk is not None:
        return chunk, max(1, chunk * classes // rows)
    if device != "cpu":
        many, least = max(LARGE_CHUNK, rows * classes // FEWEST), WHOLE
    elif input.dtype in LOW_DTYPES and not torch.compiler.is_compiling() and not load_kernels(device):
        many, least = LARGE, ENOUGH
    else:
        many, least = CHUNK[device], 1
    return max(many // classes, least), -(-many // (rows * least)) * least


def _takes_gradients_ahead(
    product: tuple[Tensor, Tensor, Tensor | None], needs: tuple[bool, ...], settings: Settings
) -> bool:
    """Return whether the gradients that are needed of input, weight and bias are computed in the forward pass."""
    input, linear_weight, _ = product
    size = sum(t.numel() for t, needed in zip(product, needs, strict=True) if t is not None and needed)
    return (
        input.device.type == "cpu"
        and 0 < size <= len(input) * len(linear_weight)
        and not settings.recompute
        and settings.reduction != "none"
        and input.dtype is not torch.float16
        and all(t is None or type(t) in KERNEL_TYPES for t in product)
        and not are_functorch_transforms_active()
    )
