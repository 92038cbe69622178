"""What the front-ends share: names of low formats, the peers' tensor classes and functions, a gate for gradients."""

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

import halfstep as hs
from halfstep.torch_private import foreach

LOW_NAMES = {dtype: name for dtype, name in hs.formats.DTYPE_NAMES.items() if dtype in hs.formats.LOW_DTYPES}
"""Low dtype -> the name that policies use."""


class Factory(type):
    """Metaclass of the peers' `Tensor` and `Parameter`: what torch's class `_made` makes are their instances."""

    _made: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._made)


class _Gate:
    """Stands for an optimizer in `hs.GradScaler.step`, which unscales its gradients and calls it if all are finite."""

    def __init__(self, param_groups: list[dict[str, Any]], *, masters: bool) -> None:
        self.param_groups = param_groups
        self.passed = False
        if masters:
            self._halfstep_weights = 1

    def step(self) -> None:
        self.passed = True


def unscaled(scaler: hs.GradScaler, param_groups: list[dict[str, Any]], *, masters: bool = False) -> Any:
    """Unscale the gradients of `param_groups` by `scaler`; return what says by `passed` whether all are finite.

    With `masters`, low parameters get new fp32 gradients instead of unscaled low ones. Waits for the device.
    """
    gate: Any = _Gate(param_groups, masters=masters)
    scaler.step(gate)
    return gate


class WrittenOptimizer(torch.optim.Optimizer):
    """Base of optimizers that are written with torch's functions: `_update` gets the parameters of one group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; return what `closure` returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        """Update the parameters of one group, all of which have gradients."""
        raise NotImplementedError

    def _adam(
        self, group: dict[str, Any], params: list[Any], grads: list[Any], bias: tuple[float, float] = (1.0, 1.0),
        share: float | None = None,
    ) -> Any:  # fmt: skip
        """Take `grads` into the moments and return Adam's directions; `share`: of a gradient in the first moment."""
        beta1, beta2 = group["betas"]
        for parameter, gradient in zip(params, grads, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(gradient)
        first, second = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        foreach.foreach_mul_(first, beta1)
        foreach.foreach_add_(first, grads, alpha=1 - beta1 if share is None else share)
        foreach.foreach_mul_(second, beta2)
        foreach.foreach_addcmul_(second, grads, grads, 1 - beta2)
        below = foreach.foreach_sqrt(foreach.foreach_div(second, bias[1]))
        foreach.foreach_add_(below, group["eps"])
        return foreach.foreach_div(foreach.foreach_div(first, bias[0]), below)


def listed(value: Any) -> list[Any]:
    """Return a tensor or several as a list; None is an empty one."""
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


def alias(name: str, doc: str, *, of: str = "") -> Any:
    """Return a property that reads and sets the attribute `name`, of the attribute `of` if one is given."""

    def change(instance: Any, value: Any) -> None:
        setattr(getattr(instance, of) if of else instance, name, value)

    return property(attrgetter(f"{of}.{name}" if of else name), change, doc=doc)


def public(original: Any, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return torch's `original` under a peer's names: `function`, often a lambda, has its arguments and defaults."""
    name = name or original.__name__
    function.__name__ = function.__qualname__ = name
    title = f"``{name}{inspect.signature(function)}``: torch's `{original.__name__}`."
    function.__doc__ = f"{title}\n\n{function.__doc__ or original.__doc__}"
    return function


def with_settings(
    base: type, name: str, doc: str, method: str, function: Callable[..., Any], /, **settings: Any
) -> Any:
    """Return a subclass of `base`, in its module, made of `settings`, name=default, which its constructor takes.

    Its `method` calls `function` with its own arguments, and the settings by name.
    """

    def run(self: Any, *args: Any, **named: Any) -> Any:
        return function(*args, **{key: getattr(self, key) for key in settings}, **named)

    fields = [(key, Any, dataclasses.field(default=value)) for key, value in settings.items()]
    body = {"__doc__": doc, "__module__": base.__module__, method: run}
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace=body, repr=False, eq=False)
