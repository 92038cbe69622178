"""Autograd: the backward pass that is running, hooks of tensors, saved tensors, versions."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd

current_autograd_node = torch._C._current_autograd_node
current_graph_task_id = torch._C._current_graph_task_id
engine_run_backward = torch.autograd.graph._engine_run_backward
execution_engine: Any = torch.autograd.Variable._execution_engine
get_sequence_nr = _autograd._get_sequence_nr
pop_saved_tensors_default_hooks = _autograd._pop_saved_tensors_default_hooks
profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
push_saved_tensors_default_hooks = _autograd._push_saved_tensors_default_hooks
set_grad_enabled = torch._C._set_grad_enabled
top_saved_tensors_default_hooks = _autograd._top_saved_tensors_default_hooks
unsafe_preserve_version_counter = torch.autograd.grad_mode._unsafe_preserve_version_counter

base_of = attrgetter("_base")
"""The tensor that a tensor is a view of, or None."""

backward_hooks = attrgetter("_backward_hooks")
"""The hooks of a tensor, or None."""

RECOMPUTATION_HOOK = "_recomputation_hook"
"""A part of the qualified name of the hook with which torch.utils.checkpoint packs a saved tensor."""


def forward_ad_level() -> int:
    """Return the level of forward-mode differentiation, -1 outside."""
    return torch.autograd.forward_ad._current_level


def post_accumulate_grad_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the hooks that are called when a gradient is complete."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
