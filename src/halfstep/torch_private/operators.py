"""Operators: overloads and their schemas, torch's dispatcher, and operators without a public name."""

from operator import attrgetter
from typing import Any

import torch
from torch.utils import _foreach_utils

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
dispatch_key_for_device = torch._C._dispatch_key_for_device
fused_optimizer_devices = _foreach_utils._get_fused_kernels_supported_devices
has_computed_kernel_for_dispatch_key = torch._C._dispatch_has_computed_kernel_for_dispatch_key
has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
jit_get_all_schemas = torch._C._jit_get_all_schemas
nn_functions = torch._C._nn

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
