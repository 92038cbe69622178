"""Custom operators: a rule for a function, autograd.Function or torch.library operator of the user.

The operator runs with autocast and every other rule off: its author chooses the formats inside. A policy can set
another rule by its name. Under plain torch.autocast the rule holds too. A torch.library operator gets its rule in
torch's dispatcher, so it holds for every caller of the operator.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from halfstep.arguments import TEXT, check, one_of
from halfstep.cast.arithmetic.emulate import simulated, widened
from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.dispatch import RuleMode, cast_tensor, mode_here, run
from halfstep.cast.rules.handlers import cast_to
from halfstep.cast.rules.recipe import Recipe, recipe_for
from halfstep.errors import PolicyError
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, POLICY_DTYPES
from halfstep.policy.operators import CustomOperator, custom_rule, register
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import default_device_types
from halfstep.policy.rule_kinds import MODULE_RULES, RULE_KINDS, RULES
from halfstep.torch_private.operators import OpOverload, OpOverloadPacket, overload_of, schema_of
from halfstep.trees import map_tensors, tensors

T = TypeVar("T", bound=Callable[..., Any])

KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "MTIA", "XLA", "PrivateUse1")
"""Endings of torch's dispatch keys of autocast, one for each kind of device; the last is for those outside of torch."""


def operator(rule: str, *, backward: str = "", name: str = "") -> Callable[[T], T]:
    """Give an operator of your own its rule; a decorator.

    Works on Python functions, on subclasses of torch.autograd.Function (returned is a class with the same ``apply``),
    and on torch.library operators (``torch.library.custom_op``, ``torch.ops.mylib.op``), which are returned themselves.

    Args:
        rule: "low", "fp32", "keep" (the first activation decides), "widest" or "banned", for tensors anywhere in the
            arguments: in lists, dicts, named tuples, dataclasses. An output stays in the format the operator gives it.
        backward: only for autograd.Functions: "low", "fp32" or "keep" for every operator that ``backward`` calls; ""
            runs it without rules, in the formats gradients and saved tensors have. Gradients leave in the formats of
            the inputs.
        name: "namespace::name" for policies, plans and messages; default: module and qualified name, or that of the
            torch.library operator.

    Raises:
        PolicyError: an unknown rule, a name that is taken or has no "::", or `backward` for something that has no
            backward pass of its own.

    Examples:
        >>> @hs.operator("fp32")
        ... def energy(states):
        ...     return states.square().sum(-1)
        >>> with hs.autocast("cpu", dtype=torch.bfloat16):
        ...     energy(model(x)).dtype
        torch.float32
    """
    kinds = {
        "rule": (rule, one_of(*RULES)),
        "backward": (backward, one_of("", *(rule for rule in MODULE_RULES if rule in RULES))),
        "name": (name, TEXT),
    }
    check("hs.operator", PolicyError, **kinds)
    if name and "::" not in name:
        raise PolicyError(f"hs.operator(name={name!r}): a custom operator is called 'namespace::name'")

    def decorate(target: T) -> T:
        library = _overloads(target)
        if backward and not _is_function_class(target):
            raise PolicyError(
                f"hs.operator(backward={backward!r}) on {target!r}: its backward pass is made of the operators it "
                "calls, in the formats they ran in; for one of its own write a torch.autograd.Function"
            )
        if not callable(target):
            raise PolicyError(f"hs.operator gives a function its rule and got {target!r}")
        own_name, where = _name_and_place(target, library)
        made = CustomOperator(name=name or own_name, rule=rule, backward=backward, where=where)
        register(made)
        if library:
            for overload in library:
                _govern(overload, made)
            return target
        if _is_function_class(target):
            return _function_class(target, made)  # type: ignore[return-value,arg-type]

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _apply(made, target, args, kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _is_function_class(target: object) -> bool:
    return isinstance(target, type) and issubclass(target, Function)


def _overloads(target: Any) -> list[Any]:
    target = overload_of(target)
    if isinstance(target, OpOverload):
        return [target]
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, overload) for overload in target.overloads()]
    return []


def _name_and_place(target: Any, library: list[Any]) -> tuple[str, str]:
    """Return the name of an operator without one of the user's, and where it was made."""
    if library:
        name = str(schema_of(library[0]).name)
        return name, f"torch.ops:{name}"
    name = f"{target.__module__}::{target.__qualname__}"
    try:
        return name, f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):  # made by exec, or built in
        return name, f"{target.__module__}:0"


# ------------------------------------------------------------------ carrying a rule out


