"""Opening: how a region is entered and left, and how it restores the state of the thread.

Note [interrupts]: Ctrl-C raises KeyboardInterrupt between any two instructions. A region is first recorded, with all
the state that it found, and then entered; leaving it restores what is recorded, and doing that twice changes nothing.
So what opens a region closes it in `finally`, and again in a `finally` within, and one interrupt anywhere is survived.
The depth of nesting, which torch counts and has no getter for, is counted and recorded in one call of C. What a `with`
statement cannot catch is an interrupt at the first instructions of `__exit__`: the region is then closed when the
object that entered it is freed, or by the next region its thread opens after that.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from sys import _getframe
from types import CodeType, TracebackType
from typing import Any
from weakref import ref

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)

from halfstep.cast.regions.recompute import ONCE, again_in_region, mark_checkpoints, push, remove, saved_tensor_hooks
from halfstep.cast.rules.dispatch import RuleMode
from halfstep.cast.rules.recipe import Recipe, run_eagerly
from halfstep.cast.state import STATE
from halfstep.errors import RegionError, ours, warn
from halfstep.torch_private.modes import (
    get_function_stack_at,
    len_torch_function_stack,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)


class _Frame:
    """One open region: the state that it found and must restore, and where a user's function entered it.

    Attributes:
        owner: a weak reference to what opened it; `_closed` once the region is closed.
        code, instruction: where it was entered; `place` computes the line.
        pushed: the mode that it has put on torch's stack.
        states: of each device entered: autocast was on, its format.
        counts: torch's count of open regions after this one was counted in and, later, out.
    """

    __slots__ = ("bound", "cache", "code", "counts", "instruction", "mode", "owner", "pushed", "states", "statistics")
    owner: Callable[[], object]
    code: CodeType
    instruction: int
    pushed: RuleMode | None
    cache: bool
    mode: RuleMode | None
    bound: Any
    statistics: Any
    states: list[tuple[str, bool, torch.dtype]]
    counts: list[int]

    @property
    def place(self) -> str:
        lines = [line for start, end, line in self.code.co_lines() if line and start <= self.instruction < end]
        line = lines[0] if lines else self.code.co_firstlineno
        return f"{self.code.co_filename}:{line} (in {self.code.co_name})"


def _closed() -> None:
    """Replace the reference to the owner of a region that is closed."""


def open_recipe(recipe: Recipe, owner: object) -> _Frame:
    """Enter `recipe` in this thread, called by a method of ours; `owner` must close it."""
    state = STATE.__dict__  # this thread's, found once: each attribute of a thread-local object costs a look-up
    frames = state["frames"]
    while frames and frames[-1].owner() is None:  # freed in another thread
        _restore(frames[-1], state)
    if saved_tensor_hooks(True) is not None:
        mark_checkpoints()
    caller = _getframe(2)
    while ours(caller.f_code.co_filename) and caller.f_back is not None:
        caller = caller.f_back
    frame = _Frame()  # without an __init__, which takes as long as all of these
    frame.code, frame.instruction = caller.f_code, caller.f_lasti
    frame.mode, frame.bound, frame.statistics = state["mode"], state["bound"], state["statistics"]
    frame.cache = is_autocast_cache_enabled()
    frame.pushed = mode = recipe.mode
    states: list[tuple[str, bool, torch.dtype]] = []
    counts: list[int] = []
    frame.states, frame.counts = states, counts
    frame.owner = ref(owner, _owner_freed)
    try:
        frames.append(frame)
        for device, dtype, on in recipe.devices:
            before = get_autocast_dtype(device)
            states.append((device, is_autocast_enabled(device), before))
            set_autocast_enabled(device, on)
            if dtype is not None and before is not dtype:
                set_autocast_dtype(device, dtype)
                clear_autocast_cache()  # its key lacks the format
        counts.extend(starmap(autocast_increment_nesting, ONCE))
        if recipe.cache is not None and frame.cache is not recipe.cache:
            set_autocast_cache_enabled(recipe.cache)
        state["mode"] = mode
        if mode is not None:
            above = state["above"]
            push_on_torch_function_stack(mode) if above is None else push(mode, above)
        return frame
    except BaseException:
        abandon(frame)
        raise


def close_recipe(owner: object, *, failing: bool = False) -> None:
    """Leave the region that `owner` opened and restore the state that it found.

    Where it is not the innermost of this thread (a generator was suspended inside a region) all state is restored
    before the error, which is not raised while another exception passes (`failing`).
    """
    state = STATE.__dict__
    frames = state["frames"]
    if not frames or (frame := frames[-1]).owner() is not owner:
        _close_out_of_order(owner, failing=failing)
        return
    try:
        foreign = _restore(frame, state)
    finally:
        if frame.owner is not _closed:
            abandon(frame)
    if foreign:
        _report_foreign(frame, failing=failing)


def abandon(frame: _Frame | None) -> None:
    """Leave a region that an interrupt kept open; one that is closed, or not the innermost, stays as it is."""
    frames = STATE.frames
    if frames and frames[-1] is frame:
        _restore(frame, STATE.__dict__)


def _restore(frame: _Frame, state: dict[str, Any]) -> bool:
    """Restore the state that the innermost region found and forget the region.

    Return whether a region of torch.autocast was entered or left inside; torch's state is then left to that region.
    """
    frames, pushed, counts, foreign = state["frames"], frame.pushed, frame.counts, False
    if pushed is not None:
        others = 0 if len(frames) == 1 else sum(outer.pushed is pushed for outer in frames[:-1])
        top = len_torch_function_stack() - 1
        if not others and top >= 0 and get_function_stack_at(top) is pushed:
            pop_torch_function_stack()
        else:
            remove(pushed, others)
    state["mode"], state["bound"], state["statistics"] = frame.mode, frame.bound, frame.statistics
    if len(counts) == 1:
        counts.extend(starmap(autocast_decrement_nesting, ONCE))
    if counts:
        before, after = counts
        foreign = after != before - 1
        if after == 0:
            clear_autocast_cache()
    if not foreign:
        for device, on, low in frame.states:
            set_autocast_enabled(device, on)
            if get_autocast_dtype(device) is not low:
                clear_autocast_cache()
                set_autocast_dtype(device, low)
        if frame.cache is not is_autocast_cache_enabled():
            # Copies end with the outermost region that keeps any; each frame has the state of the region around it.
            if not frame.cache and not any(inner.cache for inner in frames[1:-1]):
                clear_autocast_cache()
                state["casts"].clear()
            set_autocast_cache_enabled(frame.cache)
    if len(frames) == 1:
        state["casts"].clear()
    frames.pop()
    frame.owner = _closed  # only now: until then an interrupted call is repeated
    return foreign


class opened:
    """Open `recipe` for a block: a context manager."""

    __slots__ = ("__weakref__", "frame", "recipe")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.frame: _Frame | None = None

    def __enter__(self) -> opened:
        try:
            self.frame = open_recipe(self.recipe, self)
            return self
        except BaseException:
            abandon(self.frame)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            close_recipe(self, failing=exc_type is not None)
        finally:
            if self.frame is not None and self.frame.owner is not _closed:
                abandon(self.frame)


def _owner_freed(owner: ref[object]) -> None:
    """Close the region whose object was freed; an interrupt kept it open."""
    frames = STATE.frames
    index = next((i for i, frame in enumerate(frames) if frame.owner is owner), None)
    if index is None:  # it is another thread's, whose next region closes it
        return
    if index == len(frames) - 1:
        _restore(frames[index], STATE.__dict__)
    else:
        _close_outer(index)


def _close_out_of_order(owner: object, *, failing: bool) -> None:
    frames = STATE.frames
    index = next((i for i in reversed(range(len(frames))) if frames[i].owner() is owner), None)
    if index is None:
        if failing:
            return
        raise RegionError(
            "a halfstep region was left in a thread (or a moment) in which it is not open; "
            "enter and leave a region in the same function of the same thread"
        )
    frame, inner = frames[index], frames[index + 1]
    _close_outer(index)
    if not failing:
        raise RegionError(
            f"the region entered at {frame.place} was left while the one entered at {inner.place} was still open; "
            "a region cannot stay open across yield or await: open it inside, around the work itself"
        )


def _close_outer(index: int) -> None:
    """Remove a region that is not the innermost; the one entered next restores the state that it found."""
    frames = STATE.frames
    frame, inner = frames.pop(index), frames[index]  # after the pop, `inner` is the region entered next
    if frame.pushed is not None:
        remove(frame.pushed)
    autocast_decrement_nesting()
    for later in frames[index:]:
        later.counts[0] -= 1
    inner.states, inner.cache, inner.statistics = frame.states, frame.cache, frame.statistics
    inner.mode, inner.bound = frame.mode, frame.bound


def _report_foreign(frame: _Frame, *, failing: bool) -> None:
    """Report that torch's state was left to the region of torch.autocast that was entered or left in between.

    That region may restore what it found in this one, which cannot be prevented; so while an exception passes (closing
    a suspended generator is one) a warning reports it.
    """
    text = (
        f"between the region entered at {frame.place} and its end a region of torch.autocast was entered and not left, "
        "or left and not entered; a region cannot stay open across yield or await: open it inside, around the work"
    )
    if not failing:
        raise RegionError(text)
    warn(text, RuntimeWarning)


for _function in (opened.__enter__, opened.__exit__, open_recipe, close_recipe, abandon, mark_checkpoints):
    run_eagerly(_function)
run_eagerly(again_in_region, below=False)  # what is computed again may be compiled
