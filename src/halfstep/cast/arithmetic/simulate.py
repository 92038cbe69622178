"""Simulation: operators in a format that no dtype stores, its values carried in fp32.

What a unit for the format would do: its numbers in, fp32 compute, one rounding of the result; gradients are rounded
where they arrive and where they leave. Memory is fp32's and speed is worse: this shows what a format does to a model
before there is hardware for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from halfstep.formats import POLICY_DTYPES, Format
from halfstep.trees import map_tensors


class _Rounded(Function):
    """The numbers of a format nearest to a tensor's, as fp32; its gradient is rounded to the format too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, form: Format) -> Tensor:
        return form.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return rounded_to(ctx.form, grads[0]), None


def rounded_to(form: Format, tensor: Tensor) -> Tensor:
    """Return the numbers of `form` nearest to those of `tensor`, as fp32; tensors that no policy casts as they are."""
    if tensor.dtype not in POLICY_DTYPES:
        return tensor
    function: type[Function] = _Rounded
    return cast(Tensor, function.apply(tensor.float(), form))


def simulated(func: Callable[..., Any], form: Format, *, inputs: bool = True) -> Callable[..., Any]:
    """Return `func` as units for `form` would compute it: rounded tensors in (if `inputs`), a rounded result out."""
    round_off = functools.partial(rounded_to, form)

    def call(*args: Any, **kwargs: Any) -> Any:
        if inputs:
            args, kwargs = map_tensors((args, kwargs), round_off)
        return map_tensors(func(*args, **kwargs), round_off)

    return call