def _apply(op: CustomOperator, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``func(*args, **kwargs)`` under the rule that holds for `op` here and now."""
    found = [t for t in tensors((args, kwargs)) if t.dtype in POLICY_DTYPES]
    device = next((t.device.type for t in found), None)
    if device is None or not torch.is_autocast_enabled(device):
        return func(*args, **kwargs)
    mode = mode_here()
    rule = op.rule if mode is None else custom_rule(mode.overrides, op.name, op.rule)
    dtype = cast_to(RULE_KINDS[rule], op.name)(device, found)
    if dtype is None:
        return run(device, func, args, kwargs)
    if RULE_KINDS[rule].format == "low" and mode is not None:
        if mode.how.simulated is not None:
            return run(device, simulated(func, mode.how.simulated), args, kwargs)
        if device in mode.how.emulating and dtype is torch.float16:
            func = widened(func)

    def cast(tensor: Tensor) -> Tensor:
        if mode is not None:
            return cast_tensor(tensor, dtype, mode)
        return tensor.to(dtype) if tensor.dtype in POLICY_DTYPES and tensor.device.type == device else tensor

    args, kwargs = map_tensors((args, kwargs), cast)
    return run(device, func, args, kwargs)


def _function_class(original: type[Function], op: CustomOperator) -> type:
    """Return a class with ``apply``, no Function: Dynamo goes from the ``apply`` of these straight to ``forward``."""
    regions = _backward_regions(op.backward)
    parent: Any = original
    # plain functions: Dynamo traces a method of a Function class only with the context it made itself
    first = "forward" if parent.setup_context is Function.setup_context else "setup_context"
    their_first, their_backward = getattr(parent, first), parent.backward

    def noting_formats(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.halfstep_formats = {device: torch.get_autocast_dtype(device) for device in regions}
        return their_first(ctx, *args, **kwargs)

    def backward(ctx: Any, *grads: Any) -> Any:
        device = next((g.device.type for g in grads if isinstance(g, Tensor)), "cpu")
        recipe = regions[device].get(ctx.halfstep_formats[device]) if device in regions else None
        return _in_backward(recipe, device, their_backward, ctx, *grads)

    body = {first: staticmethod(noting_formats), "backward": staticmethod(backward), "__module__": original.__module__}
    passive = RuleMode((), {})
    made: Any = type(original.__name__, (original,), body)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return made.apply(*args, **kwargs)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if regions and torch.compiler.is_compiling():
            with passive:  # Dynamo lets a backward pass push a mode only where the forward pass did
                return _apply(op, inner, args, kwargs)
        return _apply(op, inner, args, kwargs)  # casts outside the Function: autograd undoes them

    about = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (), {**about, "apply": staticmethod(apply), "function": made})


def _backward_regions(rule: str) -> Mapping[str, Mapping[torch.dtype, Recipe]]:
    """Return device type -> low format -> a region in which every operator has `rule`; Dynamo cannot make one."""
    if not rule:
        return {}
    every = Policy(name=f"backward {rule}", table="all-low", ops=(("*", rule),), loss="keep")

    def region(device: str, dtype: str) -> Recipe:
        recipe = recipe_for(every.replace(dtype=dtype), (device,))
        assert recipe.mode is not None  # every operator has the rule
        mode = _BackwardMode((device,), recipe.mode.handlers, recipe.mode.how, recipe.mode.overrides)
        return dataclasses.replace(recipe, mode=mode)

    return {device: {low: region(device, DTYPE_NAMES[low]) for low in LOW_DTYPES} for device in default_device_types()}


class _BackwardMode(RuleMode):
    """Rules that hold wherever the mode is on: under Dynamo a backward pass cannot set the state of the thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self.traceable.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(self, func, args, kwargs or {})


def _in_backward(recipe: Recipe | None, device: str, func: Callable[..., Any], *args: Any) -> Any:
    """Call a backward function in the region of `recipe`; without one, with every rule off."""
    if recipe is None:
        if torch.is_autocast_enabled(device):  # the backward pass runs in a region of the user
            return run(device, func, args, {})
        return func(*args)
    if torch.compiler.is_compiling():
        (low,) = (dtype for _, dtype, _ in recipe.devices)
        with torch.autocast(device, dtype=low), recipe.mode:  # type: ignore[union-attr]  # made with a mode
            return func(*args)
    with opened(recipe):
        return func(*args)


# ------------------------------------------------------------------ torch.library


def _govern(overload: Any, op: CustomOperator) -> None:
    """Register the rule of `op` as the autocast kernel of a torch.library operator, on every device type."""
    namespace, _, local = schema_of(overload).name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    overload._halfstep_library = library  # when a Library is freed, so is what it has registered
    qualified = f"{local}.{schema_of(overload).overload_name}" if schema_of(overload).overload_name else local

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _apply(op, overload, args, kwargs)

    for key in KEYS:
        library.impl(qualified, kernel, f"Autocast{key}", allow_override=True)
