"""Recipes: a policy compiled for the devices a region enters.

A region is a real torch.autocast region, so third-party code, custom_fwd and checkpointing see the state they expect,
and, only where the policy differs from torch's own lists, a `RuleMode` on top. `opening` opens and closes it; code that
torch.compile traces enters it here, in words that Dynamo knows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from halfstep.cast.rules.dispatch import Lowering, RuleMode
from halfstep.cast.rules.table import compile_rules
from halfstep.cast.state import STATE
from halfstep.errors import RegionError
from halfstep.formats import DTYPES, LOW_DTYPES, Format, format_of
from halfstep.policy.operators import custom_overrides
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolved, surprise

__all__ = [
    "Recipe",
    "call_traced",
    "recipe_for",
    "run_eagerly",
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """A policy compiled for the devices a region enters. Compared by identity: equal policies share one recipe.

    Attributes:
        policy: the policy it was compiled from.
        devices: (device type, dtype, autocast enabled) for each device entered; a dtype of None: as it is outside.
        mode: the operator rules on top of torch.autocast, or None where torch's own lists are the policy.
        cache: whether weight casts may be cached, by torch.autocast and here; None: as it is outside.
    """

    policy: Policy
    devices: tuple[tuple[str, torch.dtype | None, bool], ...]
    mode: RuleMode | None
    cache: bool | None = None


@functools.lru_cache(maxsize=256)  # a search over policies may try thousands
def recipe_for(
    policy: Policy,
    device_types: tuple[str, ...],
    *,
    enabled: bool = True,
    cache: bool | None = None,
) -> Recipe:
    """Compile `policy` for `device_types`.

    Args:
        policy: what is wanted.
        device_types: the devices entered.
        enabled: False makes a region in which nothing is cast.
        cache: whether weight casts may be cached; None: as torch does outside.

    Raises:
        UnbuiltError: the policy needs an engine that is not built yet; the message says which.
        PolicyError: the policy cannot run on one of the devices.
    """
    devices, lowered, emulating = [], [], set()
    simulated: Format | None = None
    for device in device_types:
        concrete = resolved(policy, device)
        on = enabled and concrete.dtype != "fp32"
        dtype = DTYPES.get(concrete.dtype, torch.float32)
        if concrete.dtype not in DTYPES:
            simulated = format_of(concrete.dtype)
        if enabled and device == device_types[0] and (note := surprise(policy, device)):
            warnings.warn(f"policy {policy.name!r} on {device}: {note}", stacklevel=5)
        # torch.autocast sets the format it was given, also where it is off; without a low one that state stays
        devices.append((device, dtype if on or dtype in LOW_DTYPES else None, on))
        if on:
            lowered.append(device)
            if concrete.dtype == "fp16" and concrete.emulate == "always":
                emulating.add(device)
    how = Lowering(emulating=frozenset(emulating), simulated=simulated)
    rules = compile_rules(policy, tuple(lowered), how) if lowered else {}
    custom = custom_overrides(policy.ops) if lowered else ()
    mode = RuleMode(tuple(lowered), rules, how, custom) if rules or custom else None
    return Recipe(policy=policy, devices=tuple(devices), mode=mode, cache=cache)


def call_traced(recipe: Recipe, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` in the region of `recipe` in the words `torch.compile` traces: torch.autocast objects in `with`.

    Raises:
        RegionError: the policy simulates a format.
    """
    if recipe.mode is not None and recipe.mode.how.simulated is not None:
        raise RegionError(f"format {recipe.policy.dtype!r} is simulated, which torch.compile cannot trace; run eagerly")
    state = STATE
    outer = state.mode
    state.mode = recipe.mode
    try:
        return _call_in(recipe, len(recipe.devices), func, args, kwargs)
    finally:
        state.mode = outer


def _call_in(recipe: Recipe, depth: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if depth:
        device, dtype, on = recipe.devices[depth - 1]
        with torch.autocast(device, dtype=dtype, enabled=on):
            return _call_in(recipe, depth - 1, func, args, kwargs)
    if recipe.mode is None:
        return func(*args, **kwargs)
    with recipe.mode:
        return func(*args, **kwargs)


def run_eagerly(function: Callable[..., Any], *, below: bool = True) -> None:
    """Keep Dynamo from tracing `function` and, if `below`, what it calls; Dynamo (a second) is not imported for it.

    Where it breaks a graph at ``with region:`` it would trace `autocast.__enter__` by itself, and the calls that set
    autocast's state would run once, at trace time, and never again.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # an older torch: `with` in a compiled function may misbehave
        return
    action = eval_frame._FrameAction
    skip = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
