"""The states of the process's random generators, in a form that ``torch.load(weights_only=True)`` reads.

These are the global generators: torch's on the CPU and on each CUDA device that is in use, Python's `random`, and
NumPy's if NumPy is imported. Generators that a program makes itself are its own to save (``extra=``).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import CheckpointError

__all__ = ["check_generators", "generators", "set_generators"]


def generators() -> dict[str, Any]:
    """Return the states of all global generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if torch.cuda.is_initialized():
        state["cuda"] = [generator.get_state() for generator in torch.cuda.default_generators]
    if (numpy := sys.modules.get("numpy")) is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":  # else a user has set another one
            state["numpy"] = {
                "keys": torch.tensor(found["state"]["key"].tolist()),
                "place": int(found["state"]["pos"]),
                "has_gauss": int(found["has_gauss"]),
                "cached": float(found["gauss"]),
            }
    return state


def check_generators(state: object) -> None:
    """Check what `generators` returned, by setting generators that nothing uses.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        assert isinstance(state, Mapping)
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(_python(state["python"]))
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.RandomState().set_state(_numpy(state["numpy"]))
        assert all(isinstance(one, Tensor) for one in state.get("cuda", ()))
    except (AssertionError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"random: no states of random generators ({type(error).__name__}: {error})") from error


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the global generators to what `generators` returned; those of CUDA devices that are not here stay."""
    torch.default_generator.set_state(state["torch"])
    random.setstate(_python(state["python"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_numpy(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.init()
        for generator, saved in zip(torch.cuda.default_generators, state["cuda"], strict=False):
            generator.set_state(saved)


def _python(state: Mapping[str, Any]) -> tuple[int, tuple[int, ...], float | None]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _numpy(state: Mapping[str, Any]) -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]
    keys = numpy.array(state["keys"].tolist(), dtype=numpy.uint32)
    return "MT19937", keys, state["place"], state["has_gauss"], state["cached"]
