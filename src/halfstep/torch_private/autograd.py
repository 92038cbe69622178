"""Autograd: the backward pass that is running, hooks of tensors, saved tensors, versions."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_default_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_default_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_default_hooks
from torch.autograd import Variable
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as unsafe_preserve_version_counter
from torch.autograd.graph import _engine_run_backward as engine_run_backward

__all__ = [
    "RECOMPUTATION_HOOK", "backward_hooks", "base_of", "current_autograd_node", "current_graph_task_id",
    "engine_run_backward", "execution_engine", "forward_ad_level", "get_sequence_nr", "pop_saved_tensors_default_hooks",
    "post_accumulate_grad_hooks", "profiler_enabled", "push_saved_tensors_default_hooks", "set_grad_enabled",
    "top_saved_tensors_default_hooks", "unsafe_preserve_version_counter",
]  # fmt: skip

execution_engine: Any = Variable._execution_engine

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
