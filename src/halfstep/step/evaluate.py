"""Evaluate: a loss function in the region of its training step, without gradients and in evaluation mode.

In: model, loss function, region and batch of a step. Out: what the loss function returns. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.binding.wrappers import unwrap
from halfstep.cast.regions.dtype_errors import EXPLAINED, explained
from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.recipe import Recipe
from halfstep.cast.state import STATE

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module, loss_fn: Callable[..., Any], recipe: Recipe, batch: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return ``loss_fn(model, *batch, **named)`` in the region of `recipe`, with `model` in evaluation mode.

    A wrapper (DistributedDataParallel, torch.compile) is left out: its forward may wait for other ranks. Afterwards
    each module is in the mode it was in, also if `loss_fn` raises.
    """
    model = unwrap(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(training for _, training in modes):
            model.eval()
        with torch.no_grad(), opened(recipe):
            STATE.bound = recipe  # the model is inside, as in a step: its outputs are not cast
            return loss_fn(model, *batch, **named)
    except EXPLAINED as error:
        if (better := explained(error, (batch, named))) is None:
            raise
        raise better from error
    finally:
        if any(training for _, training in modes):
            model.train(modes[0][1])  # by its own method, which may do more than set the mode
            for module, training in modes:
                module.training = training
