"""Modules and optimizers: base classes without a public name, hooks, and what wrappers and state_dict leave in them."""

from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer

BatchNormBase = nn.modules.batchnorm._BatchNorm
ConvBase = nn.modules.conv._ConvNd
NormBase = nn.modules.batchnorm._NormBase
TorchLoss = nn.modules.loss._Loss
flatten_dense_tensors: Any = torch._utils._flatten_dense_tensors
global_forward_hooks_with_kwargs = nn.modules.module._global_forward_hooks_with_kwargs
global_optimizer_post_hooks = optimizer._global_optimizer_post_hooks
global_optimizer_pre_hooks = optimizer._global_optimizer_pre_hooks
unflatten_dense_tensors: Any = torch._utils._unflatten_dense_tensors

APPLY = "_apply"
"""The method of nn.Module by which `cuda`, `to` and others change all parameters and buffers."""

SAVE_STATE, LOAD_STATE = "_save_to_state_dict", "_load_from_state_dict"
"""Methods of nn.Module, which a subclass may override: one module's share of `state_dict` and `load_state_dict`."""

apply_of: Any = attrgetter(APPLY)
save_state_of: Any = attrgetter(SAVE_STATE)
load_state_of: Any = attrgetter(LOAD_STATE)
get_name_of: Any = attrgetter("_get_name")
replicate_of: Any = attrgetter("_replicate_for_data_parallel")

forward_hooks = attrgetter("_forward_hooks")
forward_pre_hooks = attrgetter("_forward_pre_hooks")
state_dict_hooks = attrgetter("_state_dict_hooks")
check_input_dim: Any = attrgetter("_check_input_dim")
check_non_zero_input_channels: Any = attrgetter("_check_non_zero_input_channels")

SCHEDULERS = "_schedulers"
"""The attribute of a learning-rate scheduler that is made of several."""

WRAPPED = "_wrapped_by_lr_sched"
"""The attribute of an optimizer's `step` that a learning-rate scheduler has put in its place."""

STEPPED = "_opt_called"
"""The attribute by which torch's schedulers know, before they advance, that an optimizer has made a step."""

step_pre_hooks = attrgetter("_optimizer_step_pre_hooks")
step_post_hooks = attrgetter("_optimizer_step_post_hooks")


def conv_forward(kind: type[nn.Module]) -> Any:
    """Return the method of a class of convolutions that takes input, weight and bias; None of other classes."""
    return getattr(kind, "_conv_forward", None)


non_persistent_buffers = attrgetter("_non_persistent_buffers_set")
