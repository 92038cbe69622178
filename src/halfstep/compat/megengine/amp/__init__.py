"""megengine.amp: `autocast`, the switch, `GradScaler`, and conversion to NHWC.

``amp.enabled``, ``amp.low_prec_dtype``, ``amp.high_prec_dtype`` and ``amp.policy`` are properties of this module:
setting one takes effect at once, in this thread, up to the end of the innermost `autocast` around it.
"""

import sys
from types import ModuleType
from typing import Any

from halfstep import Policy
from halfstep.compat.megengine.amp import autocast as settings
from halfstep.compat.megengine.amp.autocast import AS_SHIPPED, MEGENGINE, autocast
from halfstep.compat.megengine.amp.convert_format import convert_module_format, convert_tensor_format
from halfstep.compat.megengine.amp.grad_scaler import GradScaler

__all__ = [
    "AS_SHIPPED", "MEGENGINE", "GradScaler", "autocast", "convert_module_format", "convert_tensor_format", "enabled",
    "high_prec_dtype", "low_prec_dtype", "policy",
]  # fmt: skip

enabled: bool
low_prec_dtype: str
high_prec_dtype: str
policy: Policy


def _setting(name: str, doc: str) -> Any:
    return property(
        lambda module: getattr(settings.now(), name), lambda module, value: settings.change(name, value), doc=doc
    )


class _Switch(ModuleType):
    """This module, with the switch as properties."""

    enabled = _setting("enabled", "Whether operators of this thread are cast.")
    low_prec_dtype = _setting("low", 'The format of products: "float16" or "bfloat16" ("float32": nothing is lowered).')
    high_prec_dtype = _setting("high", 'The format of sensitive operators: "float32", or the low one.')
    policy = _setting("policy", "The rule of each operator: `MEGENGINE`, `AS_SHIPPED` or any policy.")


sys.modules[__name__].__class__ = _Switch
