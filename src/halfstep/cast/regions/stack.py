"""torch's stack of function modes: how the mode of a region is laid on it and taken off again.

An instrument that sees operators as they are called (`above`) stays above the modes of all regions; while it handles an
operator it is off the stack. Only regions opened under such an instrument need the general way.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, repeat, starmap
from typing import TYPE_CHECKING, Any

from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import _get_current_function_mode_stack

if TYPE_CHECKING:
    from halfstep.cast.rules.dispatch import RuleMode

__all__ = ["depth_below", "lay", "restack", "take_off", "take_out"]


def _top() -> Any:
    length = _len_torch_function_stack()
    return _get_function_stack_at(length - 1) if length else None


def depth_below(above: Any) -> int:
    """Return how many modes are on the stack, `above` not counted."""
    length = _len_torch_function_stack()
    return length if above is None or _top() is not above else length - 1


def lay(mode: RuleMode, above: Any) -> None:
    """Lay `mode` on top of the stack, but under `above`."""
    if above is None or _top() is not above:
        _push_on_torch_function_stack(mode)
    else:
        modes = list(_get_current_function_mode_stack())
        restack([*modes[:-1], mode, modes[-1]])


def take_off(mode: RuleMode, depth: int, above: Any, *, others: int = 0) -> None:
    """Take off `mode`, which was laid on `depth` others, and leave those above it; a second call changes nothing.

    Args:
        mode: what `lay` laid.
        depth: `depth_below` before.
        above: the instrument above all regions, or None.
        others: how many regions further out have laid the same mode.
    """
    length = _len_torch_function_stack()
    if above is None and length == depth + 1 and _get_function_stack_at(depth) is mode:
        _pop_torch_function_stack()
    elif length and list(_get_current_function_mode_stack()).count(mode) > others:
        take_out(mode)


def take_out(mode: RuleMode) -> None:
    """Take the topmost `mode` off, wherever it is."""
    modes = list(_get_current_function_mode_stack())
    found = [i for i, other in enumerate(modes) if other is mode]
    if found:
        restack([other for i, other in enumerate(modes) if i != found[-1]])


def restack(modes: list[Any]) -> None:
    """Make `modes` the stack, outermost first, in one call of C, which no signal divides."""
    changes = chain(
        starmap(_pop_torch_function_stack, repeat((), _len_torch_function_stack())),
        map(_push_on_torch_function_stack, modes),
    )
    deque(changes, maxlen=0)
