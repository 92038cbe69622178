"""init, and rules for functions of one's own: decorators and registries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import halfstep as hs
from halfstep.compat.apex.amp._amp_state import _amp_state
from halfstep.compat.apex.amp.handle import AmpHandle, NoOpHandle, close_own_casts, refuse_inside
from halfstep.compat.apex.amp.lists import functional_overrides
from halfstep.compat.shared import LOW_NAMES
from halfstep.errors import PolicyError

__all__ = [
    "float_function", "half_function", "init", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_registered: list[tuple[Any, str, str]] = []
"""(module, name, rule) since the last `init`, which takes them."""


def half_function(fn: F) -> F:
    """Cast the tensors that `fn` is given to the low format while O1's casts are on; a decorator."""
    return _ruled(fn, "low")


def float_function(fn: F) -> F:
    """Cast the tensors that `fn` is given to fp32 while O1's casts are on; a decorator."""
    return _ruled(fn, "fp32")


def promote_function(fn: F) -> F:
    """Cast the tensors that `fn` is given to the widest of their formats while O1's casts are on; a decorator."""
    return _ruled(fn, "widest")


def _ruled(fn: F, rule: str) -> F:
    if not callable(fn):
        raise TypeError(f"amp's decorators take a function and got {fn!r}")
    made: F = hs.operator(rule)(fn)
    return made


def register_half_function(module: Any, name: str) -> None:
    """Have ``module.name`` take low tensors from the next `initialize` or `init` on."""
    _register(module, name, "low")


def register_float_function(module: Any, name: str) -> None:
    """Have ``module.name`` take fp32 tensors from the next `initialize` or `init` on."""
    _register(module, name, "fp32")


def register_promote_function(module: Any, name: str) -> None:
    """Have ``module.name`` take tensors of the widest of their formats from the next `initialize` or `init` on."""
    _register(module, name, "widest")


def _register(module: Any, name: str, rule: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    _registered.append((module, name, rule))


def take_registered() -> tuple[list[tuple[str, str]], list[tuple[Any, str, Callable[..., Any]]]]:
    """Return and forget what was registered: rules for operators of torch, and replacements for other functions."""
    rules: list[tuple[str, str]] = []
    functions: list[tuple[Any, str, Callable[..., Any]]] = []
    for module, name, rule in _registered:
        original = getattr(module, name)
        operator = hs.policy.operator_name(original) if module in (torch, torch.Tensor, torch.nn.functional) else None
        if operator is not None:
            rules.append((operator, rule))
            continue
        title = f"{getattr(module, '__name__', type(module).__name__)}::{name}"
        try:
            functions.append((module, name, hs.operator(rule, name=title)(original)))
        except PolicyError:  # the name is taken by a function from elsewhere
            functions.append((module, name, hs.operator(rule, name=f"{title}@{id(original):x}")(original)))
    _registered.clear()
    return rules, functions


def init(
    enabled: bool = True, loss_scale: str | float = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:  # fmt: skip
    """Switch O1's casts on in this thread, without models; casts that were on before are switched off first.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: of optimizers wrapped by the handle's ``wrap_optimizer``.
        enable_caching: kept for Apex's signature; see `AmpHandle`.
        verbose: print every cast.
        allow_banned: compute F.binary_cross_entropy in fp32 instead of refusing low inputs.
    """
    if enabled:
        return switch_on(
            torch.float16, loss_scale=loss_scale, enable_caching=enable_caching, verbose=verbose,
            allow_banned=allow_banned,
        )  # fmt: skip
    close_own_casts()
    _registered.clear()
    _amp_state.handle = handle = NoOpHandle()
    return handle


def switch_on(
    low: torch.dtype, *, loss_scale: str | float = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:  # fmt: skip
    """Do what `init` does in the format `low`: the preset ``O1``, with outputs as they come and no loss scale."""
    close_own_casts()
    refuse_inside()
    rules, functions = take_registered()
    if allow_banned:
        rules = [*((op, "fp32") for op, _ in functional_overrides.BANNED_FUNCS), *rules]
    name = LOW_NAMES[low]
    policy = hs.Policy.of("O1", name=f"apex O1 {name}", dtype=name, outputs="keep", scale="none", ops=tuple(rules))
    _amp_state.handle = handle = AmpHandle(policy, functions, loss_scale, enable_caching, verbose)
    return handle
