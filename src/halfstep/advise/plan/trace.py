"""Trace: follow the memory of training steps that run on fake tensors.

`MemorySink` is the sink of a tracer above torch's fake tensors. It receives every kernel, notes the memory of what the
kernel returns in a `Ledger`, with phase and module, and answers the few reads of values that a step itself makes. An
operator costs 0.3 ms of the processor, nearly all of it in torch's fake tensors.

Note [modules in backward]: an operator of the backward pass belongs to the module whose forward made its autograd node.
Nodes are numbered in the order of their creation; the number is noted when an operator runs forward. The backward pass
runs in the calling thread (`set_multithreading_enabled(False)`), so that numbers are unique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.advise.plan.gathered import Gathered
from halfstep.advise.plan.ledger import Block, Ledger
from halfstep.advise.plan.memory import PlanError
from halfstep.advise.plan.values import Values
from halfstep.advise.plan.workspace import KERNELS
from halfstep.lens import Sink, Tracer, user_line
from halfstep.torch_private.autograd import current_autograd_node, current_graph_task_id, get_sequence_nr
from halfstep.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from halfstep.torch_private.operators import schema_of

__all__ = ["MemorySink", "local"]

READ = "aten::_local_scalar_dense"
DEVICE = torch.ops.prim.device.default
CAST = "aten::_to_copy"
COPIES = frozenset({"aten::clone", CAST})
RANKS = frozenset({"fsdp", "c10d", "_c10d_functional"})
"""Namespaces of operators that only sharded models run."""


class MemorySink(Sink):
    """Follows memory while its tracer is open.

    Attributes:
        ledger: what it found.
        values: of the tensors that have known ones.
        phase: set by `begin`; "backward" is found by itself.
        gathered: what sharding allocates and sends.
        after_backward: called between a backward pass and its update.
        weights: blocks of parameters, by id.
        buffers: blocks of buffers, by id.
    """

    def __init__(self, ledger: Ledger, device: str) -> None:
        self.ledger, self.device = ledger, device
        self.values = Values()
        self.phase, self.step = "setup", -1
        self.gathered = Gathered(ledger)
        self.after_backward: Callable[[], object] = lambda: None
        self._kinds: dict[int, str] = {}  # id of a block -> "parameters" or "buffers"
        self._parameters: list[nn.Parameter] = []
        self._made_by: dict[int, str] = {}  # number of an autograd node -> name of its module
        self._cast_from: dict[int, Block] = {}  # id of the block of a gradient -> that of the low one it was cast from
        self._made: list[Block] = []  # blocks made since the outermost module that runs again in backward began

    @contextmanager
    def on(self) -> Iterator[MemorySink]:
        """Follow the block. The backward pass runs in the calling thread."""
        with torch.autograd.set_multithreading_enabled(False), Tracer(self):
            yield self

    def watch(self, model: nn.Module) -> None:
        """Take the names, parameters and buffers of `model`; again after any have been replaced."""
        self.tracer.follow(model)
        self._kinds = {}
        self._parameters = list(model.parameters())
        for kind, tensors in (("parameters", model.parameters()), ("buffers", model.buffers())):
            for tensor in map(local, tensors):
                if (block := self.ledger.of(tensor)) is not None:
                    self._kinds.setdefault(id(block), kind)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Follow a forward pass; what it made and is alive at its end is saved for backward."""
        self.begin("forward")
        first = len(self.ledger.blocks)
        yield
        for block in self.ledger.blocks[first:]:
            if block.alive and not block.part:
                block.part = "saved for backward"
        self.phase = "update"

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.ledger.mark(self.step, phase)

    # ------------------------------------------------------------------ modules

    def entering(self, module: nn.Module) -> None:
        """Begin to note what the outermost module makes."""
        if not self.tracer.running:
            self._made = []

    def left(self, module: nn.Module) -> None:
        """Name what the outermost module has made and keeps: it ran again in the backward pass."""
        if not self.tracer.running and self._made:
            for block in self._made:
                if block.alive and not block.part:
                    block.part = "saved for backward"
            self._made = []

    # ------------------------------------------------------------------ operators

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note the memory it leaves."""
        if func is DEVICE and type(args[0]) is FakeTensor:  # two of three calls: autograd asks for devices
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor out of others: its operators on these come here
        ledger = self.ledger
        self.gathered.settle()
        ledger.operators += 1
        backward, running = current_graph_task_id() >= 0, self.tracer.running
        if backward:
            if self.phase != "backward":
                self.begin("backward")
            if running:
                module = self.tracer.module
            else:
                node = current_autograd_node()
                module = "" if node is None else self._made_by.get(node._sequence_nr(), "")
        else:
            if self.phase == "backward":
                self.begin("update")
                self.after_backward()
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        self._is_gradient(parameter.grad)
            module = self.tracer.module
            if module:
                self._made_by.setdefault(get_sequence_nr() - 1, module)
        name = schema_of(func).name
        for place in _gradients(func):
            for tensor in args[place] if len(args) > place else ():
                self._is_gradient(tensor)
        if name == READ:
            return self._read(func, args[0])
        result = self._run(func, name, args, kwargs)
        if name in KERNELS and self.device == "cpu":
            ledger.passing(KERNELS[name](args, result), args[0].dtype, module, name, self.phase)
        if isinstance(result, Tensor):
            self._note(result, module, name, args, backward)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self._note(item, module, name, args, backward)
        if func.namespace in RANKS:
            self.gathered.note(func, args, kwargs, result, self.step)
        if name.startswith("aten::resize") or name == "aten::set_":
            ledger.resized(args[0])
        return result

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; what needs values gets those that are known."""
        forward = self.phase == "forward"
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            found = self._from_values(func, args, kwargs) if forward else None
            if found is None:
                raise PlanError(
                    f"the result of {name} needs values that depend on the weights ({_line()}), and a plan has "
                    "none; use an operator whose result has a fixed shape, such as torch.where, or plan without it"
                ) from error
            return found
        if forward:
            self.values.follow(func, args, kwargs, result)
        return result

    def _from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator whose shape depends on known values; None if they are not known."""
        if func is torch.ops.aten.index.Tensor and self.values.of(args[0]) is None:
            dense = self.values.dense_index(args)
            return None if dense is None else func(*dense)
        value = self.values.compute(func, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        result = torch.empty_like(value, device=self.device)
        self.values.give(result, value)
        return result

    def _note(self, tensor: Tensor, module: str, name: str, args: tuple[Any, ...], backward: bool) -> None:
        ledger = self.ledger
        block = ledger.note(tensor, module, name, self.phase)
        if block is None:
            return
        if backward and self.tracer.running:
            self._made.append(block)
        elif backward and name == CAST and (source := ledger.of(args[0])) is not None:
            self._cast_from[id(block)] = source
        if name in COPIES and isinstance(args[0], Tensor):
            source = ledger.of(args[0])
            kind = self._kinds.get(id(source))
            if kind == "parameters" and self.step >= 0:
                block.part = "low copies"
            elif kind == "buffers" and self.step >= 0:
                block.part = "buffers"

    def _is_gradient(self, tensor: Tensor) -> None:
        block = self.ledger.of(local(tensor))
        while block is not None and block.part == "":
            block.part = "gradients"
            block = self._cast_from.get(id(block))

    def _read(self, func: Any, tensor: Tensor) -> Any:
        """Answer a read of a value: of a known one, or of the step's flags and counters what a good step has."""
        value = self.values.of(tensor) if self.phase == "forward" else None
        if value is not None and type(value) is not FakeTensor:
            with unset_fake_temporarily():
                return func(value)
        try:
            return func(tensor)
        except DataDependentOutputException as error:
            if self.phase == "forward":
                raise PlanError(
                    f"the model reads a value that depends on weights or random numbers ({_line()}), and a plan "
                    "has none; compute with tensors instead, such as torch.where for `if`"
                ) from error
        one = 0 if tensor.dtype is torch.bool else 1
        return bool(one) if tensor.dtype is torch.bool else float(one) if tensor.is_floating_point() else one


@cache
def _gradients(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that are lists of gradients: of an update that is fused into one operator."""
    return tuple(n for n, argument in enumerate(schema_of(func).arguments) if argument.name in ("gradients", "grads"))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def _line() -> str:
    return user_line() or "in torch"
