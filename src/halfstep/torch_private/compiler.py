"""Dynamo, torch.compile and graphs: what their modules and functions are marked with."""

from operator import attrgetter
from typing import Any

import torch
from torch import _guards, nn
from torch._C._dynamo import eval_frame
from torch.fx import _symbolic_trace

detect_fake_mode = _guards.detect_fake_mode
is_fx_symbolic_tracing = _symbolic_trace.is_fx_symbolic_tracing

DYNAMO = "_torchdynamo"
"""The beginning of torch.compile's attributes on a function."""

codegen_of: Any = attrgetter("_codegen")
"""The writer of a graph's Python code."""

set_code_exec_strategy: Any = getattr(eval_frame, "set_code_exec_strategy", None)
"""None in versions of torch that lack it, and with it the two names below."""

FrameAction: Any = getattr(eval_frame, "_FrameAction", None)
FrameExecStrategy: Any = getattr(eval_frame, "_FrameExecStrategy", None)


def original_of(module: Any) -> Any:
    """Return the module that torch.compile has made `module` of, None if it did not make it."""
    return getattr(module, "_orig_mod", None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled in place, by its method `compile`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def keep_out(function: Any, reason: str) -> None:
    """Keep Dynamo from tracing `function`, as torch.compiler.disable does; `reason` is what Dynamo says then."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason


def mark_constant(function: Any) -> None:
    """Let Dynamo call `function` itself, with constants, while it traces, and take the result as a constant."""
    function._dynamo_marked_constant = True


def counters() -> Any:
    """Return the counters of torch's compiler, once torch.compile has imported it: its import takes seconds."""
    return torch._dynamo.utils.counters


def functorch_settings() -> Any:
    """Return the settings of the compiler of forward and backward graphs, once torch.compile has imported it."""
    return torch._functorch.config


def optimized(module: nn.Module, context: Any) -> nn.Module:
    """Return what torch.compile makes of a module, with the context of an earlier call of it."""
    from torch._dynamo import OptimizedModule

    return OptimizedModule(module, context)
