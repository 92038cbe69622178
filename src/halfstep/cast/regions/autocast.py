"""Regions: where operators follow a policy. `autocast` opens one for a block, `suspended` switches all of them off."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import get_autocast_dtype

from halfstep.arguments import DEVICE_TYPE, FLAG, NONE, WHOLE, Kind, a, check
from halfstep.cast.regions.dtype_errors import explained
from halfstep.cast.regions.opening import abandon, close_recipe, open_recipe, opened
from halfstep.cast.rules.dispatch import RuleMode
from halfstep.cast.rules.recipe import Recipe, call_traced, recipe_for, run_eagerly
from halfstep.cast.state import STATE, hand_code, in_forward
from halfstep.errors import PolicyError, RegionError, warn
from halfstep.formats import DTYPE_NAMES
from halfstep.policy.policy import PRESETS, Policy
from halfstep.policy.resolve import default_device_types

P = ParamSpec("P")
R = TypeVar("R")


class autocast:
    """Run operators under a policy: a context manager and a decorator with torch.autocast's signature, and more.

    ``autocast("cuda", dtype=torch.float16)`` means what torch.autocast means (preset ``torch``), and emulates fp16
    where the device has no fp16 units. ``autocast(policy="mixed")`` follows any Policy on the accelerator, if there is
    one, and the CPU. Regions nest, also in different formats; one object can be entered again while it is open;
    a recursive function can be decorated. Inside a function given to `torch.compile` use the decorator (or
    `hs.prepare`): Dynamo traces those whole and breaks the graph at the ``with`` of any other class.

    Args:
        device_type: "cpu", "cuda", ...; may be left out with `policy`.
        dtype: torch.float16 or torch.bfloat16; default: that of the region this object is made in, or torch's for the
            device, or that of the policy. As in torch.autocast, torch.float32 and torch.float64 make a region that is
            off, and so does the default inside one of these.
        enabled: False opens a region in which nothing is cast.
        cache_enabled: whether low copies of weights may be kept until the outermost region that keeps any ends.
        policy: a preset's name, the path of a TOML file or a `Policy`.

    Raises:
        PolicyError: an unknown device or dtype, or a policy that needs a model (`hs.prepare`) to be carried out.
        RegionError: at exit, if regions were not left in the opposite order they were entered in.

    Examples:
        >>> with hs.autocast(policy=hs.Policy.of("mixed", dtype="bf16")):
        ...     model(x).dtype
        torch.bfloat16
    """

    __slots__ = ("__weakref__", "recipe")

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | Path | None = None,
    ) -> None:
        if policy is not None:
            if type(policy) is not Policy and str(policy).endswith(".toml"):
                policy = Policy.of(policy)  # a file may change; what is cached below is its content
        elif dtype is None:
            dtype = _dtype_here(device_type)
        elif dtype is torch.float64 and enabled:
            warn("hs.autocast(dtype=torch.float64) casts nothing, as in torch.autocast")
        try:
            self.recipe = _recipe(device_type, dtype, enabled, cache_enabled, policy)
        except TypeError:  # one of them cannot be hashed
            _check(device_type, dtype, enabled, cache_enabled, policy)
            raise

    def __enter__(self) -> autocast:
        frame = None
        try:
            frame = open_recipe(self.recipe, self)
            return self
        except BaseException:  # Ctrl-C after the region was open
            abandon(frame)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_recipe(self, failing=exc_type is not None)
        if exc is not None and (better := explained(exc)) is not None:
            raise better from exc

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Decorate `func`: each call runs in the region."""
        if not callable(func):
            raise TypeError(f"hs.autocast(...) decorates functions and got {func!r}; write `with hs.autocast(...):`")
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise RegionError(
                f"{func.__qualname__} is suspended by yield or await, and a region cannot stay open meanwhile; "
                "open the region inside it, around the work itself"
            )

        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return call_traced(self.recipe, func, args, kwargs)  # type: ignore[no-any-return]
            with again(self.recipe):
                return func(*args, **kwargs)

        return wrapper

    def __repr__(self) -> str:
        devices = ", ".join(
            f"{d}: {DTYPE_NAMES.get(t, t)}" if on and t else f"{d}: off" for d, t, on in self.recipe.devices
        )
        return f"<hs.autocast {self.recipe.policy.name or 'policy'} on {devices}>"


def again(recipe: Recipe) -> autocast:
    """Return a region of its own, such as that of one call of a decorated function: an interrupt may keep it open."""
    made = object.__new__(autocast)
    made.recipe = recipe
    return made


def _refuse_what_needs_a_model(policy: Policy) -> None:
    """Refuse fields about a model, an optimizer or a loss, but for those in presets: outputs, ``scale="auto"``."""
    needs_a_model = {
        "params": "lowers parameters",
        "modules": "has module rules",
        "inputs": "casts a model's inputs",
        "grads": "sums gradients in fp32",
        "state": "keeps optimizer states low",
        "reduce": "sets the format in which gradients are summed across processes",
    }
    for field, what in needs_a_model.items():
        value = getattr(policy, field)
        if value != DEFAULTS[field]:
            raise PolicyError(
                f"policy {policy.name or policy!r} {what} ({field}={value!r}), and a region knows no model; "
                "use hs.prepare(model, optimizer, policy=...) or hs.TrainStep"
            )
    if policy.scale not in {"auto", "none"}:
        raise PolicyError(
            f"policy {policy.name or policy!r} scales the loss (scale={policy.scale!r}), and a region sees no loss; "
            "give the region the policy without it, policy.replace(scale='auto'), and make hs.GradScaler(...) "
            "yourself, or use hs.prepare(model, optimizer, policy=...) or hs.TrainStep"
        )


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Policy)}

