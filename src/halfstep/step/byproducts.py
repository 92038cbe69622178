"""By-products: what a loss function returns beside its loss, ``(loss, aux)``, as a step hands it to the loop.

In: any tree of tensors (`halfstep.trees`) with the graph of the forward pass. Out: the same tree without it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from halfstep.errors import StepError
from halfstep.trees import map_tensors

__all__ = ["detached"]


def detached(aux: Any, loss: Tensor, *, check: bool) -> Any:
    """Return `aux` with its tensors detached, which share their memory with those of the forward pass.

    The backward pass of the step frees the graph, so what is carried to the next batch (the hidden state of an LSTM)
    must not refer to it, and what is kept for a log must not keep it alive.

    Args:
        aux: a tensor or a tree; containers keep their type, other objects are returned as they are.
        loss: the loss, before its backward pass.
        check: whether to look for a second loss.

    Raises:
        StepError: `aux` is a second loss, a scalar of whose graph nothing leads to `loss`: it would not be trained on.
    """
    if check and isinstance(aux, Tensor) and aux.requires_grad and not aux.dim() and not _takes_part(aux, loss):
        raise StepError(
            "loss_fn returned two scalars with a gradient, (loss, aux), and trains on the first only; for two losses "
            "return their sum and, beside it, what to log: (a + b, (a, b)); for a number to log alone return "
            "(loss, aux.detach())"
        )
    return map_tensors(aux, _without_graph)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _takes_part(value: Tensor, loss: Tensor) -> bool:
    """Return whether the gradient of `loss` passes through `value`."""
    wanted = get_gradient_edge(value).node
    waiting: list[Node] = [get_gradient_edge(loss).node]
    seen = set(waiting)  # keeps the nodes alive: torch makes their Python objects on demand
    for node in waiting:
        if node is wanted:
            return True
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        waiting += new
        seen.update(new)
    return False
