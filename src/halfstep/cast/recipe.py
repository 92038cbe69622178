"""Recipes: a policy compiled for the devices a region enters, and how such a region is opened and closed.

A region is a real torch.autocast region, so third-party code, custom_fwd and checkpointing see the state they expect,
and, only where the policy differs from torch's own lists, a `RuleMode` on top. Entering sets torch's per-device state
directly instead of building torch.autocast objects: the same calls, fewer.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from sys import _getframe
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch._C._dynamo import eval_frame
from torch.overrides import _pop_mode, _push_mode

from halfstep.cast.dispatch import Lowering, RuleMode
from halfstep.cast.rules import compile_rules, emulates
from halfstep.cast.state import STATE
from halfstep.errors import RegionError
from halfstep.formats import Format, format_of
from halfstep.policy.custom import overrides
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import require_engine, resolve_dtype
from halfstep.policy.units import units

__all__ = [
    "DTYPES",
    "Recipe",
    "call_traced",
    "close_recipe",
    "open_recipe",
    "opened",
    "pop_below",
    "push_below",
    "recipe_for",
    "run_eagerly",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """A policy compiled for the devices a region enters. Compared by identity: equal policies share one recipe.

    Attributes:
        policy: the policy it was compiled from.
        devices: (device type, low dtype, autocast enabled) for each device entered.
        mode: the operator rules on top of torch.autocast, or None where torch's own lists are the policy.
        cache: whether weight casts may be cached, by torch.autocast and here; None: as it is outside.
    """

    policy: Policy
    devices: tuple[tuple[str, torch.dtype, bool], ...]
    mode: RuleMode | None
    cache: bool | None = None


@functools.lru_cache(maxsize=256)  # somebody who tries policies may try thousands
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
    require_engine(policy)
    devices, lowered, emulating = [], [], set()
    simulated: Format | None = None
    for device in device_types:
        name, note = resolve_dtype(policy, device)
        on = enabled and name != "fp32"
        if name not in DTYPES:
            simulated = format_of(name)
        if enabled and device == device_types[0] and _lacks_units(policy, device, name):
            warnings.warn(f"policy {policy.name!r} on {device}: {note}", stacklevel=5)
        # a region that is off keeps torch's low dtype: others read that state
        devices.append((device, DTYPES.get(name, torch.float32) if on else torch.get_autocast_dtype(device), on))
        if on:
            lowered.append(device)
            if emulates(policy.emulate, device, name):
                emulating.add(device)
    how = Lowering(emulating=frozenset(emulating), simulated=simulated)
    rules = compile_rules(policy, tuple(lowered), how) if lowered else {}
    custom = overrides(policy.ops) if lowered else ()
    mode = RuleMode(tuple(lowered), rules, how, custom) if rules or custom else None
    return Recipe(policy=policy, devices=tuple(devices), mode=mode, cache=cache)


def _lacks_units(policy: Policy, device: str, name: str) -> bool:
    """Return whether `device` runs `policy` another way, or slower, than its user may expect."""
    there = units(device)
    if name == "fp16":
        return not there.fp16 and policy.emulate == "never"
    return not there.bf16 and (name == "bf16" or policy.dtype == "auto")


class _Frame:
    """One open region: what it found and must put back, and where it was entered."""

    __slots__ = ("bound", "cache", "instruction", "mode", "nesting", "owner", "code", "states")

    def __init__(self, owner: object, caller: FrameType, cache: bool, mode: RuleMode | None, bound: Any) -> None:
        self.owner = owner
        self.code = caller.f_code
        self.instruction = caller.f_lasti  # the line is worked out if somebody asks
        self.cache = cache
        self.mode = mode
        self.bound = bound
        self.states: list[tuple[str, bool, torch.dtype]] = []
        self.nesting = 0  # how many regions, torch's too, are open with this one

    @property
    def place(self) -> str:
        lines = [line for start, end, line in self.code.co_lines() if line and start <= self.instruction < end]
        line = lines[0] if lines else self.code.co_firstlineno
        return f"{self.code.co_filename}:{line} (in {self.code.co_name})"


def open_recipe(recipe: Recipe, owner: object, depth: int = 2) -> None:
    """Enter `recipe` in this thread; `owner` must close it. `depth` is how many frames up the user's line is."""
    state = STATE
    frames = state.frames
    frame = _Frame(owner, _getframe(depth), is_autocast_cache_enabled(), state.mode, state.bound)
    for device, dtype, on in recipe.devices:
        before = get_autocast_dtype(device)
        frame.states.append((device, is_autocast_enabled(device), before))
        set_autocast_enabled(device, on)
        if before is not dtype:
            set_autocast_dtype(device, dtype)
            if frames:
                torch.clear_autocast_cache()  # torch's cache does not look at the format
    frame.nesting = autocast_increment_nesting()
    if recipe.cache is not None and frame.cache is not recipe.cache:
        set_autocast_cache_enabled(recipe.cache)
    mode = recipe.mode
    state.mode = mode
    if mode is not None:
        if state.above is None:
            _push_mode(mode)
        else:
            push_below(state.above, mode)
    frames.append(frame)


