"""Gradients as values: `value_and_grad`, `grad`, and the older `GradOperation` and `HyperMap`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError

Weights = nn.Parameter | Sequence[nn.Parameter] | None
Position = int | Sequence[int] | None


def value_and_grad(
    fn: Callable[..., Any], grad_position: Position = 0, weights: Weights = None, has_aux: bool = False,
    return_ids: bool = False, sens_param: bool = False,
) -> Callable[..., tuple[Any, Any]]:  # fmt: skip
    """Return a function that computes `fn` and the gradient of its (first) output.

    Args:
        fn: a function or Cell; its first output is summed if it has several elements.
        grad_position: which positional arguments to differentiate by; None for none.
        weights: parameters to differentiate by.
        has_aux: whether `fn` returns more than the loss; the rest has no gradient.
        return_ids: must be False: gradients come in the order of what they belong to.
        sens_param: whether a call ends with what the gradient of the (first) output starts from, instead of ones.

    Returns:
        A function returning (what `fn` returned, gradients): of the inputs, of the weights, or a pair of both.
        Parameters that took no part have zeros. ``Parameter.grad`` is left alone.
    """
    if not callable(fn):
        raise MindSporeTypeError(f"value_and_grad: fn={fn!r} is not callable; pass a function or a Cell")
    if grad_position is None and weights is None:
        raise MindSporeValueError("value_and_grad: nothing to differentiate by; give weights= or grad_position=")
    if return_ids:
        raise MindSporeValueError("value_and_grad(return_ids=True) does not exist here; gradients come in order")
    positions = (grad_position,) if isinstance(grad_position, int) else tuple(grad_position or ())
    listed = [weights] if isinstance(weights, nn.Parameter) else list(weights or ())
    for index, weight in enumerate(listed):
        if not (isinstance(weight, Tensor) and weight.requires_grad):
            what = "has requires_grad=False" if isinstance(weight, Tensor) else f"is {weight!r}"
            raise MindSporeTypeError(
                f"value_and_grad: weights[{index}] {what}; pass parameters that are trained, such as "
                "net.trainable_params()"
            )

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if sens_param and (not args or not isinstance(args[-1], Tensor)):
            raise MindSporeTypeError(
                "value_and_grad(sens_param=True): end the call with the output's gradient, a tensor"
            )
        arguments = list(args[:-1] if sens_param else args)
        remedy = "grad_position=None differentiates by the weights alone"
        for position in positions:
            if not -len(arguments) <= position < len(arguments):
                raise MindSporeValueError(
                    f"value_and_grad(grad_position={position}): the call has {len(arguments)} positional arguments; "
                    f"{remedy}"
                )
            argument = arguments[position]
            if not isinstance(argument, Tensor) or not (argument.is_floating_point() or argument.is_complex()):
                what = f"a tensor of {argument.dtype}" if isinstance(argument, Tensor) else repr(argument)
                raise MindSporeTypeError(
                    f"value_and_grad(grad_position={position}): the argument is {what}, which has no gradient; {remedy}"
                )
            arguments[position] = argument.detach().requires_grad_()
        with torch.enable_grad():
            value = fn(*arguments, **kwargs)
        if has_aux and not isinstance(value, (tuple, list)):
            raise MindSporeTypeError(
                f"value_and_grad(has_aux=True): the function returned a {type(value).__name__}; return (loss, more), "
                "or leave has_aux out"
            )
        loss = value[0] if isinstance(value, (tuple, list)) else value
        inputs = [arguments[position] for position in positions]
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            what = "depends on nothing that has a gradient" if isinstance(loss, Tensor) else f"is {loss!r}"
            raise MindSporeTypeError(f"value_and_grad: what the function returned {what}; return the loss as a tensor")
        start = loss.sum() if not sens_param else (loss * args[-1].to(loss.dtype)).sum()
        gradients = torch.autograd.grad(start, [*inputs, *listed], allow_unused=True, materialize_grads=True)
        of_inputs: Any = gradients[: len(inputs)] if isinstance(grad_position, Sequence) else gradients[0]
        of_weights: Any = gradients[-1] if isinstance(weights, nn.Parameter) else gradients[len(inputs) :]
        detached = hs.trees.map_tensors(value, Tensor.detach)
        if weights is None:
            return detached, of_inputs
        return detached, of_weights if grad_position is None else (of_inputs, of_weights)

    return call


def grad(
    fn: Callable[..., Any], grad_position: Position = 0, weights: Weights = None, has_aux: bool = False,
    return_ids: bool = False, sens_param: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that computes the gradients alone, and with `has_aux` also the rest of what `fn` returned."""
    both = value_and_grad(fn, grad_position, weights, has_aux, return_ids, sens_param)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1:]) if has_aux else gradients

    return call


class GradOperation:
    """The older form: ``GradOperation(get_by_list=True, sens_param=True)(network, weights)(*inputs, sens)``.

    Args:
        get_all: gradients of all inputs instead of the first one's.
        get_by_list: gradients of `weights`.
        sens_param: the last argument of the call is what the output's gradient starts from, instead of ones.
    """

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, fn: Callable[..., Any], weights: Weights = None) -> Callable[..., Any]:
        """Return the function that computes the gradients of `fn`."""
        if self.get_by_list and weights is None:
            raise MindSporeValueError("GradOperation(get_by_list=True): pass the weights: grad(network, weights)")

        def call(*args: Any) -> Any:
            inputs = len(args) - 1 if self.sens_param else len(args)
            position: Position = tuple(range(inputs)) if self.get_all else (None if self.get_by_list else 0)
            return grad(fn, position, weights if self.get_by_list else None, sens_param=self.sens_param)(*args)

        return call


class HyperMap:
    """Apply a function to each element of sequences, in step: ``HyperMap(f)(xs)`` or ``HyperMap()(f, xs, ys)``."""

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        if reverse:
            raise MindSporeValueError("HyperMap(reverse=True) does not exist here; reverse the sequences")
        self.ops = ops

    def __call__(self, *args: Any) -> Any:
        """Return a tuple of results; nested sequences are mapped too."""
        if self.ops is None and not (args and callable(args[0])):
            raise MindSporeTypeError("HyperMap() takes the function first: HyperMap()(f, xs, ys), or HyperMap(f)(xs)")
        function, sequences = (args[0], args[1:]) if self.ops is None else (self.ops, args)
        if not sequences or not isinstance(sequences[0], (tuple, list)):
            return function(*sequences)
        return tuple(HyperMap(function)(*items) for items in zip(*sequences, strict=True))
