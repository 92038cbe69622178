"""Modes and transforms: the stacks of function modes and dispatch modes, functorch's interpreters, torch.jit.trace."""

from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _disabled_torch_function_impl as disabled_torch_function_impl
from torch._C import _get_function_stack_at as get_function_stack_at
from torch._C import _get_tracing_state as get_tracing_state
from torch._C import _len_torch_dispatch_stack as len_torch_dispatch_stack
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C import _pop_torch_function_stack as pop_torch_function_stack
from torch._C import _push_on_torch_function_stack as push_on_torch_function_stack
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch.overrides import _get_current_function_mode_stack as current_function_mode_stack
from torch.overrides import _pop_mode as pop_mode
from torch.overrides import _push_mode as push_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DisableTorchFunction", "DisableTorchFunctionSubclass", "TorchDispatchMode", "are_functorch_transforms_active",
    "current_function_mode_stack", "disable_current_modes", "disabled_torch_function_impl", "get_function_stack_at",
    "get_tracing_state", "is_functorch_wrapped_tensor", "is_in_torch_dispatch_mode", "is_legacy_batchedtensor",
    "is_traceable_wrapper_subclass", "len_torch_dispatch_stack", "len_torch_function_stack", "peek_interpreter_stack",
    "pop_mode", "pop_torch_function_stack", "push_mode", "push_on_torch_function_stack", "unwrap_dead_wrappers",
]  # fmt: skip
