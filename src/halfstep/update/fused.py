"""An update in one pass: halfstep's operators read and write gradients, weights and optimizer states once.

Groups and states are as torch lays them out: a step of torch's own form, before or after, continues from the same ones.

Note [tables]: which tensors take part is found out once, and used again while `fits` finds all of them unchanged: the
same parameters in the same groups, gradients of the same formats and layout, the same tensors behind low weights
(`WeightStore.generation`), the same optimizer states, and the same addresses. Each check is one call of `map` over a
list, so a good step runs no Python for each parameter. On a CPU the addresses stay packed for the native kernels,
which are called without torch's dispatcher unless a dispatch mode or a profiler watches it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from halfstep.kernels import ops
from halfstep.kernels.choose import KERNEL_TYPES, check_norms, native_kernels, norms_for
from halfstep.kernels.native.calls import Columns, Kernels, Packed
from halfstep.kernels.optimizers import BY_TYPE
from halfstep.kernels.sharded import local, shard_of, sharded_like, split_of
from halfstep.kernels.watched import WatchedParameter
from halfstep.torch_private.autograd import profiler_enabled
from halfstep.torch_private.modes import len_torch_dispatch_stack
from halfstep.torch_private.modules import STEPPED
from halfstep.weights import UnkeptWeights, WeightStore
from halfstep.weights.states import LowStates

NONE: Mapping[str, Any] = MappingProxyType({})  # the state of a parameter that has not been stepped
PLAIN = frozenset({Tensor, nn.Parameter, WatchedParameter})  # exact types with an address: note [tables]
Made = list[tuple[nn.Parameter, str, Tensor]]  # states that an update begins with: parameter, name, value

_grad, _address = attrgetter("grad"), Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """The result of one reading pass over the gradients of a window, all of it on the device."""

    norms: Tensor  # (number of gradients,) fp32 2-norms of the scaled gradients
    norm: Tensor  # 0-dim fp32, total 2-norm of the unscaled gradients
    bad: Tensor  # 0-dim bool, whether that norm is not finite
    factor: Tensor  # 0-dim fp32, what the update multiplies gradients by: unscaling and clipping in one


def check_gradients(gradients: Sequence[Tensor], divisor: Tensor | None, clip_norm: float | None) -> GradientCheck:
    """Read `gradients`, still scaled, once; `divisor`, 0-dim fp32, unscales them."""
    norms = norms_for(gradients)
    return GradientCheck(norms, *check_norms(norms, divisor, clip_norm))


@dataclass(slots=True)
class _Call:
    """One call of an operator: the parameters of one group that have one form."""

    group: dict[str, Any]  # the optimizer's, with its numbers
    form: str  # note [forms] in `kernels.ops`
    shard: int  # which part of sharded parameters is here (`shard_of`)
    start: int  # place of its first parameter in the update, which numbers random bits
    chosen: list[int]  # places of its parameters among those of the update
    values: tuple[list[Tensor], list[Tensor]]  # weights, and what is beside them
    states: list[list[Tensor]]
    counters: list[list[Tensor]]
    packed: Packed | None = None  # all of these for the native kernels

    def tensors(self) -> tuple[list[Tensor], ...]:
        """Return the lists that the operator takes before the gradients."""
        return (*self.values, *self.states, *self.counters)


class FusedUpdate:
    """The updates of parameters that have gradients, gathered before anything is written: note [tables].

    `states` keeps the optimizer's in bf16. `part` is the number of the first parameter where these are not all of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: WeightStore | None,
        states: LowStates | None,
        parameters: Sequence[nn.Parameter],
        gradients: list[Tensor],
        part: int | None = None,
    ) -> None:
        self._optimizer, self._store, self._parameters, self._part = optimizer, store, parameters, part
        self._update_spec = BY_TYPE[type(optimizer)]
        self._draws = states.draws if states is not None else getattr(store, "draws", None)
        self._low = [p for p in parameters if store is not None and p in store]
        self._unkept = [p for _, p, _ in UnkeptWeights.of(enumerate(parameters))]
        self._calls: list[_Call] = []
        self._made: Made = []
        self._kernels: Kernels | None = None
        with torch.no_grad():
            self._gather(torch.float32 if states is None else torch.bfloat16)
        self._tensors = [t for call in self._calls for tensors in call.tensors() for t in tensors]
        self._values = [t for call in self._calls for tensors in call.values for t in tensors]
        self._laid_out = laid_out = self._lay_out(gradients)
        pairs = zip(self._calls, laid_out, strict=True)
        in_place = all(same(some, [gradients[n] for n in call.chosen]) for call, some in pairs)
        self.stays = (  # whether it can be used again, as long as it `fits`
            part is None
            and in_place
            and not self._made
            and PLAIN.issuperset(map(type, chain(gradients, self._tensors)))
        )
        if self.stays:
            self._laid_out = []  # they are the parameters' own, and end with these
            self._note(gradients)

    def _gather(self, dtype: torch.dtype) -> None:
        optimizer, store = self._optimizer, self._store
        places = {id(p): n for n, p in enumerate(self._parameters)}
        start = self._part or 0
        for group in optimizer.param_groups:
            for form, shard, parameters in _by_form(group["params"], store):
                weights, beside = [], []
                for parameter in parameters:
                    weight, other = (parameter, None) if store is None or form == "plain" else store.parts(parameter)
                    weights.append(local(weight))
                    if other is not None:
                        beside.append(other)
                chosen = [places[id(p)] for p in parameters]
                states = self._states_of(group, parameters, weights, dtype)
                counters = [self._counters_of(name, parameters, weights[0]) for name in self._update_spec.counters]
                self._calls.append(_Call(group, form, shard, start, chosen, (weights, beside), states, counters))
                start += len(parameters)

    def _states_of(
        self, group: dict[str, Any], parameters: Sequence[nn.Parameter], weights: Sequence[Tensor], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """Return a list for each of the optimizer's states; what it lacks is made as by torch, and noted."""
        if not self._update_spec.has_states(group):
            return [[] for _ in self._update_spec.states]
        lists = []
        for name in self._update_spec.states:
            some = []
            for parameter, weight in zip(parameters, weights, strict=True):
                value = self._optimizer.state.get(parameter, NONE).get(name)
                if type(value) not in KERNEL_TYPES and value is not None:
                    value = local(value)
                if value is None or value.dtype is not dtype or value.stride() != weight.stride():
                    made = torch.zeros_like(weight, dtype=dtype)
                    value = made if value is None else made.copy_(value)
                    self._made.append((parameter, name, sharded_like(parameter, value)))
                some.append(value)
            lists.append(some)
        return lists

    def _counters_of(self, name: str, parameters: Sequence[nn.Parameter], beside: Tensor) -> list[Tensor]:
        some = []
        for parameter in parameters:
            value = self._optimizer.state.get(parameter, NONE).get(name)
            if value is None:
                made = torch.full((), self._update_spec.counters[name], dtype=torch.float32, device=beside.device)
            else:
                made = value.to(beside.device, torch.float32)
            if made is not value:
                self._made.append((parameter, name, made))
            some.append(made)
        return some

    @torch.no_grad()
    def _lay_out(self, gradients: list[Tensor]) -> list[list[Tensor]]:
        """Return the gradients of each call, this rank's part of them, in the memory layout of the weights."""
        return [
            [_like(local(gradients[n]), weight) for n, weight in zip(call.chosen, call.values[0], strict=True)]
            for call in self._calls
        ]

    def _note(self, gradients: list[Tensor]) -> None:
        groups, parameters = self._optimizer.param_groups, self._parameters
        self._groups, self._lengths = list(groups), [len(group["params"]) for group in groups]
        self._generation = 0 if self._store is None else self._store.generation
        self._states = self._states_now()
        self._addresses = [*map(_address, self._tensors)]
        self._strided = [n for n, p in enumerate(parameters) if not p.is_contiguous()]
        self._others = [n for n, p in enumerate(parameters) if p.is_contiguous()]
        self._strides = [parameters[n].stride() for n in self._strided]
        self._columns = Columns(gradients)
        self._kernels = native_kernels(parameters[0])
        for call in self._calls if self._kernels is not None else ():
            call.packed = Packed(*call.values, call.states, call.counters, [gradients[n] for n in call.chosen])

    def _states_now(self) -> list[Any]:
        states = self._optimizer.state.values()
        return [*states, *chain.from_iterable(map(dict.values, states))]

    def fits(self, parameters: Sequence[nn.Parameter], gradients: list[Tensor]) -> bool:
        """Return whether an update of `parameters`, which have these gradients, is of the tensors gathered before."""
        groups, store = self._optimizer.param_groups, self._store
        if not (
            self.stays
            and same(parameters, self._parameters)
            and same(groups, self._groups)
            and [len(group["params"]) for group in groups] == self._lengths
            and same(self._states_now(), self._states)
            and PLAIN.issuperset(map(type, gradients))
            and self._lie_as_weights(gradients)
            and self._columns.take(gradients)
        ):
            return False
        if store is not None:
            store.take_over(self._low)
            if store.generation != self._generation:
                return False
        return [*map(_address, self._tensors)] == self._addresses

    def _lie_as_weights(self, gradients: list[Tensor]) -> bool:
        if not self._strided:
            return all(map(Tensor.is_contiguous, gradients))
        strides = [gradients[n].stride() for n in self._strided]
        return strides == self._strides and all(gradients[n].is_contiguous() for n in self._others)

    def _direct(self) -> Kernels | None:
        """Return the native kernels if they can be called without torch's dispatcher: nothing watches it."""
        return None if len_torch_dispatch_stack() or profiler_enabled() else self._kernels

    def check(self, gradients: list[Tensor], divisor: Tensor | None, clip_norm: float | None) -> GradientCheck:
        """Read the gradients: `check_gradients`."""
        kernels = self._direct()
        if kernels is None:
            return check_gradients(gradients, divisor, clip_norm)
        return GradientCheck(*kernels.check(self._columns, divisor, clip_norm))

    def write(self, factor: Tensor, bad: Tensor) -> None:
        """Write weights, states and step counts from gradients times `factor`, unless `bad`; waits for nothing."""
        optimizer, store, kernels = self._optimizer, self._store, self._direct()
        spec = self._update_spec
        for parameter, state, value in self._made:
            optimizer.state[parameter][state] = value
        laid_out = [] if kernels is not None else self._laid_out or self._lay_out([*map(_grad, self._parameters)])
        for n, call in enumerate(self._calls):
            rate = call.group["lr"]
            tensor = rate if isinstance(rate, Tensor) and rate.device == factor.device else None
            number = 0.0 if tensor is not None else float(rate)
            bits = None if self._draws is None else self._draws.on(factor.device, call.shard)
            given = (factor, bad, bits, call.start, call.form, tensor, number, *_options(spec.keys, call.group))
            if kernels is None or call.packed is None:
                with torch.no_grad():
                    ops.UPDATES[spec.name](*call.tensors(), laid_out[n], *given)
            else:
                call.packed.take(self._columns, call.chosen)
                kernels.update_packed(spec.name, call.packed, *given)
        increment_version(self._values)  # of states only `undo` reads versions, where `optimizer.step()` writes them
        if self._draws is not None and self._part is None:
            self._draws.advance(factor.device, ~bad)
        if store is not None:
            store.stepped(self._low)
        if self._unkept:
            UnkeptWeights.stepped(self._unkept)
        setattr(optimizer, STEPPED, True)
        torch.clear_autocast_cache()  # low copies of weights in it, if a region is open around the step, are stale


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _by_form(
    parameters: Sequence[nn.Parameter], store: WeightStore | None
) -> list[tuple[str, int, list[nn.Parameter]]]:
    """Return (form, shard, parameters) as in `_Call` of those that have gradients, those with values behind first."""
    able = [p for p in parameters if p.grad is not None]
    if store is None:
        lists = [("plain", able)]
    else:
        lists = [(store.form, [p for p in able if p in store]), ("plain", [p for p in able if p not in store])]
    found: dict[tuple[str, Any], list[nn.Parameter]] = {}  # in an order that all ranks share: it numbers random bits
    for form, some in lists:
        for parameter in some:
            found.setdefault((form, split_of(parameter)), []).append(parameter)
    return [(form, shard_of(some[0]), some) for (form, _), some in found.items()]


def _like(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return `gradient` with the strides of `weight`; autograd's have them already, but for rare layouts."""
    if gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous()):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _options(keys: Sequence[str], group: Mapping[str, Any]) -> list[Any]:
    """Return the values of `OptimizerSpec.keys` in a group; one that older torch does not have is off."""
    values = []
    for key in keys:
        value = group.get(key, False)
        if key == "betas":
            values += value
        else:
            values.append(value)
    return values
