"""Trials: a model lives by another policy for a while, so that a step can be replayed under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.recipe import Recipe, recipe_for
from halfstep.cast.state import STATE
from halfstep.errors import BindError
from halfstep.formats import DTYPES
from halfstep.lens.sites import RUNS_BACKWARD, region_here, spelled
from halfstep.lens.values import LOWS
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import default_device_types, resolve
from halfstep.step.bind import KEY, Binding, binding_of
from halfstep.step.prepare import prepare, unprepare

__all__ = ["instead", "rebound"]

FLOATS = LOWS | {torch.float32}


@contextmanager
def rebound(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Let a prepared model live by another policy for a while: its parameters too, from their precise values."""
    binding = binding_of(model)
    assert binding is not None
    plan = resolve(policy, model, binding.device_types[0])
    store = binding.store
    bound = [(module, module.__dict__[KEY]) for module in model.modules() if KEY in module.__dict__]
    made: dict[int, nn.Parameter] = {}
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        precise = store.read(parameter) if store is not None and parameter in store else parameter.detach()
        wanted = DTYPES[plan.policy.dtype] if decision.low else torch.float32
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


class _Instead(TorchFunctionMode):
    """Opens a region around every operator that somebody's region, torch's or halfstep's, is about to reach.

    It stands above those (`STATE.above`), or the trace that does calls it.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.native = dataclasses.replace(recipe, mode=None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        theirs = region_here()
        on = any(torch.is_autocast_enabled(device) for device, _, _ in self.recipe.devices)
        if not on or (STATE.frames and theirs is None) or spelled(func) in RUNS_BACKWARD:
            return func(*args, **kwargs)
        recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, which knows the format and no rules
        with opened(self.native if recomputed else self.recipe):
            return func(*args, **kwargs)


@contextmanager
def instead(model: nn.Module, policy: Policy) -> Iterator[None]:
    """Let a step whose regions are its loss function's run as what is proposed in their place would have it run.

    Without module rules that is ``hs.autocast(policy=policy)`` in each of their places; with them `model` is prepared
    for a while, and those regions do nothing.

    Raises:
        HalfstepError: the model cannot be prepared.
    """
    by_module = bool(policy.modules)
    if by_module and any(p.dtype in LOWS for p in model.parameters()):
        raise BindError("hs.prepare would change the formats of its parameters")
    recipe = recipe_for(policy.replace(modules=()), default_device_types(), enabled=not by_module)
    mode, before = _Instead(recipe), STATE.above
    torch.clear_autocast_cache()
    try:
        if by_module:
            prepare(model, policy=policy)
        with mode:
            STATE.above = mode
            yield
    finally:
        STATE.above = before
        torch.clear_autocast_cache()
        if by_module and binding_of(model) is not None:
            unprepare(model)
