"""``apex.amp``: initialize, scale_loss and what belongs to them.

As in Apex, the name ``amp._amp_state`` is the object that holds the state, not the module of that name.
"""

from halfstep.compat.apex.amp import frontend, handle, lists
from halfstep.compat.apex.amp._process_optimizer import _amp_state, master_params
from halfstep.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from halfstep.compat.apex.amp.handle import (
    disable_casts,
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    step_was_skipped,
)

_initialize, opt = frontend, handle  # Apex has files of their own

__all__ = [
    "_amp_state", "disable_casts", "float_function", "half_function", "init", "initialize", "lists", "load_state_dict",
    "master_params", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "state_dict", "step_was_skipped",
]  # fmt: skip
