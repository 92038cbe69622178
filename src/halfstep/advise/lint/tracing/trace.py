"""Trace: train one step of a task under a policy and return what its operators, weights and optimizer did."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.lint.rule import Hit
from halfstep.advise.lint.tracing.calls import StepSink, TracedCall
from halfstep.formats import LOW_DTYPES
from halfstep.lens import Tracer
from halfstep.tasks import Task
from halfstep.tasks.machine import generators_kept
from halfstep.trees import tensors

SEED = 0


def place_of(target: Any, what: str) -> Hit:
    """Return a hit where a function is defined, or a method of a class; without a place if that is not known."""
    while isinstance(target, partial):
        target = target.func
    if isinstance(target, type):
        target = next((vars(target)[name] for name in ("forward", "__init__") if name in vars(target)), target)
    code = getattr(inspect.unwrap(getattr(target, "__func__", target)), "__code__", None)
    return Hit(code.co_firstlineno, what, code.co_filename) if code is not None else Hit(0, what)


def _functions_of(loss: Tensor) -> dict[str, tuple[Hit, bool]]:
    """Return the user's autograd Functions without a rule in the graph of `loss`: name -> (place, has a low output)."""
    found: dict[str, tuple[Hit, bool]] = {}
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        made = getattr(node, "_forward_cls", None)
        if made is None or made.__module__.startswith(("torch.", "halfstep.")):
            continue
        # custom_fwd of torch.amp, or hs.operator, gives its forward a rule for formats
        if not (hasattr(node, "_fwd_used_autocast") or hasattr(node, "halfstep_formats")):
            name = made.__name__
            low = any(meta.dtype in LOW_DTYPES for meta in getattr(node, "_input_metadata", ()))
            found[name] = place_of(made, name), low or (name in found and found[name][1])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter or floating buffer of the model."""

    name: str
    trained: bool  # requires gradients; no buffer does
    stepped: bool  # the optimizer has it
    made: torch.dtype  # by the task
    stored: torch.dtype  # while the policy is in force
    precise: bool  # it is stored in fp32, or a strategy keeps what its format lacks
    gradient: bool  # a gradient arrived
    moved: bool  # the step changed one of its bits
    unmoved: float  # share of the elements with a gradient that the step left as they were; -1 if unknown


@dataclass(kw_only=True, slots=True)
class Trace:
    """One traced step; what comes behind an error is not known."""

    task: Task
    policy: hs.Policy  # with nothing "auto" left if the step could be prepared
    weights: tuple[Weight, ...] = ()
    foreign: tuple[str, ...] = ()  # what the optimizer steps and the model does not have, in words
    optimizer: str = ""  # its class
    groups: tuple[Mapping[str, Any], ...] = ()  # of the optimizer, with the names of their parameters under "names"
    generic: str = ""  # why the update went through optimizer.step(); "" if halfstep's operators made it in fp32
    calls: list[TracedCall]
    origin: Callable[[Tensor], int]  # the identity of what a tensor is a view or a cast of
    reads: list[tuple[str, str, int]]  # where the host waited: function, file, line
    functions: Mapping[str, tuple[Hit, bool]] = field(default_factory=dict)  # see `_functions_of`
    loss: torch.dtype | None = None
    loss_finite: bool = False
    rules: Mapping[str, str] = field(default_factory=dict)  # of operators; others run in the formats of their inputs
    names: Mapping[int, str] = field(default_factory=dict)  # identity of a parameter or buffer -> its name
    differs: str = ""  # what is different when the same step is made again
    problem: Exception | None = None  # of the task


def trace_step(task: Task, policy: hs.Policy) -> Trace:
    """Train the first step of `task` twice from the same start, on the CPU, and return what the first one did."""
    sink = StepSink()
    trace = Trace(task=task, policy=policy, calls=sink.calls, reads=sink.reads, origin=sink.origin)
    with generators_kept():
        try:
            first = _Run(task, policy)
            first.describe(trace)  # before a step may refuse the optimizer
            first.step(trace, sink)
            trace.differs = first.differs(_Run(task, trace.policy))
        except Exception as error:  # the task's own: it is what the trace shows
            trace.problem = error
    return trace


class _Run:
    def __init__(self, task: Task, policy: hs.Policy) -> None:
        self.task, self.policy = task, policy
        self.loss: Tensor | None = None
        self.gradients: dict[str, Tensor] = {}
        torch.manual_seed(SEED)
        self.model: nn.Module = task.model().to("cpu")
        self.optimizer: Optimizer = task.optimizer(self.model)
        self.batch = task.batch_on("cpu", SEED, 0)
        self.start = {name: t.detach().clone() for name, t in _state(self.model).items()}

    def describe(self, trace: Trace, low: frozenset[str] = frozenset()) -> None:
        """Write down optimizer and weights, `low` being those that the policy lowers."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        trace.optimizer = type(self.optimizer).__name__
        every = [
            (f"parameter {i} of group {g}", p) for g, one in enumerate(groups) for i, p in enumerate(one["params"])
        ]
        trace.foreign = tuple(f"{where}, shape {tuple(p.shape)}" for where, p in every if id(p) not in names)
        trace.groups = tuple(group | {"names": [names.get(id(p), "") for p in group["params"]]} for group in groups)
        stepped = {name for group in trace.groups for name in group["names"]}
        found = []
        for name, tensor in _state(self.model).items():
            made, gradient = self.start[name], self.gradients.get(name)
            still = made.to(tensor.dtype) == tensor.detach() if made.shape == tensor.shape else torch.tensor(False)
            known = gradient is not None and gradient.shape == still.shape and bool(gradient.any())
            precise = tensor.dtype not in LOW_DTYPES or (name in low and trace.policy.master != "none")
            unmoved = float(still[gradient].double().mean()) if known else -1.0
            weight = Weight(
                name=name, trained=tensor.requires_grad, stepped=name in stepped, made=made.dtype, stored=tensor.dtype,
                precise=precise, gradient=gradient is not None, moved=not bool(still.all()), unmoved=unmoved,
            )  # fmt: skip
            found.append(weight)
        trace.weights = tuple(found)

    def step(self, trace: Trace | None = None, sink: StepSink | None = None) -> None:
        """Train the step; with a `trace`, watch it by the `sink`."""

        def loss_fn(model: nn.Module, *batch: Any) -> Any:
            with Tracer(sink, self.model) if sink is not None else nullcontext():
                returned = self.task.loss_fn(model, *batch)
            loss = returned[0] if isinstance(returned, tuple) and returned else returned
            if isinstance(loss, Tensor):
                self.loss = loss.detach().clone()
                if trace is not None:
                    trace.functions, trace.loss = _functions_of(loss), loss.dtype
                    trace.loss_finite = bool(torch.isfinite(self.loss).all())
            return returned

        plan = hs.resolve(self.policy, self.model)
        if trace is not None:
            trace.rules = {op: decision.rule for op, decision in plan.operators}
        options: Any = {"policy": self.policy, "clip_norm": self.task.clip_norm, "blackbox": False}
        made = hs.TrainStep(self.model, self.optimizer, loss_fn, **options)
        if trace is None:
            made(*self.batch)
            return
        trace.policy = made.policy
        trace.names = {id(tensor): name for name, tensor in _state(self.model).items()}
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        hooks = [p.register_hook(partial(self._arrived, name)) for name, p in trained]
        skipped = bool(made(*self.batch).host().skipped)
        for hook in hooks:
            hook.remove()
        trace.generic = made.generic
        if skipped:  # weights stayed because the step was skipped
            self.gradients = {name: torch.zeros_like(g) for name, g in self.gradients.items()}
        # again: the step has chosen torch's fused form of the optimizer where it suits
        self.describe(trace, frozenset(name for p in plan.parameters if p.low for name in (p.name, *p.aliases)))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            self.gradients[name] = gradient.detach() != 0

    def differs(self, again: _Run) -> str:
        """Return what of the same step is different in another run that was made and not stepped; "" if nothing is."""
        for name, value in self.start.items():
            if name not in again.start or not _same(value, again.start[name]):
                return f"weight {name!r} of a second model"
        mine, other = list(tensors(self.batch)), list(tensors(again.batch))
        if len(mine) != len(other) or not all(map(_same, mine, other)):
            return f"batches({SEED}, 0), called a second time,"
        again.step()
        if self.loss is not None and again.loss is not None and not _same(self.loss, again.loss):
            return f"the loss of the same weights, batch and seed ({float(self.loss):.9g} and {float(again.loss):.9g})"
        return ""


def _state(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
