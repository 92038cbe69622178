"""Generators of random numbers: what a run may move, and what puts it back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from halfstep.step.record import put_random, random_states

__all__ = ["generators", "held_generators", "unmoved"]


def generators(*models: nn.Module) -> Callable[[], None]:
    """Note the states of the generators of torch, Python and NumPy, and of those that modules of `models` hold.

    Returns:
        What puts them back.
    """
    states, python = random_states(), random.getstate()
    numpy = sys.modules.get("numpy.random")  # nobody draws from it who has not imported it
    array = None if numpy is None else numpy.get_state()
    held = [(g, g.get_state()) for model in models for module in model.modules() for g in held_generators(module)]

    def put_back() -> None:
        put_random(states)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(array)
        for generator, state in held:
            generator.set_state(state)

    return put_back


@contextmanager
def unmoved(*models: nn.Module) -> Iterator[None]:
    """Leave `generators` as they are, whatever a block draws from them."""
    put_back = generators(*models)
    try:
        yield
    finally:
        put_back()


def held_generators(module: nn.Module) -> list[torch.Generator]:
    """Return the generators that are attributes of `module`."""
    return [value for value in vars(module).values() if isinstance(value, torch.Generator)]
