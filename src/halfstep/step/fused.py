"""halfstep's own update: one operator reads and writes everything once.

That is gradients, weights, what stands behind them and the optimizer's state, low weights included (`kernels.ops`). It
takes the place of ``optimizer.step()`` inside `TrainStep`, for optimizers whose arithmetic it knows, and works on
their groups and their state as torch lays them out: a step made by torch's own form, before or after, goes on from the
same numbers. `refusal` says why an optimizer is stepped the generic way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from halfstep.formats import POLICY_DTYPES
from halfstep.kernels import ops
from halfstep.kernels.choose import KERNEL_TYPES, cannot_update
from halfstep.optim import Lion
from halfstep.weights import WeightStore
from halfstep.weights.states import LowStates

__all__ = ["Update", "refusal", "suits"]

KNOWN: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
    Lion: ("exp_avg",),
}
"""Optimizer -> names of its states; subclasses have steps of their own, which nobody knows."""

NONE: Mapping[str, Any] = MappingProxyType({})  # the state of a parameter that has not been stepped
Made = list[tuple[nn.Parameter, str, Tensor]]  # states that an update begins with: parameter, name, value


# ------------------------------------------------------------------ which optimizers


def refusal(optimizer: Optimizer, store: WeightStore | None, parameters: Sequence[nn.Parameter]) -> str:
    """Return why `optimizer` must be stepped the generic way; "" if `update` does it.

    Args:
        optimizer: any torch optimizer.
        store: what stands behind low parameters, or None.
        parameters: those that have gradients.
    """
    if reason := _unknown(optimizer):
        return reason
    for parameter in parameters:
        gradient = parameter.grad
        if (
            gradient is None
            or type(gradient) not in KERNEL_TYPES
            or gradient.layout is not torch.strided
            or gradient.dtype not in POLICY_DTYPES
        ):
            return "a gradient is sparse, sharded, or in no format of fp32, bf16 and fp16"
        if parameter.dtype is not torch.float32 and (store is None or parameter not in store):
            behind = "its fp32 value in another prepared model" if WeightStore.behind(parameter) else "no fp32 value"
            return f"a {parameter.dtype} parameter has {behind}"
    if store is not None and (reason := store.cannot_update()):
        return reason
    return cannot_update(parameters)


def suits(optimizer: Optimizer) -> bool:
    """Return whether `update` will step `optimizer` as it is, as far as can be told before there are gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return bool(parameters) and not _unknown(optimizer) and not cannot_update(parameters)


def _unknown(optimizer: Optimizer) -> str:
    """Return what `update` does not know of `optimizer`; "" for nothing."""
    if type(optimizer) not in KNOWN:
        return f"{type(optimizer).__name__} is none of Adam, AdamW, SGD and Lion"
    return _hooked(optimizer) or next(filter(None, map(_special, optimizer.param_groups)), "")


def _hooked(optimizer: Optimizer) -> str:
    """Return which code of others must see ``optimizer.step`` being called; "" for none."""
    own = vars(optimizer)
    if "step" in own and not hasattr(own["step"], "_wrapped_by_lr_sched"):
        return "its step was replaced by another function"
    if own.get("grad_scale") is not None or own.get("found_inf") is not None:
        return "its grad_scale or found_inf was set by hand"
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    if all((getattr(hook, "__module__", None) or "").startswith("halfstep.") for hook in hooks):
        return ""
    return "it has hooks that run before or after its step"


def _special(group: dict[str, Any]) -> str:
    """Return which option of a group the operators do not know; "" for none."""
    for option in ("amsgrad", "differentiable", "dampening"):
        if group.get(option):
            return f"{option}={group[option]!r}"
    for option in ("fused", "foreach"):
        if group.get(option) is not None and not group.get("fused"):
            return f"{option}={group[option]!r}"
    if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
        return "its betas are tensors"
    rate = group["lr"]
    if isinstance(rate, Tensor) and rate.numel() != 1:
        return f"lr has {rate.numel()} elements"
    return ""


# ------------------------------------------------------------------ the update


