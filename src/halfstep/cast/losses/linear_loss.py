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
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from halfstep.arguments import COUNT, FLAG, FRACTION, INDEX, NONE, TENSOR, check, one_of
from halfstep.cast.arithmetic.emulate import EMULATED
from halfstep.cast.arithmetic.rounded import apply, rules_off
from halfstep.cast.losses.cross_entropy import cross_entropy, differentiated
from halfstep.cast.rules.dispatch import tensors_of
from halfstep.cast.state import STATE
from halfstep.errors import LossError
from halfstep.formats import LOW_DTYPES, POLICY_DTYPES
from halfstep.kernels.choose import KERNEL_TYPES, gradient_into, load_kernels, losses, row_sums
from halfstep.kernels.reference import cross_entropy as plain
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
TRACED = torch.__version__ >= "2.13"  # 2.11 compiles the functions below to wrong gradients; 2.12 was not tried


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
            reduction=(reduction, one_of(*plain.REDUCTIONS)),
            ignore_index=(ignore_index, INDEX | NONE),
            label_smoothing=(label_smoothing, FRACTION),
            chunk=(chunk, COUNT | NONE),
            recompute=(recompute, FLAG),
        )
    settings = Settings(weight, reduction, ignore_index, label_smoothing, chunk, recompute)
    named: dict[str, Any] = {"linear_bias": linear_bias, **settings._asdict()}
    if torch.compiler.is_compiling():  # which traces modes around torch's own functions only
        mode = STATE.mode
        if mode is not None and mode.active(tensors_of((input, linear_weight, linear_bias), mode.devices)):
            handler = mode.handlers.get(linear_cross_entropy)
            if handler is not None:
                return cast(Tensor, handler(mode, linear_cross_entropy, tensors[:3], named))
    elif has_torch_function(tensors):
        return handle_torch_function(linear_cross_entropy, tensors, *tensors[:3], **named)
    device = input.device.type
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
        and (TRACED or not torch.compiler.is_compiling())
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
        many, least = max(plain.LARGE_CHUNK, rows * classes // FEWEST), WHOLE
    elif input.dtype in LOW_DTYPES and not torch.compiler.is_compiling() and not load_kernels(device):
        many, least = LARGE, ENOUGH
    else:
        many, least = plain.CHUNK[device], 1
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


# ------------------------------------------------------------------ the two autograd functions


def _no_rules(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else rules_off(device)


class GradientsAhead(Function):
    """Reduced cross entropy of a linear layer, with those gradients of input, weight and bias that `needs` names.

    Parts are rows. The gradients of the weight and the bias are summed in fp32 over them and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        ignored: int,
        smoothing: float,
        reduction: str,
        rows: int,
        needs: tuple[bool, ...],
    ) -> Tensor:
        """Return the loss, 0-dim and wide; keep its gradients."""
        layer = _LinearLayer(linear_weight, linear_bias, emulating=False)
        one = torch.ones((), dtype=layer.wide, device=input.device)
        share = plain.shares(one, target, weight, ignored, smoothing, layer.classes, reduction)
        found, into = [], _Gradients(layer, input, needs, rows, layer.classes)
        walk = zip(plain.parts(rows, (input, target)), share.parts(rows), strict=True)
        for n, ((x, labels), of_part) in enumerate(walk):
            logits = layer.logits(x)
            each, lse = losses(logits, labels, weight, ignored, smoothing)
            found.append(each)
            into.add(gradient_into(logits, logits, of_part, lse), row=n * rows)
        ctx.save_for_backward(*into.rounded())
        return plain.reduced(torch.cat(found), target, weight, ignored, reduction).to(layer.wide)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that were kept, times the one that arrives; a second derivative is a LossError."""
        if torch.is_grad_enabled():
            raise LossError(
                "linear_cross_entropy computed its gradients in the forward pass, and they have no derivative; call it "
                "with recompute=True where backward runs with create_graph=True"
            )
        with _no_rules(grads[0].device.type):
            found = [None if g is None else g * grads[0] for g in ctx.saved_tensors]
        return *found, None, None, None, None, None, None, None


class LinearCrossEntropy(Function):
    """Cross entropy of ``F.linear(input, linear_weight, linear_bias)`` with class indices (N,).

    Parts are classes, `count` of them. The forward pass sums exponentials over the parts, and keeps the log of their
    sum. Out of it and a part's logits, computed again, the backward pass makes their gradient, which overwrites them:
    the part's gradients of weight and bias are complete, and the input's is summed in fp32 and rounded once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        ignored: int,
        smoothing: float,
        reduction: str,
        count: int,
        emulating: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, wide: 0-dim, or (N,) if it is not reduced; and `RowSums.lse`."""
        layer = _LinearLayer(linear_weight, linear_bias, emulating)
        plain.refuse_no_class(target, layer.classes, ignored)
        by_class = plain.smoothed(smoothing, weight, layer.classes, input)
        sums = row_sums(layer.logits(input, 0, count), target, by_class)
        for first in range(count, layer.classes, count):
            sums = row_sums(layer.logits(input, first, count), target, by_class, first, sums)
        each, lse = plain.losses_of_sums(sums, target, weight, ignored, smoothing, by_class)
        return plain.reduced(each, target, weight, ignored, reduction).to(layer.wide), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments, and what the exponentials sum up to."""
        *tensors, ctx.ignored, ctx.smoothing, ctx.reduction, ctx.count, ctx.emulating = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias, from logits that are computed again."""
        input, linear_weight, linear_bias, target, weight, lse = ctx.saved_tensors
        device = input.device.type
        with _no_rules(device):
            share = plain.shares(
                grads[0], target, weight, ctx.ignored, ctx.smoothing, len(linear_weight), ctx.reduction
            )
            if differentiated(grads[0]):
                found = _differentiable(input, linear_weight, linear_bias, share)
            else:
                layer = _LinearLayer(linear_weight, linear_bias, ctx.emulating)
                into = _Gradients(layer, input, ctx.needs_input_grad[:3], len(input), ctx.count)
                for first in range(0, layer.classes, ctx.count):
                    logits = layer.logits(input, first, ctx.count)
                    into.add(gradient_into(logits, logits, share, lse, first), first=first)
                found = into.rounded()
        return *found, None, None, None, None, None, None, None


class _LinearLayer:
    """The weight and bias of a linear layer; emulating: fp32 arithmetic, each result rounded once to the low format."""

    def __init__(self, weight: Tensor, bias: Tensor | None, emulating: bool) -> None:
        self.low, self.wide, self.classes = weight.dtype, plain.widened(weight[:0]).dtype, len(weight)
        self.emulating = emulating
        self.weight = weight.float() if emulating else weight
        self.bias = bias if bias is None or not emulating else bias.float()

    def operand(self, low: Tensor) -> Tensor:
        return low.float() if self.emulating else low

    def logits(self, input: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Return the logits of `count` classes from `first` on."""
        some = slice(first, None if count is None else first + count)
        bias = None if self.bias is None else self.bias[some]
        return F.linear(self.operand(input), self.weight[some], bias).to(self.low)


class _Gradients:
    """The gradients of input, weight and bias that are needed, made of those of the logits of one part after another.

    Each part has `rows` rows and `classes` classes. What several parts add to is wide, and rounded once at the end.
    """

    def __init__(self, layer: _LinearLayer, input: Tensor, needs: tuple[bool, ...], rows: int, classes: int) -> None:
        self.layer, self.input, self.rows, self.classes = layer, input, rows, classes
        whole = (classes >= layer.classes, rows >= len(input), False)
        room = zip((input, layer.weight, layer.weight[:, 0]), needs, whole, strict=True)
        self.found = [
            torch.empty_like(t, dtype=layer.weight.dtype if complete else layer.wide) if needed else None
            for t, needed, complete in room
        ]

    def add(self, grad: Tensor, row: int = 0, first: int = 0) -> None:
        """Take the gradient of the logits of a part: from a row, and the `first` class, on."""
        rows, classes = slice(row, row + self.rows), slice(first, first + self.classes)
        of_input, of_weight, of_bias = self.found
        if of_bias is not None:
            _put(of_bias[classes], grad.sum(0, dtype=of_bias.dtype), added=row > 0)
        grad = self.layer.operand(grad)
        if of_input is not None:
            _put_product(of_input[rows], grad, self.layer.weight[classes], added=first > 0)
        if of_weight is not None:
            _put_product(of_weight[classes], grad.t(), self.layer.operand(self.input[rows]), added=row > 0)

    def rounded(self) -> list[Tensor | None]:
        """Return the gradients."""
        return [None if t is None else t.to(self.layer.low) for t in self.found]


def _put(out: Tensor, found: Tensor, *, added: bool) -> None:
    out.add_(found) if added else out.copy_(found)


def _put_product(out: Tensor, one: Tensor, other: Tensor, *, added: bool) -> None:
    """Write ``one @ other`` to `out`, which may be wide, or add it."""
    kinds: dict[str, Any] = {} if out.dtype == one.dtype else {"out_dtype": out.dtype}
    if kinds and out.device.type != "cuda":
        _put(out, torch.mm(one, other), added=added)  # no kernel gives fp32: each part is rounded, their sum is not
    elif added:
        torch.addmm(out, one, other, out=out, **kinds)
    else:
        torch.mm(one, other, out=out, **kinds)


def _differentiable(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, share: plain.Shares
) -> list[Tensor | None]:
    """Return all three gradients from all logits at once, by operators that have a derivative; nothing is rounded."""
    x, weight = plain.widened(input), plain.widened(linear_weight)
    bias = None if linear_bias is None else plain.widened(linear_bias)
    grad = plain.gradient(F.linear(x, weight, bias), share)
    of_bias = None if linear_bias is None else grad.sum(0).to(linear_bias.dtype)
    return [(grad @ weight).to(input.dtype), (grad.t() @ x).to(linear_weight.dtype), of_bias]
