"""Operators: overloads and their schemas, torch's dispatcher, and operators without a public name."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch._C import _dispatch_has_computed_kernel_for_dispatch_key as has_computed_kernel_for_dispatch_key
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for_dispatch_key
from torch._C import _dispatch_key_for_device as dispatch_key_for_device
from torch._C import _jit_get_all_schemas as jit_get_all_schemas
from torch._C import _nn as nn_functions
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as fused_optimizer_devices

__all__ = [
    "CONVERSION",
    "OpOverload", "OpOverloadPacket", "attention_math", "dispatch_key_for_device", "grouped_mm",
    "fused_optimizer_devices", "has_computed_kernel_for_dispatch_key", "has_kernel_for_dispatch_key",
    "jit_get_all_schemas", "nn_functions", "overload_of", "schema_of",
]  # fmt: skip

schema_of = attrgetter("_schema")
"""The schema of an overload."""

attention_math = torch._scaled_dot_product_attention_math
grouped_mm: Any = getattr(torch, "_grouped_mm", None)
"""None in versions of torch that lack it."""


def overload_of(target: Any) -> Any:
    """Return the overload that torch.library.custom_op keeps in its result, anything else as it is."""
    return getattr(target, "_opoverload", target)


CONVERSION: Any = torch.ops.aten._to_copy.default
"""The operator that every conversion of a tensor ends in."""
