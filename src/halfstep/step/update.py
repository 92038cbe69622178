"""The update: gradients of a window become new weights, in one pass or through ``optimizer.step()``.

In one pass, halfstep's operators (`kernels.ops`) read and write gradients, weights, what stands behind them and the
optimizer's state once. That is for optimizers whose arithmetic these operators implement, on groups and states as torch
lays them out: a step made by torch's own form, before or after, continues from the same numbers. `refusal` returns why
an optimizer is stepped by its own ``step()`` instead (`optimizer_step`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from halfstep.errors import StepError
from halfstep.formats import POLICY_DTYPES
from halfstep.kernels import ops
from halfstep.kernels.choose import KERNEL_TYPES, cannot_update, check_norms, norms_for
from halfstep.kernels.sharded import local, shard_of, sharded_like, split_of
from halfstep.optim import Lion
from halfstep.step.arguments import RATES, check_rates
from halfstep.step.optimizer_step import clip_values_, step_unless
from halfstep.step.undo import Marks
from halfstep.weights import WeightStore
from halfstep.weights.states import LowStates

__all__ = ["Culprits", "FusedUpdate", "Updater", "refusal", "suits", "unsuited"]

LOG = logging.getLogger("halfstep")

KNOWN: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
    Lion: ("exp_avg",),
}
"""Optimizer -> names of its states; a subclass may have a step of its own."""

NONE: Mapping[str, Any] = MappingProxyType({})  # the state of a parameter that has not been stepped
Made = list[tuple[nn.Parameter, str, Tensor]]  # states that an update begins with: parameter, name, value


# ------------------------------------------------------------------ one reading pass


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """The result of one reading pass over the gradients of a window, all of it on the device.

    Attributes:
        norms: (number of gradients,) fp32 2-norms of the scaled gradients.
        norm: 0-dim fp32, total 2-norm of the unscaled gradients.
        bad: 0-dim bool, whether that norm is not finite.
        factor: 0-dim fp32, what the update multiplies gradients by: unscaling and clipping in one.
    """

    norms: Tensor
    norm: Tensor
    bad: Tensor
    factor: Tensor


def check_gradients(gradients: Sequence[Tensor], divisor: Tensor | None, clip_norm: float | None) -> GradientCheck:
    """Read `gradients` once.

    Args:
        gradients: what the update will read, still scaled.
        divisor: 0-dim fp32, what unscales them; None where nothing is scaled.
        clip_norm: largest 2-norm of the unscaled gradient; None for no clipping.
    """
    norms = norms_for(gradients)
    return GradientCheck(norms, *check_norms(norms, divisor, clip_norm))


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprits:
    """The norms of an update's gradients and whose they are; calling it returns names and reads the device.

    Attributes:
        norms: (number of parameters,) fp32, on the device.
        parameters: in the order of `norms`.
        names: of the model's parameters, by id.
    """

    norms: Tensor
    parameters: Sequence[Tensor]
    names: Mapping[int, str]

    def __call__(self) -> tuple[str, ...]:
        """Return the names of the parameters whose norm is not finite."""
        finite = torch.isfinite(self.norms).tolist()
        return tuple(self.names.get(id(p), "?") for p, ok in zip(self.parameters, finite, strict=True) if not ok)


# ------------------------------------------------------------------ the updates of one training step


class Updater:
    """Makes the updates of one training step; a participant of it.

    Args:
        optimizer: a torch optimizer.
        store: what stands behind its low parameters, or None.

    Attributes:
        store: as above.
        states: what keeps the optimizer's states in bf16, or None.
        reason: why the last update went through ``optimizer.step()``; "" if halfstep's own operators made it.
        host_read: whether the last one had to wait for the device.
    """

    def __init__(self, optimizer: Optimizer, store: WeightStore | None) -> None:
        self.optimizer, self.store = optimizer, store
        self.states = LowStates.of(optimizer)
        self.reason = ""
        self.host_read = False
        self._marks: Marks | None = None
        rates = [name for name in RATES if all(name in group for group in optimizer.param_groups)]
        self._rates_of = itemgetter(*rates, *rates) if rates else lambda group: ()  # twice: of one name it is no tuple
        self._sound_rates: list[tuple[Any, ...]] = []

    def stepped_parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer changes in a step: the model's parameters, or the precise ones behind them."""
        own = [p for g in self.optimizer.param_groups for p in g["params"]]
        store = self.store
        return own if store is None else [store.value(p) if p in store else p for p in own]

    def refuse_replaced_parameters(self, names: Mapping[int, str]) -> None:
        """Refuse low parameters that took the place of prepared ones: they would be stepped without masters.

        Args:
            names: of the model's parameters, by id.

        Raises:
            StepError: there is one.
        """
        store = self.store
        for parameter in [p for g in self.optimizer.param_groups for p in g["params"]] if store is not None else ():
            if store is not None and parameter.dtype is store.dtype and parameter not in store:
                name = names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                raise StepError(
                    f"parameter {name} is low and has no fp32 master: the model's parameters were replaced after "
                    "hs.prepare, as fully_shard and parallelize_module do; call these first, or hs.shard(model, policy)"
                )

    def check_rates(self) -> None:
        """Do what `check_rates` does; look closer only where a number is another object than before.

        Raises:
            StepError: as `check_rates`.
        """
        found = [self._rates_of(group) for group in self.optimizer.param_groups]
        known = self._sound_rates
        if len(found) == len(known) and all(all(map(is_, *pair)) for pair in zip(found, known, strict=True)):
            return
        check_rates(self.optimizer)
        tensors = any(isinstance(value, (Tensor, list)) for values in found for value in values)  # change in place
        self._sound_rates = [] if tensors else found

    def parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters that have gradients, none of these partial or with repeated indices.

        Raises:
            StepError: there are none.
        """
        parameters = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not parameters:
            raise StepError(
                "no parameter of the optimizer received a gradient; check that loss_fn uses the model and that its "
                "parameters require gradients"
            )
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.coalesce()  # a norm is one of sums
            elif type(gradient) is not Tensor and any(p.is_partial() for p in getattr(gradient, "placements", ())):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        return parameters

    def plan(
        self,
        parameters: Sequence[nn.Parameter],
        divisor: Tensor | None,
        clip_norm: float | None,
        clip_value: float | None,
        *,
        part: int | None = None,
    ) -> tuple[GradientCheck, Callable[[], None]]:
        """Read the gradients; return what was found, and the function that updates unless they are bad.

        Args:
            parameters: those with gradients.
            divisor: 0-dim fp32, what unscales them; None where nothing is scaled.
            clip_norm: largest 2-norm of the unscaled gradient; None for no clipping.
            clip_value: largest absolute value of an element of it; None for no clipping.
            part: number of the first of them where these are only some of the update's; None: they are all.
        """
        if clip_value is not None:
            reason = "clip_value clips gradients one by one before it"
        else:
            reason = refusal(self.optimizer, self.store, parameters)
        if reason != self.reason:
            self.reason = reason
            LOG.debug("%s: %s", type(self.optimizer).__name__, reason or "updated by halfstep's own operators")
        if reason and self.store is not None:
            gradients = self.store.widen_gradients(self.optimizer)
        else:
            gradients = [p.grad for p in parameters if p.grad is not None]
        check = check_gradients(gradients, divisor, clip_norm)
        if not reason:
            self.host_read = False
            return check, FusedUpdate(self.optimizer, self.store, self.states, check.factor, check.bad, part).write
        factor = None if divisor is None and clip_norm is None else check.factor
        if clip_value is not None:
            clip_values_(gradients, divisor, clip_value)
            factor = factor * divisor if factor is not None and divisor is not None else factor
        if self.states is None:  # else its states are made anew around each step
            self._marks = Marks(self.optimizer, self.store)
        return check, lambda: self._step_optimizer(gradients, factor, check.bad)

    def _step_optimizer(self, gradients: list[Tensor], factor: Tensor | None, bad: Tensor) -> None:
        """Write through ``optimizer.step()``, which reads `gradients` times `factor`."""
        self.host_read = step_unless(bad, self.optimizer, gradients, factor)
        if self._marks is not None:
            self._marks.end()
        if self.store is not None:
            self.store.restore()  # what an optimizer whose step does not call its hooks has left
            self.store.drop_gradients(self.optimizer)
        torch.clear_autocast_cache()
        self._marks = None

    def has_written(self) -> bool:
        """Return whether an update that was begun and not ended has changed anything, as far as is known."""
        return self._marks is None or self._marks.moved()

    def abort(self, *, written: bool) -> None:
        """Put the host's side of an update that was cut off in order."""
        if self.store is not None:
            self.store.restore(write_back=written)
            self.store.drop_gradients(self.optimizer)
        if self._marks is not None:
            self._marks.end() if written else self._marks.restore()
        if not written:
            self._marks = None