class Update:
    """An update of all parameters that have gradients, gathered before anything is written.

    Args:
        optimizer: one that `refusal` says nothing against.
        store: what stands behind its low parameters, or None.
        states: what keeps its states in bf16, or None for fp32 states.
        factor: 0-dim fp32 on the parameters' device: gradients are multiplied by it.
        bad: 0-dim bool on it: parameters, states and step counts stay as they are.
    """

    def __init__(
        self, optimizer: Optimizer, store: WeightStore | None, states: LowStates | None, factor: Tensor, bad: Tensor
    ) -> None:
        self._optimizer, self._store, self._factor, self._bad = optimizer, store, factor, bad
        self._draws = states.draws if states is not None else getattr(store, "draws", None)
        self._calls: list[tuple[Any, ...]] = []
        self._made: Made = []
        with torch.no_grad():
            self._gather(torch.float32 if states is None else torch.bfloat16)

    def _gather(self, dtype: torch.dtype) -> None:
        optimizer, store, factor = self._optimizer, self._store, self._factor
        bits = None if self._draws is None else self._draws.on(factor.device)
        names = KNOWN[type(optimizer)]
        start = 0
        for group in optimizer.param_groups:
            for form, parameters in _by_form(group["params"], store):
                weights, beside = [], []
                for parameter in parameters:
                    weight, other = (parameter, None) if store is None or form == "plain" else store.parts(parameter)
                    weights.append(weight)
                    if other is not None:
                        beside.append(other)
                gradients = [_like(p.grad, w) for p, w in zip(parameters, weights, strict=True)]  # type: ignore[arg-type]
                held = _states(optimizer, group, names, parameters, weights, dtype, self._made)
                rate = group["lr"]
                tensor = rate if isinstance(rate, Tensor) and rate.device == factor.device else None
                number = 0.0 if tensor is not None else float(rate)
                given = (gradients, factor, self._bad, bits, start, form, tensor, number)
                self._calls.append((group, (weights, beside), held, given))
                start += len(parameters)

    @torch.no_grad()
    def carry_out(self) -> None:
        """Write weights, states and step counts; waits for nothing."""
        optimizer, store = self._optimizer, self._store
        for parameter, name, value in self._made:
            optimizer.state[parameter][name] = value
        lists: list[Sequence[Tensor]] = []
        for group, values, held, given in self._calls:
            _call(optimizer, group, values, held, given)
            lists += [*values, *held]
        increment_version([tensor for tensors in lists for tensor in tensors])
        if self._draws is not None:
            self._draws.advance(self._factor.device, ~self._bad)
        if store is not None:
            store.stepped(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it before they advance


def _by_form(parameters: Sequence[nn.Parameter], store: WeightStore | None) -> list[tuple[str, list[nn.Parameter]]]:
    """Return the parameters that have gradients, those with something behind them first."""
    able = [p for p in parameters if p.grad is not None]
    if store is None:
        return [("plain", able)] if able else []
    behind, plain = [p for p in able if p in store], [p for p in able if p not in store]
    return [(form, some) for form, some in ((store.form, behind), ("plain", plain)) if some]


def _states(
    optimizer: Optimizer,
    group: dict[str, Any],
    names: tuple[str, ...],
    parameters: Sequence[nn.Parameter],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    made: Made,
) -> list[list[Tensor]]:
    """Return a list for each of the optimizer's states; what it lacks is made as by torch, and put into `made`."""
    if "momentum" in group and not group["momentum"]:
        none: list[list[Tensor]] = [[]]
        return none
    counts = "eps" in group  # of the optimizers here only Adam and AdamW count their steps
    lists = [list[Tensor]() for _ in range(len(names) + counts)]
    for parameter, weight in zip(parameters, weights, strict=True):
        state = optimizer.state.get(parameter, NONE)
        for name, some in zip(names, lists, strict=False):
            value = state.get(name)
            if value is None:
                value = torch.zeros_like(weight, dtype=dtype)
                made.append((parameter, name, value))
            elif value.dtype is not dtype or value.stride() != weight.stride():
                value = torch.empty_like(weight, dtype=dtype).copy_(value)
                made.append((parameter, name, value))
            some.append(value)
        if counts:
            count = state.get("step")
            if count is None:
                count = torch.zeros((), device=weight.device)
                made.append((parameter, "step", count))
            elif count.device != weight.device or count.dtype is not torch.float32:
                count = count.to(weight.device, torch.float32)
                made.append((parameter, "step", count))
            lists[-1].append(count)
    return lists


def _like(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return `gradient` with the strides of `weight`; autograd's have them already, but for rare layouts."""
    if gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous()):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _call(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: tuple[list[Tensor], list[Tensor]],
    held: list[list[Tensor]],
    given: tuple[Any, ...],
) -> None:
    """Call the operator of `optimizer`, with the options of `group`."""
    decay, maximize = group["weight_decay"], group["maximize"]
    if isinstance(optimizer, Adam):
        decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
        ops.adam_(*values, *held, *given, *group["betas"], group["eps"], decay, decoupled, maximize)
    elif isinstance(optimizer, SGD):
        ops.sgd_(*values, *held, *given, group["momentum"], decay, group["nesterov"], maximize)
    else:
        ops.lion_(*values, *held, *given, *group["betas"], decay, maximize)
