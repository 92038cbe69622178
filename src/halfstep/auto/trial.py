"""Trials: training steps on a user's own model that are taken back bit for bit.

In: model, optimizer and what the steps are built with. Out: the seconds of a step.

Note [taken back]: parameters, buffers and optimizer state are replaced by copies for the time of a trial, so that their
own memory is never written to, and the own ones return afterwards. So do gradients, the modules' attributes with the
lists and dicts among them, the optimizer's groups and attributes, generators, what `loss_fn` changes in other modules
that it calls (their buffers and gradients), and what binds the policy. A trial gets a copy of the batch. What `loss_fn`
changes elsewhere is not known here.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from halfstep.accelerators import default_generators, empty_cache
from halfstep.auto.race import Unfit
from halfstep.binding.construct import unbuilt
from halfstep.events import StepResult
from halfstep.kernels.pages import keep_pages
from halfstep.step.parts.record import generators, generators_of
from halfstep.trees import map_tensors
from halfstep.update.updater import Deferral

__all__ = ["Ground", "Trial"]

CONTAINERS = (dict, OrderedDict, list, set, deque)
WARM_UP = 0.01  # seconds of steps after the first, in which memory, optimizer state and lists of tensors are made
LONG = 0.25  # seconds: after a first step that is longer the second one is timed
TIMED = 0.05  # seconds of timed steps at each visit
MOST = 40  # of them
PATIENCE = 24  # steps: a loss scale of 2**24 is at 1 by then


class Ground:
    """What trials change, and how it returns.

    Args:
        model: not prepared.
        optimizer: over its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._modules = list(model.modules())
        self._attributes = [(vars(module), dict(vars(module))) for module in self._modules]
        held: list[Any] = [value for values, _ in self._attributes for value in values.values()]
        self._containers = [(value, value.copy()) for value in held if type(value) in CONTAINERS]
        found = [
            *held,
            *(one for value, _ in self._containers if type(value) in CONTAINERS[:2] for one in value.values()),
        ]
        tensors = {id(t): t for t in found if isinstance(t, Tensor) and t.grad_fn is None and not t.is_inference()}
        self._tensors = [(tensor, tensor.data) for tensor in tensors.values()]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._state = dict(optimizer.state)
        self._own = dict(vars(optimizer))
        self._unbuilt = unbuilt(model, optimizer)
        own = [generator for module in self._modules for generator in generators_of(module)]
        self._generators = generators([*own, *default_generators()])
        self._others = Others(self._modules)
        self.unwatched = True  # until the first step; later ones call the same modules

    @contextmanager
    def returning(self, *, copied: bool = True) -> Iterator[None]:
        """Return to what there was when the block ends; signals wait meanwhile.

        Args:
            copied: whether the block is given copies, and may write into parameters, buffers and states.
        """
        deferral = Deferral()
        try:
            if copied:
                with deferral:
                    self._copy()
            yield
        finally:
            with deferral:
                self.restore()

    def _copy(self) -> None:
        for (tensor, _), copy in zip(self._tensors, copies(own for _, own in self._tensors), strict=True):
            tensor.data = copy
        for parameter, _ in self._gradients:
            parameter.grad = None
        for key, state in self._state.items():
            self.optimizer.state[key] = None if state is None else _cloned(dict(state))
        for values in (vars(self.optimizer), *self.optimizer.param_groups):
            for name, value in values.items():
                if isinstance(value, Tensor):
                    values[name] = value.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Return to what there was."""
        for parameter, _ in self._gradients:
            parameter.grad = None  # of a low parameter, which the fp32 one could not have
        self._unbuilt()
        for values, before in self._attributes:
            values.clear()
            values.update(before)
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for tensor, own in self._tensors:
            tensor.data = own
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        vars(self.optimizer).clear()
        vars(self.optimizer).update(self._own)
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)
        self._others.restore()
        self._generators()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note other modules that are called in the block."""
        handle = register_module_forward_pre_hook(self._others)
        try:
            yield
        finally:
            handle.remove()
        self.unwatched = False

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class Others:
    """Modules besides the model that a loss function calls: their buffers and gradients, before they are first called.

    Args:
        known: modules that are looked after elsewhere.
    """

    def __init__(self, known: Iterable[nn.Module]) -> None:
        self._known = {id(module): module for module in known}
        self._buffers: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._values: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note a module that is about to be called."""
        for part in module.modules():
            if id(part) in self._known:
                continue
            self._known[id(part)] = part
            self._buffers.append((part._buffers, dict(part._buffers)))
            held = [t for t in part._buffers.values() if t is not None]
            for parameter in part._parameters.values():
                if parameter is not None:
                    self._gradients.append((parameter, parameter.grad))
                    held += [] if parameter.grad is None else [parameter.grad]
            self._values += [(tensor, tensor.detach().clone()) for tensor in held if not tensor.is_inference()]

    def restore(self) -> None:
        """Give them their values back, in place."""
        for buffers, before in self._buffers:
            buffers.update(before)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for tensor, value in self._values:
            tensor.copy_(value)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of tensors; those that share memory share it as copies too, and strides stay."""
    storages: dict[int, Any] = {}
    made = []
    for tensor in tensors:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
        if not plain or tensor.is_conj() or tensor.is_neg():
            made.append(tensor.clone())
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.append(copy.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()))
    return made