# ------------------------------------------------------------------ which optimizers


def refusal(optimizer: Optimizer, store: WeightStore | None, parameters: Sequence[nn.Parameter]) -> str:
    """Return why `optimizer` must be stepped by its own ``step()``; "" if `FusedUpdate` does it.

    Args:
        optimizer: any torch optimizer.
        store: what stands behind low parameters, or None.
        parameters: those that have gradients.
    """
    if reason := _unknown(optimizer):
        return reason
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and type(gradient) not in KERNEL_TYPES:
            gradient = local(gradient)
        if (
            gradient is None
            or type(gradient) not in KERNEL_TYPES
            or gradient.layout is not torch.strided
            or gradient.dtype not in POLICY_DTYPES
        ):
            return "a gradient is sparse, or in no format of fp32, bf16 and fp16"
        if parameter.dtype is not torch.float32 and (store is None or parameter not in store):
            behind = "its fp32 value in another prepared model" if WeightStore.behind(parameter) else "no fp32 value"
            return f"a {parameter.dtype} parameter has {behind}"
    if store is not None and (reason := store.cannot_update()):
        return reason
    return cannot_update(parameters)


def suits(optimizer: Optimizer) -> bool:
    """Return whether `FusedUpdate` will step `optimizer` as it is, as far as can be told before there are gradients."""
    return not unsuited(optimizer)


