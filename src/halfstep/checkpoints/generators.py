"""The states of the process's random generators, in a form that ``torch.load(weights_only=True)`` reads.

These are the global generators: torch's on the CPU and on each device of the accelerator if that is in use, Python's
`random`, and NumPy's if NumPy is imported. Generators that a program makes itself are its own to save (``extra=``).
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.accelerators import default_generators, initialise, type_here
from halfstep.errors import CheckpointError

HOST = frozenset({"torch", "python", "numpy"})
"""The generators that are no device's; every other key of a state is a device type, such as "cuda"."""


def plain_states(own: Tensor, python: Any, numpy: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Return states of torch, ``random.getstate()`` and ``numpy.random.get_state()[1:]``, in plain containers."""
    version, words, gauss = python
    state = {"torch": own, "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss}}
    if numpy is not None:
        keys, place, has_gauss, cached = numpy
        numbers = torch.tensor(list(map(int, keys)), device="cpu")
        state["numpy"] = {"keys": numbers, "place": place, "has_gauss": has_gauss, "cached": cached}
    return state


def saved_states() -> dict[str, Any]:
    """Return the states of the global generators."""
    array = None
    if (numpy := sys.modules.get("numpy")) is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":  # else a user has set another one
            words = found["state"]["key"].tolist()
            array = words, int(found["state"]["pos"]), int(found["has_gauss"]), float(found["gauss"])
    state = plain_states(torch.default_generator.get_state(), random.getstate(), array)
    if devices := default_generators():
        state[devices[0].device.type] = [generator.get_state() for generator in devices]
    return state


def check_saved_states(state: object) -> None:
    """Refuse what `saved_states` has not returned, by setting generators that nothing uses."""
    try:
        assert isinstance(state, Mapping)
        numpy = sys.modules.get("numpy.random")
        _put(state, torch.Generator("cpu"), random.Random(), None if numpy is None else numpy.RandomState())
        devices = [states for kind, states in state.items() if kind not in HOST]
        assert all(isinstance(one, Tensor) for states in devices for one in states)
    except Exception as error:  # of each library its own
        raise CheckpointError(f"random: no states of random generators ({type(error).__name__}: {error})") from error


def put_saved_states(state: Mapping[str, Any]) -> None:
    """Set the global generators to what `saved_states` returned; those of devices that are not here stay."""
    _put(state, torch.default_generator, random, sys.modules.get("numpy.random"))
    if (kind := type_here()) in state:
        initialise(kind)
        for generator, saved in zip(default_generators(), state[kind], strict=False):
            generator.set_state(saved)


def _put(state: Mapping[str, Any], own: torch.Generator, python: Any, numpy: Any) -> None:
    own.set_state(state["torch"])
    saved = state["python"]
    python.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if "numpy" in state and numpy is not None:
        saved = state["numpy"]
        keys = sys.modules["numpy"].array(saved["keys"].tolist(), dtype="uint32")
        numpy.set_state(("MT19937", keys, saved["place"], saved["has_gauss"], saved["cached"]))
