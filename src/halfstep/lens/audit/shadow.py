"""Shadow: one operator call again by itself, in the shadow format and as the policy runs it, forward and backward.

What the two differ by, on the same inputs and the same random numbers, is that operator's own doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.cast.arithmetic.functions import rules_off
from halfstep.cast.state import STATE
from halfstep.formats import FP32, Format
from halfstep.lens.audit.comparison import Hidden
from halfstep.lens.audit.reference import floats_of, widened_dtypes
from halfstep.lens.audit.rows import Tally
from halfstep.lens.audit.signs import note_signs
from halfstep.lens.tracing import OperatorCall
from halfstep.snapshot import same_numbers
from halfstep.torch_private.autograd import top_saved_tensors_default_hooks
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import map_tensors

__all__ = ["RANDOM", "Pair", "Shadows"]

RANDOM = frozenset(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu bernoulli normal "
    "multinomial poisson gumbel_softmax multi_head_attention_forward scaled_dot_product_attention lstm gru rnn_tanh "
    "rnn_relu fractional_max_pool2d fractional_max_pool3d uniform random exponential cauchy geometric".split()
)
"""Operators that may draw random numbers: their shadows draw the same."""

SELECTING = frozenset("relu relu6 cat stack where masked_fill clamp abs neg hstack vstack".split())
"""Operators that choose and copy: their backward passes round nothing."""


@dataclass(slots=True)
class Pair:
    """One operator call on leaves of its own: as the policy runs it and as the shadow does, ready to go backward."""

    tally: Tally
    low: Tensor
    wide: Tensor
    low_leaves: list[Tensor]
    wide_leaves: list[Tensor]
    names: list[str]
    gradient: Tensor | None = None

    def gradients(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Go backward on the gradient that has arrived; yield parameter or "", what it makes of it, what the shadow."""
        given = self.gradient
        if given is None:
            return
        low = torch.autograd.grad(self.low, self.low_leaves, given.to(self.low.dtype), allow_unused=True)
        wide = torch.autograd.grad(self.wide, self.wide_leaves, given.to(self.wide.dtype), allow_unused=True)
        for name, found, wanted in zip(self.names, low, wide, strict=True):
            if found is not None and wanted is not None and found.layout is torch.strided:
                yield name, found, wanted


class Shadows:
    """Runs shadows.

    Args:
        dtype: of the shadows.
        devices: device types of the region.
        parameters: id -> name of the audited model's parameters.

    Attributes:
        backward: whether shadows also go backward, in this step.
        skipped: calls whose operator does not take arguments of the shadow format.
    """

    def __init__(self, dtype: torch.dtype, devices: tuple[str, ...], parameters: Mapping[int, str]) -> None:
        self.dtype, self.devices, self.parameters = dtype, devices, parameters
        self.backward = True
        self.skipped = 0

    def run(
        self,
        call: OperatorCall,
        tallies: tuple[Tally, Callable[[], Tally]],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        form: Format,
        random: Any,
        hidden: Hidden | None = None,
    ) -> Callable[[], Pair | None] | None:
        """Compare `output` with what the shadow format gives, under no rule.

        Args:
            call: which call it is.
            tallies: of its activation; and what makes that of its activation gradient.
            func: the operator.
            args: what it was given.
            kwargs: the same by name.
            output: its result.
            form: the format of `output`.
            random: state of the generators before it, or None if it draws no numbers.
            hidden: what of its result is a mask.

        Returns:
            What runs the operator once more under the rules, ready to go backward beside the shadow; None where it
            has nothing to round there, or where shadows do not go backward.
        """
        tally, backward_tally = tallies
        differentiable = self.backward and output.requires_grad and not call.in_place and call.op not in SELECTING
        leaves: list[tuple[Tensor, Tensor, str]] = []
        known: dict[int, Tensor] = {}  # h * h has one leaf, here and in the run under the rules

        def wide_leaf(tensor: Tensor) -> Tensor:
            if id(tensor) in known:
                return known[id(tensor)]
            if not tensor.is_floating_point() or tensor.is_nested:
                return tensor.detach() if tensor.is_complex() else tensor
            made = tensor.detach().to(self.dtype)
            made = made.clone() if made.data_ptr() == tensor.data_ptr() and call.in_place else made
            if differentiable and tensor.requires_grad:
                made.requires_grad_()
                known[id(tensor)] = made
                leaves.append((tensor, made, self.parameters.get(id(tensor), "")))
            return made

        wide_args, wide_kwargs = map_tensors((args, kwargs), wide_leaf)
        wide_args, wide_kwargs = widened_dtypes(wide_args, wide_kwargs, self.dtype)
        name = getattr(func, "__name__", "")
        wide_func = func
        if name in {"half", "bfloat16"}:
            wide_func, wide_args = torch.Tensor.to, (wide_args[0], self.dtype)
        try:
            with (
                _unseen_by_checkpointing(),
                same_numbers(random),
                torch.set_grad_enabled(differentiable),
                _without_rules(self.devices),
            ):
                wide = floats_of(wide_func(*wide_args, **wide_kwargs))[0]
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            self.skipped += 1
            return None
        if wide.shape != output.shape:
            return None
        tally.local.add(output.detach(), wide.detach(), form, hidden=hidden)
        if form.is_narrow:
            tally.add_wanted(wide.detach() if hidden is None else wide.detach()[~hidden.of(wide.detach())])
        if form.mantissa_bits < FP32.mantissa_bits:
            note_signs(tally, call.op, args, kwargs, output, wide.detach())
        if differentiable and leaves and wide.requires_grad and len(floats_of(output)) == 1:
            return partial(_pair, backward_tally(), func, args, kwargs, wide, leaves, random)
        return None


def _pair(
    tally: Tally,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wide: Tensor,
    leaves: list[tuple[Tensor, Tensor, str]],
    random: Any,
) -> Pair | None:
    made: dict[int, Tensor] = {}
    wanted = {id(tensor) for tensor, _, _ in leaves}

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in wanted:
            return tensor.detach()
        if id(tensor) not in made:
            detached = tensor.detach()
            made[id(tensor)] = nn.Parameter(detached) if isinstance(tensor, nn.Parameter) else detached.requires_grad_()
        return made[id(tensor)]

    low_args, low_kwargs = map_tensors((args, kwargs), leaf)
    with _unseen_by_checkpointing(), same_numbers(random), torch.enable_grad(), _own_casts():
        low = floats_of(func(*low_args, **low_kwargs))[0]
    if not low.requires_grad:
        return None
    tensors, wide_leaves, names = zip(*leaves, strict=True)
    low_leaves = [made[id(tensor)] for tensor in tensors]
    return Pair(tally, low, wide, low_leaves, list(wide_leaves), list(names))


# ------------------------------------------------------------------ as if nothing had run


def _unseen_by_checkpointing() -> AbstractContextManager[Any]:
    """Keep what a block saves for backward from hooks that count it, as those of activation checkpointing do."""
    if top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


@contextmanager
def _own_casts() -> Iterator[None]:
    """Leave the low copies alone that the audited run shares between its operators."""
    shared, STATE.casts = STATE.casts, {}
    try:
        yield
    finally:
        STATE.casts = shared


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _without_rules(devices: tuple[str, ...]) -> Iterator[None]:
    """Run operators as they are: no autocast, no rule, no mode."""
    if not devices:
        with DisableTorchFunction():
            yield
        return
    with rules_off(devices[0]), _without_rules(devices[1:]):
        yield