def _cloned(tree: Any) -> Any:
    """Return a tree with copies of its tensors, which take gradients as its own do and have no history."""
    return map_tensors(tree, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def _out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is a lack of memory; torch raises a plain RuntimeError on a CPU."""
    words = "out of memory", "can't allocate memory"
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


class Trial:
    """One candidate: complete training steps under a policy.

    Args:
        ground: what is trained.
        build: makes the training step, with a loss scaler of before, or None for its own.
        batch: positional and named arguments of a micro-batch.
        owner: as long as it lives, malloc keeps the memory of steps.
        clock: returns seconds.

    Attributes:
        compiled: the compiled loss function, if the step has one; it stays from visit to visit.
        first: seconds of the first step of all, in which what compiles compiles.
        seconds: the last time that was measured.
        calls: how often `loss_fn` was called.
    """

    def __init__(
        self,
        ground: Ground,
        build: Callable[[Any], Any],
        batch: tuple[tuple[Any, ...], Mapping[str, Any]],
        owner: object,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ground, self._build, self._batch, self._owner, self._clock = ground, build, batch, owner, clock
        self._scaler: Any = None
        self.compiled: Any = None
        self.first: float | None = None
        self.seconds, self.calls = math.nan, 0

    def visit(self) -> float:
        """Return the seconds of one step, the lower quartile of some; nothing has changed afterwards.

        Raises:
            Unfit: the first step was not finite, or memory was not enough.
        """
        try:
            with self._ground.returning():
                self.seconds = self._timed()
        except Exception as error:
            if not _out_of_memory(error):
                raise
            problem = f"out of memory ({str(error).strip().splitlines()[0] if str(error) else type(error).__name__})"
        else:
            return self.seconds
        if self._ground.device.type != "cpu":  # the error is gone, and with it what its frames refer to
            empty_cache(self._ground.device.type)
        raise Unfit(problem)

    def _timed(self) -> float:
        step = self._build(self._scaler)
        if self.compiled is None:
            self.compiled = step._compiled
        else:
            step._compiled = self.compiled
        batch, named = _cloned(self._batch)
        if self._ground.unwatched:
            step._compiled = None  # guards of compiled code would notice the hook
            with self._ground.watching():
                self._step(step, batch, named, check=True)
            step._compiled = self.compiled
        taken = self._step(step, batch, named, check=self.first is None)
        if self.first is None:
            self.first = taken
            taken = self._step(step, batch, named)
        if step.scaler.is_enabled():
            self._scaler = step.scaler
        if self._ground.device.type == "cpu":
            keep_pages(self._owner)
        warm = WARM_UP if taken < LONG else 0.0
        while warm > 0.0:
            warm -= self._step(step, batch, named)
        times = [self._step(step, batch, named)]
        while len(times) < MOST and sum(times) < TIMED:
            times.append(self._step(step, batch, named))
        return sorted(times)[len(times) // 4]  # what disturbs some of a few short steps is not theirs

    def _step(self, step: Any, batch: Any, named: Any, *, check: bool = False) -> float:
        """Return the seconds of one training step, all micro-batches of it.

        Raises:
            Unfit: it is not finite, with `check`, also after the loss scale has come down.
        """
        for _ in range(PATIENCE if check else 1):
            self._ground.wait()
            begun = self._clock()
            results: list[StepResult] = [step(*batch, **named) for _ in range(step.accumulate)]
            self._ground.wait()
            taken = self._clock() - begun
            self.calls += step.accumulate
            if not check:
                return taken
            losses = [float(result.loss) for result in results]
            if all(map(math.isfinite, losses)) and not bool(results[-1].skipped):
                return taken
            if not step.scaler.is_enabled() or not all(map(math.isfinite, losses)):
                break
        wrong = [loss for loss in losses if not math.isfinite(loss)]
        raise Unfit(f"its first step is not finite (loss {wrong[0]})" if wrong else "its gradients are not finite")
