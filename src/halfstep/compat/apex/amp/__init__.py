"""``apex.amp``: initialize, scale_loss and what belongs to them.

As in Apex, the name ``amp._amp_state`` is the object that holds the state, not the module of that name.
"""

from halfstep.compat.apex.amp import frontend, handle, lists
from halfstep.compat.apex.amp._process_optimizer import _amp_state, master_params
from halfstep.compat.apex.amp.frontend import initialize, load_state_dict, state_dict
from halfstep.compat.apex.amp.handle import *  # noqa: F403  # the file lists its names

_initialize, opt = frontend, handle  # Apex has files of their own

__all__ = ["_amp_state", "initialize", "lists", "load_state_dict", "master_params", "state_dict"]
__all__ += handle.__all__
