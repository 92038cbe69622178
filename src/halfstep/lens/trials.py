"""Trials: a model lives by another policy for a while, so that a step can be replayed under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep.policy.operators import name_of
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolve, resolved
from halfstep.step.bind import KEY, Binding, binding_of
from halfstep.step.prepare import LOW
from halfstep.trees import map_tensors

__all__ = ["rebound", "with_rules"]

LOWS = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOWS | {torch.float32}


@contextmanager
def rebound(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Let a prepared model live by another policy for a while: its parameters too, from their precise values."""
    binding = binding_of(model)
    assert binding is not None
    plan = resolve(policy, model, binding.device_types[0])
    concrete = resolved(policy, binding.device_types[0])
    store = binding.store
    bound = [(module, module.__dict__[KEY]) for module in model.modules() if KEY in module.__dict__]
    made: dict[int, nn.Parameter] = {}
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        precise = store.read(parameter) if store is not None and parameter in store else parameter.detach()
        wanted = LOW.get(concrete.dtype, torch.float32) if decision.low else torch.float32
        if parameter.dtype in FLOATS and parameter.dtype is not wanted:
            made[id(parameter)] = nn.Parameter(precise.to(wanted), requires_grad=parameter.requires_grad)
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        # others are put in their place: another format in `.data` would cost a parameter the hooks of its gradient
        for module in model.modules():
            for name, old in list(module._parameters.items()):
                if old is not None and id(old) in made:
                    swapped.append((module, name, old))
                    setattr(module, name, made[id(old)])
        rules = {m.path: m.rule for m in plan.modules}
        for module, old in bound:
            rule = rules.get(old.path, "")
            parent = rules.get(old.path.rpartition(".")[0], "") if old.path else ""
            module.__dict__[KEY] = Binding(
                policy,
                old.device_types,
                path=old.path,
                root=old.root,
                rule=rule,
                entrance=bool(rule) and rule != parent,
            )
        yield
    finally:
        for module, name, parameter in swapped:
            setattr(module, name, parameter)
        for module, old in bound:
            module.__dict__[KEY] = old


class _Rules(TorchFunctionMode):
    """What a policy's fp32 rules do to operators, for models in somebody's torch.autocast region."""

    def __init__(self, operators: frozenset[str], dtype: torch.dtype | None, *, every: bool) -> None:
        super().__init__()
        self.operators = operators
        self.dtype = dtype
        self.inside = int(every)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if name is not None and (self.inside or name in self.operators):
            args, kwargs = map_tensors((args, kwargs), _wide)
            for device in on:
                torch.set_autocast_enabled(device, False)
            try:
                return func(*args, **kwargs)
            finally:
                for device in on:
                    torch.set_autocast_enabled(device, True)
        if self.dtype is None or not on:
            return func(*args, **kwargs)
        before = [torch.get_autocast_dtype(device) for device in on]
        for device in on:
            torch.set_autocast_dtype(device, self.dtype)
        try:
            return func(*args, **kwargs)
        finally:
            for device, dtype in zip(on, before, strict=True):
                torch.set_autocast_dtype(device, dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOWS else tensor


@contextmanager
def with_rules(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Do to a model that is not prepared what the operator and module rules of `policy` and its dtype would do."""
    wide = frozenset(name for name, rule in policy.ops if rule == "fp32")
    mode = _Rules(wide, LOW.get(policy.dtype), every=policy.dtype == "fp32")
    patterns = [pattern for pattern, rule in policy.modules if rule == "fp32"]
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode.inside += 1
        return map_tensors((args, kwargs), _wide)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mode.inside -= 1

    for name, module in model.named_modules():
        if name in patterns:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    torch.clear_autocast_cache()
    try:
        with mode:
            yield
    finally:
        torch.clear_autocast_cache()
        for handle in handles:
            handle.remove()