def unsuited(optimizer: Optimizer) -> str:
    """Return why `FusedUpdate` will not step `optimizer`, as far as can be told before there are gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _unknown(optimizer) or (cannot_update(parameters) if parameters else "it has no parameters")


def _unknown(optimizer: Optimizer) -> str:
    """Return what of `optimizer` the operators do not implement; "" for nothing."""
    if type(optimizer) not in KNOWN:
        return f"{type(optimizer).__name__} is none of Adam, AdamW, SGD and Lion"
    return _hooked(optimizer) or next(filter(None, map(_special, optimizer.param_groups)), "")


def _hooked(optimizer: Optimizer) -> str:
    """Return which other code depends on ``optimizer.step`` being called; "" for none."""
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
    """Return which option of a group the operators do not implement; "" for none."""
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


# ------------------------------------------------------------------ in one pass


class FusedUpdate:
    """An update of all parameters that have gradients, gathered before anything is written.

    Args:
        optimizer: one that `refusal` says nothing against.
        store: what stands behind its low parameters, or None.
        states: what keeps its states in bf16, or None for fp32 states.
        factor: 0-dim fp32 on the parameters' device: gradients are multiplied by it.
        bad: 0-dim bool on it: parameters, states and step counts stay as they are.
        part: as in `Updater.plan`; the caller then counts the random bits drawn.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: WeightStore | None,
        states: LowStates | None,
        factor: Tensor,
        bad: Tensor,
        part: int | None = None,
    ) -> None:
        self._optimizer, self._store, self._factor, self._bad, self._part = optimizer, store, factor, bad, part
        self._draws = states.draws if states is not None else getattr(store, "draws", None)
        self._calls: list[tuple[Any, ...]] = []
        self._made: Made = []
        with torch.no_grad():
            self._gather(torch.float32 if states is None else torch.bfloat16)

    def _gather(self, dtype: torch.dtype) -> None:
        optimizer, store, factor = self._optimizer, self._store, self._factor
        names = KNOWN[type(optimizer)]
        start = self._part or 0
        for group in optimizer.param_groups:
            for form, shard, parameters in _by_form(group["params"], store):
                weights, beside = [], []
                for parameter in parameters:
                    weight, other = (parameter, None) if store is None or form == "plain" else store.parts(parameter)
                    weights.append(weight)
                    if other is not None:
                        beside.append(other)
                bits = None if self._draws is None else self._draws.on(factor.device, shard or 0)
                gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
                if shard is not None:
                    weights, gradients = list(map(local, weights)), list(map(local, gradients))
                gradients = [_like(g, w) for g, w in zip(gradients, weights, strict=True)]
                states = _states(optimizer, group, names, parameters, weights, dtype, self._made)
                rate = group["lr"]
                tensor = rate if isinstance(rate, Tensor) and rate.device == factor.device else None
                number = 0.0 if tensor is not None else float(rate)
                given = (gradients, factor, self._bad, bits, start, form, tensor, number)
                self._calls.append((group, (weights, beside), states, given))
                start += len(parameters)

    @torch.no_grad()
    def write(self) -> None:
        """Write weights, states and step counts; waits for nothing."""
        optimizer, store = self._optimizer, self._store
        for parameter, name, value in self._made:
            optimizer.state[parameter][name] = value
        lists: list[Sequence[Tensor]] = []
        for group, values, states, given in self._calls:
            _call(optimizer, group, values, states, given)
            lists += [*values, *states]
        increment_version([tensor for tensors in lists for tensor in tensors])
        if self._draws is not None and self._part is None:
            self._draws.advance(self._factor.device, ~self._bad)
        if store is not None:
            store.stepped(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers read it before they advance
        torch.clear_autocast_cache()  # low copies of weights in it, if a region is open around the step, are stale


def _by_form(
    parameters: Sequence[nn.Parameter], store: WeightStore | None
) -> list[tuple[str, int | None, list[nn.Parameter]]]:
    """Return the parameters that have gradients, those with something behind them first.

    With each list its form, and which part of its sharded parameters is here (`shard_of`); None where none is sharded.
    """
    able = [p for p in parameters if p.grad is not None]
    if store is None:
        lists = [("plain", able)]
    else:
        lists = [(store.form, [p for p in able if p in store]), ("plain", [p for p in able if p not in store])]
    if all(type(p) in KERNEL_TYPES for p in able):
        return [(form, None, some) for form, some in lists if some]
    found: dict[tuple[str, Any], list[nn.Parameter]] = {}  # in an order that all ranks share: it numbers random bits
    for form, some in lists:
        for parameter in some:
            found.setdefault((form, split_of(parameter)), []).append(parameter)
    return [(form, shard_of(some[0]), some) for (form, _), some in found.items()]


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
            if type(value) not in KERNEL_TYPES and value is not None:
                value = local(value)
            if value is None:
                value = torch.zeros_like(weight, dtype=dtype)
                made.append((parameter, name, sharded_like(parameter, value)))
            elif value.dtype is not dtype or value.stride() != weight.stride():
                value = torch.empty_like(weight, dtype=dtype).copy_(value)
                made.append((parameter, name, sharded_like(parameter, value)))
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
    states: list[list[Tensor]],
    given: tuple[Any, ...],
) -> None:
    """Call the operator of `optimizer`, with the options of `group`."""
    decay, maximize = group["weight_decay"], group["maximize"]
    if isinstance(optimizer, Adam):
        decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
        ops.adam_(*values, *states, *given, *group["betas"], group["eps"], decay, decoupled, maximize)
    elif isinstance(optimizer, SGD):
        ops.sgd_(*values, *states, *given, group["momentum"], decay, group["nesterov"], maximize)
    else:
        ops.lion_(*values, *states, *given, *group["betas"], decay, maximize)
