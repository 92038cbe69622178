"""The tail's operators on CUDA, carried out by Triton kernels. Triton is imported when the first of them runs.

Nothing here waits for the device. Launches of a step with Adam whose parameters agree in format: two for the norms, one
for the verdict, one for step counters and bias corrections, one for the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from halfstep.kernels.ops import LIBRARY

__all__ = ["OPERATORS", "installed", "why_not"]

OPERATORS = {
    "norms": "norms",
    "judge": "norms",
    "adam_": "updates",
    "sgd_": "updates",
    "lion_": "updates",
    "exponents_": "exponents",
}
"""Operator -> the module here that has a function of that name."""

OLDEST = (7, 5)
"""Compute capability of the oldest device that Triton supports."""


@cache
def installed() -> bool:
    """Return whether Triton could be imported."""
    return find_spec("triton") is not None


@cache
def why_not() -> str:
    """Return why the kernels cannot be used, in one sentence; "" if they can, and then they are registered."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD's devices"
    if not installed():
        return "the package triton is not installed"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        if found < OLDEST:
            return (
                f"cuda:{index} has compute capability {found[0]}.{found[1]}, and Triton needs {OLDEST[0]}.{OLDEST[1]}"
            )
    for name, module in OPERATORS.items():
        LIBRARY.impl(name, _on_demand(name, module), "CUDA")
    return ""


def _on_demand(name: str, module: str) -> Callable[..., Any]:
    """Return function `name` of a module that is imported when the function is called."""

    def operator(*args: Any) -> Any:
        return _function(name, module)(*args)

    operator.__name__ = name
    return operator


@cache
def _function(name: str, module: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return found
