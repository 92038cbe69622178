"""Operators over lists of tensors, and torch.amp's operators over gradients."""

import torch

foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt

amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_