SUSPENDED = object()
"""What `STATE.bound` is inside `suspended`: bound models then open no region."""


class suspended(opened):
    """Switch all casts off in this thread: a context manager.

    As ``torch.autocast(enabled=False)`` does, and prepared models whose parameters are fp32 open no region either, so
    that their fp32 run is one line away. Models with low parameters cannot run otherwise and keep their region. A
    region opened inside casts again.

    Examples:
        >>> with hs.autocast("cpu", dtype=torch.bfloat16), hs.suspended():
        ...     model(x).dtype
        torch.float32
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_nothing(default_device_types()))

    def __enter__(self) -> suspended:
        try:
            super().__enter__()
            STATE.bound = SUSPENDED if in_forward() else hand_code(SUSPENDED)
            return self
        except BaseException:
            abandon(self.frame)
            raise


@functools.lru_cache(maxsize=8)
def _nothing(device_types: tuple[str, ...]) -> Recipe:
    """Return the recipe of `suspended`; its mode has no rules and only marks checkpoints."""
    off = Policy(name="suspended", dtype="fp32", table="none", loss="keep", scale="none")
    return dataclasses.replace(recipe_for(off, device_types, enabled=False), mode=RuleMode((), {}))


for _function in (autocast.__enter__, autocast.__exit__, suspended.__enter__):
    run_eagerly(_function)


def _dtype_here(device_type: str | None) -> torch.dtype | None:
    """Return the format torch.autocast would take here and now: that of an outer region, or the device's default."""
    try:
        return get_autocast_dtype(torch.device(device_type).type)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError, OverflowError):  # `_recipe` raises a PolicyError
        return None


USUAL = (str, torch.dtype, bool, bool)
SWITCH = FLAG | Kind("0 or 1", lambda value: WHOLE.has(value) and value < 2)


def _check(device_type: object, dtype: object, enabled: object, cache_enabled: object, policy: Any) -> None:
    """Refuse arguments of `autocast` of the wrong kind."""
    check(
        "hs.autocast",
        PolicyError,
        device_type=(device_type, DEVICE_TYPE | NONE),
        dtype=(dtype, a(torch.dtype, words="a torch dtype") | NONE),
        enabled=(enabled, SWITCH),
        cache_enabled=(cache_enabled, SWITCH | NONE),
    )
    if policy is not None:
        Policy.of(policy)


@functools.lru_cache(maxsize=256)
def _recipe(
    device_type: str | None,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str | None,
) -> Recipe:
    if device_type is None and policy is None:
        raise PolicyError("hs.autocast needs a device_type ('cpu', 'cuda', ...) or a policy (policy='mixed')")
    given: tuple[object, ...] = device_type, dtype, enabled, cache_enabled
    if enabled is None or any(
        value is not None and type(value) is not kind for value, kind in zip(given, USUAL, strict=True)
    ):
        _check(device_type, dtype, enabled, cache_enabled, policy)
    try:
        devices = default_device_types() if device_type is None else (torch.device(device_type).type,)
    except RuntimeError as error:
        by_name = f"a policy is given by name: hs.autocast(policy={device_type!r})"
        remedy = by_name if device_type in PRESETS else f"torch says: {error}"
        raise PolicyError(f"device_type {device_type!r} is no device torch knows; {remedy}") from None
    for device in devices:
        if not torch.amp.is_autocast_available(device):
            raise PolicyError(f"torch.autocast does not exist for device_type {device!r}; use 'cpu' or an accelerator")
    wide = dtype in {torch.float32, torch.float64} and policy is None  # the region is off, and its format is set
    if dtype is not None and dtype not in DTYPE_NAMES and not wide:
        raise PolicyError(
            f"dtype={dtype!r} is not a format a region can lower to; use torch.bfloat16 or torch.float16 "
            "(torch.float32 and, without a policy, torch.float64 switch the region off)"
        )
    if policy is None:
        if device_type == "cuda" and enabled and not torch.cuda.is_available():
            warn("hs.autocast('cuda') on a machine without CUDA does nothing")
            enabled = False
        chosen = Policy.of("torch", dtype="fp32" if wide else DTYPE_NAMES[dtype or get_autocast_dtype(devices[0])])
    else:
        chosen = Policy.of(policy) if dtype is None else Policy.of(policy, dtype=DTYPE_NAMES[dtype])
        if enabled:
            _refuse_what_needs_a_model(chosen)
    recipe = recipe_for(chosen, devices, enabled=enabled, cache=cache_enabled)
    if wide:
        return dataclasses.replace(recipe, devices=tuple((device, dtype, on) for device, _, on in recipe.devices))
    return recipe
