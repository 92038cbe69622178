"""Snapshot: what a block may change, noted before it, and restored after it.

A snapshot is a list of parts: functions that restore one thing, made by functions that note what it is now.
Two mechanisms are no snapshots: `optimizer_step.Marks` asks torch's version counters whether an optimizer that raised
had written at all, and `statistics.Statistics` restores on the device, by a flag that the host does not wait for.
"""

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from halfstep.accelerators import default_generators
from halfstep.optim import members
from halfstep.torch_private.modules import SCHEDULERS
from halfstep.trees import map_tensors

MAPPINGS = (dict, OrderedDict, defaultdict)
CONTAINERS = (*MAPPINGS, list, set, deque)

GeneratorStates = list[tuple[torch.Generator, Tensor]]


class Snapshot:
    """Parts that were noted together."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Callable[[], None]) -> None:
        self.parts = parts

    def restore(self) -> None:
        """Restore all parts, also if one of them raises."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part)

    @contextmanager
    def returning(self, critical: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Restore all parts at the end of a block."""
        try:
            yield
        finally:
            with nullcontext() if critical is None else critical:
                self.restore()


# ---------------------------------------------------------------------- random generators


def torch_states(own: Iterable[torch.Generator] = ()) -> GeneratorStates:
    """Return the states of torch's generators, and of some besides, without waiting for a device."""
    devices = () if torch.accelerator.current_accelerator() is None else default_generators()
    return [(one, one.get_state()) for one in (torch.default_generator, *devices, *own)]


def put_torch_states(states: GeneratorStates) -> None:
    """Put states that `torch_states` returned back."""
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def same_numbers(states: GeneratorStates | None) -> Iterator[None]:
    """Draw the numbers that follow `states` in a block, and go on as if nothing had been drawn; None: do nothing."""
    now = [] if states is None else torch_states()
    put_torch_states(states or [])
    try:
        yield
    finally:
        put_torch_states(now)


def generators_of(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return the generators that are attributes of `modules`."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, torch.Generator)]


def noted(own: Iterable[torch.Generator] = ()) -> Callable[[], None]:
    """Note the states of the generators of torch, Python and NumPy (9 and 34 microseconds), and of some besides."""
    states, python = torch_states(own), random.getstate()
    numpy = sys.modules.get("numpy.random")  # code that draws from it has imported it
    array = None if numpy is None else numpy.get_state()

    def restore() -> None:
        put_torch_states(states)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(array)

    return restore


# ---------------------------------------------------------------------- attributes and references


def _content(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _put(container: Any, content: list[Any]) -> None:
    """Give a container its items back; nothing is written if they are the same objects in the same order."""
    now = _content(container)
    pairs = [now, content] if not isinstance(container, dict) else [[*chain.from_iterable(x)] for x in (now, content)]
    if len(now) != len(content) or not all(map(is_, *pairs)):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def contents(containers: Iterable[Any], depth: int = 0) -> Callable[[], None]:
    """Note the items of containers by reference, and those of the containers among them down to `depth` levels."""
    found: list[tuple[Any, list[Any]]] = []
    level = list(containers)
    for _ in range(depth + 1):
        found += [(container, _content(container)) for container in level]
        values = (v for one in level for v in (one.values() if isinstance(one, dict) else one))
        level = [value for value in values if type(value) in CONTAINERS]

    def restore() -> None:
        for container, content in found:
            _put(container, content)

    return restore


def attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Note the attributes of modules by reference: their parameters, buffers, children and hooks too."""
    return contents(map(vars, modules), depth=1)


def gradients(parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Note the gradients of parameters by reference."""
    found = [(parameter, parameter.grad) for parameter in parameters]

    def restore() -> None:
        for parameter, gradient in found:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    return restore


def optimizer_state(optimizer: Optimizer) -> Callable[[], None]:
    """Note attributes, hooks, groups and states of an optimizer by reference: torch replaces tensors when it loads."""
    depth = 3  # groups: the list, a group, its parameters; states: all, one's
    return contents(map(vars, members(optimizer)), depth)


def scheduler_state(scheduler: Any, optimizer: Optimizer) -> Callable[[], None]:
    """Note a learning-rate scheduler, also one of several, and the groups whose numbers it sets (2 microseconds)."""
    holders = [scheduler]
    for holder in holders:
        holders += getattr(holder, SCHEDULERS, None) or ()
    groups = optimizer.param_groups
    values: list[dict[str, Any]] = [*(vars(one) for one in holders), *groups]
    found = [(one, one.copy()) for one in values]
    rates = [(rate, rate.detach().clone()) for group in groups if isinstance(rate := group.get("lr"), Tensor)]

    def restore() -> None:
        for container, content in found:
            _put(container, list(content.items()))
        for rate, value in rates:  # schedulers write into tensors
            rate.detach().copy_(value)

    return restore


# ---------------------------------------------------------------------- values


@torch.no_grad()
def put_buffers(kept: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    """Put values of buffers back: in place, unless the buffer has another shape now."""
    for module, name, value in kept:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            module._buffers[name] = value.clone()


class Modules:
    """A part: attributes, generators and buffers (and `gradients`) of some models, and of others that a loss calls."""

    def __init__(self, *models: nn.Module, known: Iterable[nn.Module] = (), gradients: bool = False) -> None:
        self.gradients = gradients
        self._known = {id(module): module for module in known}  # noted elsewhere
        self._parts: list[Callable[[], None]] = []
        self._generators: GeneratorStates = []
        self._values: list[tuple[Tensor, int, Tensor]] = []
        for model in models:
            self.add(model)

    def add(self, model: nn.Module) -> None:
        """Note the modules of `model` that are not noted yet."""
        if id(model) in self._known:
            return
        new = {id(module): module for module in model.modules() if id(module) not in self._known}
        self._known |= new
        self._generators += [(generator, generator.get_state()) for generator in generators_of(new.values())]
        self._parts.append(attributes(new.values()))
        held = [buffer for module in new.values() for buffer in module._buffers.values()]
        if self.gradients:
            own = [p for module in new.values() for p in module.parameters(recurse=False)]
            self._parts.append(gradients(own))
            held += [parameter.grad for parameter in own]
        known = [tensor for tensor in held if tensor is not None and not tensor.is_inference()]
        self._values += [(tensor, tensor._version, tensor.detach().clone()) for tensor in known]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note modules that are called in a block, before their forward pass."""
        handle = register_module_forward_pre_hook(lambda module, args: self.add(module))
        try:
            yield
        finally:
            handle.remove()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of all of them that require a gradient."""
        for module in self._known.values():
            yield from (p for p in module.parameters(recurse=False) if p.requires_grad)

    @torch.no_grad()
    def __call__(self) -> None:
        """Make all of them as they were."""
        for part in self._parts:
            part()
        for tensor, version, value in self._values:
            if tensor._version != version or not torch.equal(tensor, value):
                tensor.copy_(value)
        put_torch_states(self._generators)


class Loan:
    """A part: copies in the place of parameters, buffers and optimizer states, which a block may write to."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        held = [value for module in model.modules() for value in vars(module).values()]
        held += [value for one in held if type(one) in MAPPINGS for value in one.values()]
        tensors = {id(t): t for t in held if isinstance(t, Tensor) and t.grad_fn is None and not t.is_inference()}
        self._tensors = [(tensor, tensor.data) for tensor in tensors.values()]

    def lend(self) -> None:
        """Put copies in their places; gradients are None from now on."""
        lent = copy.deepcopy([own for _, own in self._tensors])  # those that share memory share it as copies too
        for (tensor, _), mine in zip(self._tensors, lent, strict=True):
            tensor.data = mine
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer in members(self.optimizer):
            for key, state in list(optimizer.state.items()):
                optimizer.state[key] = None if state is None else cloned(dict(state))
            for values in (vars(optimizer), *optimizer.param_groups):
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        values[name] = value.clone()

    def __call__(self) -> None:
        """Return to the tensors' own memory."""
        for tensor, own in self._tensors:
            tensor.data = own


def cloned(tree: Any) -> Any:
    """Return a tree with copies of its tensors, which take gradients as its own do and have no history."""
    return map_tensors(tree, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
