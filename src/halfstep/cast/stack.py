"""torch's stack of function modes: how the mode of a region is laid on it and taken off again.

An instrument that sees operators as they are called (`above`) stays above the modes of all regions; while it handles an
operator it is off the stack. Only regions opened under such an instrument need the general way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import _get_current_function_mode_stack

if TYPE_CHECKING:
    from halfstep.cast.dispatch import RuleMode

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


def take_off(mode: RuleMode, depth: int, above: Any) -> None:
    """Take off `mode`, which was laid on `depth` others, and leave those above it; a second call changes nothing."""
    length = _len_torch_function_stack() if above is None else depth_below(above)
    if length <= depth:
        return
    if _top() is mode:
        _pop_torch_function_stack()
    else:
        take_out(mode)


def take_out(mode: RuleMode) -> None:
    """Take the topmost `mode` off, wherever it is."""
    modes = list(_get_current_function_mode_stack())
    found = [i for i, other in enumerate(modes) if other is mode]
    if found:
        restack([other for i, other in enumerate(modes) if i != found[-1]])


def restack(modes: list[Any]) -> None:
    """Make `modes` the stack, outermost first."""
    try:
        while _len_torch_function_stack():
            _pop_torch_function_stack()
    finally:
        for mode in modes[_len_torch_function_stack() :]:
            _push_on_torch_function_stack(mode)