def close_recipe(recipe: Recipe, owner: object, *, failing: bool = False) -> None:
    """Leave the region that `owner` opened and put back what it found.

    Raises:
        RegionError: the region is not the innermost of this thread (a generator or coroutine was suspended inside a
            region); everything is put in order first. Not raised while another exception passes (`failing`).
    """
    state = STATE
    frames = state.frames
    if not frames or frames[-1].owner is not owner:
        _close_out_of_order(recipe, owner, failing=failing)
        return
    frame = frames.pop()
    if recipe.mode is not None:
        if state.above is None:
            _pop_mode()
        else:
            pop_below(state.above)
    state.mode, state.bound = frame.mode, frame.bound
    nesting = autocast_decrement_nesting()
    if nesting == 0:
        torch.clear_autocast_cache()
    if nesting != frame.nesting - 1:
        if not frames:
            state.casts.clear()
        _refuse_foreign(frame, failing=failing)
        return
    for device, on, before in frame.states:
        set_autocast_enabled(device, on)
        if get_autocast_dtype(device) is not before:
            set_autocast_dtype(device, before)
            torch.clear_autocast_cache()
    if frame.cache is not is_autocast_cache_enabled():
        set_autocast_cache_enabled(frame.cache)
        if not frame.cache:  # a copy lives no longer than the outermost region that keeps copies
            torch.clear_autocast_cache()
            state.casts.clear()
    if not frames:
        state.casts.clear()


class opened:
    """Open `recipe` for a block of our own code: a context manager.

    Args:
        recipe: what to enter.
        depth: how many frames up from that block the user's line is.
    """

    __slots__ = ("depth", "recipe")

    def __init__(self, recipe: Recipe, *, depth: int = 1) -> None:
        self.recipe, self.depth = recipe, depth

    def __enter__(self) -> None:
        open_recipe(self.recipe, self, depth=self.depth + 2)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_recipe(self.recipe, self, failing=exc_type is not None)


def push_below(above: Any, mode: RuleMode) -> None:
    """Push `mode` under `above`, which is the innermost mode unless this runs inside its handler."""
    if torch.overrides._get_current_function_mode() is not above:
        _push_mode(mode)
        return
    _pop_mode()
    _push_mode(mode)
    _push_mode(above)


def pop_below(above: Any) -> None:
    """Undo `push_below`."""
    inside = torch.overrides._get_current_function_mode() is not above
    _pop_mode()
    if not inside:
        _pop_mode()
        _push_mode(above)


def _close_out_of_order(recipe: Recipe, owner: object, *, failing: bool) -> None:
    frames = STATE.frames
    index = next((i for i in reversed(range(len(frames))) if frames[i].owner is owner), None)
    if index is None:
        if failing:
            return
        raise RegionError(
            "a halfstep region was left in a thread (or a moment) in which it is not open; "
            "enter and leave a region in the same function of the same thread"
        )
    frame, inner = frames.pop(index), frames[index]  # after the pop, `inner` is the region entered next
    if recipe.mode is not None:
        _take_from_stack(recipe.mode)
    autocast_decrement_nesting()
    for later in frames[index:]:
        later.nesting -= 1
    inner.states, inner.cache, inner.mode, inner.bound = frame.states, frame.cache, frame.mode, frame.bound
    if not failing:
        raise RegionError(
            f"the region entered at {frame.place} was left while the one entered at {inner.place} was still open; "
            "a region cannot stay open across yield or await: open it inside, around the work itself"
        )


def _refuse_foreign(frame: _Frame, *, failing: bool) -> None:
    """Leave torch's state to the region of torch.autocast that was entered or left in between, and say so.

    That region may put back what it found in this one, where nobody can help; so it is said, by a warning, also while
    an exception passes (closing a suspended generator is one).
    """
    text = (
        f"between the region entered at {frame.place} and its end a region of torch.autocast was entered and not left, "
        "or left and not entered; a region cannot stay open across yield or await: open it inside, around the work"
    )
    if not failing:
        raise RegionError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _take_from_stack(mode: RuleMode) -> None:
    """Take `mode`, which lies below others, from torch's stack of function modes."""
    stack: list[Any] = list(torch.overrides._get_current_function_mode_stack())
    for other in reversed(stack):
        other.__exit__(None, None, None)
    last = max(i for i, other in enumerate(stack) if other is mode)
    for i, other in enumerate(stack):
        if i != last:
            other.__enter__()


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


for _function in (opened.__enter__, opened.__exit__, open_recipe, close_recipe):
    run_eagerly(_function)
