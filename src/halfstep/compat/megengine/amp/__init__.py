"""megengine.amp: `autocast`, the switch, `GradScaler`, and conversion to NHWC.

``amp.enabled``, ``amp.low_prec_dtype``, ``amp.high_prec_dtype`` and ``amp.policy`` are properties of this module:
setting one takes effect at once, in this thread, up to the end of the innermost `autocast` around it.
"""

import sys
from types import ModuleType

from halfstep import Policy
from halfstep.compat.megengine.amp import state
from halfstep.compat.megengine.amp.autocast import autocast
from halfstep.compat.megengine.amp.convert_format import convert_module_format, convert_tensor_format
from halfstep.compat.megengine.amp.grad_scaler import GradScaler
from halfstep.compat.megengine.amp.lists import AS_SHIPPED, MEGENGINE

__all__ = [
    "AS_SHIPPED",
    "MEGENGINE",
    "GradScaler",
    "autocast",
    "convert_module_format",
    "convert_tensor_format",
    "enabled",
    "high_prec_dtype",
    "low_prec_dtype",
    "policy",
]

enabled: bool
low_prec_dtype: str
high_prec_dtype: str
policy: Policy


class _Switch(ModuleType):
    """This module, with the switch as properties."""

    @property
    def enabled(self) -> bool:
        """Whether operators of this thread are cast."""
        return state.now().enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        state.change(enabled=enabled)

    @property
    def low_prec_dtype(self) -> str:
        """The format of products: "float16" or "bfloat16" ("float32": nothing is lowered)."""
        return state.now().low

    @low_prec_dtype.setter
    def low_prec_dtype(self, dtype: str) -> None:
        state.change(low=dtype)

    @property
    def high_prec_dtype(self) -> str:
        """The format of sensitive operators: "float32", or the low one."""
        return state.now().high

    @high_prec_dtype.setter
    def high_prec_dtype(self, dtype: str) -> None:
        state.change(high=dtype)

    @property
    def policy(self) -> Policy:
        """Which operator goes where: `MEGENGINE`, `AS_SHIPPED` or any policy."""
        return state.now().policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        state.change(policy=policy)


sys.modules[__name__].__class__ = _Switch
