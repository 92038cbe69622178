"""Trace: train one step of a task under a policy and return what its operators, weights and optimizer did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.lint.tracing.calls import HostRead, StepSink, TracedCall
from halfstep.advise.lint.tracing.functions import GraphFunction, functions_of
from halfstep.formats import LOW_DTYPES
from halfstep.lens import Tracer
from halfstep.tasks import Task
from halfstep.tasks.machine import generators_kept
from halfstep.trees import tensors

__all__ = ["Trace", "Weight", "trace_step"]

SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter or buffer of the model.

    Attributes:
        name: dotted name.
        trained: whether it requires gradients; no buffer does.
        stepped: whether the optimizer has it.
        made: dtype in which the task made it.
        stored: dtype in which it is stored while the policy is in force.
        precise: whether fp32 values are kept of it: it is stored in fp32, or a strategy keeps what the format lacks.
        gradient: whether a gradient arrived.
        moved: whether the step changed any of its bits.
        unmoved: of the elements with a gradient other than 0, the share that the step left as they were; -1 if unknown.
    """

    name: str
    trained: bool
    stepped: bool
    made: torch.dtype
    stored: torch.dtype
    precise: bool
    gradient: bool
    moved: bool
    unmoved: float


@dataclass(kw_only=True, slots=True)
class Trace:
    """One traced step.

    Attributes:
        task: what was trained.
        policy: under which policy, with nothing "auto" left if the step could be prepared.
        weights: parameters and buffers; those of a model that could not be prepared are known in part.
        foreign: what the optimizer steps and the model does not have, in words.
        optimizer: its class.
        groups: the options of its groups, with the names of their parameters under "names".
        generic: why the update went through ``optimizer.step()``; "" if halfstep's operators made it in fp32.
        calls: operators of forward pass and loss.
        origin: returns the identity of what a tensor is a view or a cast of.
        reads: where the host waited.
        functions: autograd Functions of the user.
        loss: dtype of what loss_fn returned; None if it did not return.
        loss_finite: whether it was finite.
        rules: operator -> its rule under the policy; others run in the formats of their inputs.
        names: identity of a parameter or buffer -> its name.
        differs: what is different when the same step is made again; "" if nothing is.
        problem: the exception that ended the step, None if it ran.
    """

    task: Task
    policy: hs.Policy
    weights: tuple[Weight, ...] = ()
    foreign: tuple[str, ...] = ()
    optimizer: str = ""
    groups: tuple[Mapping[str, Any], ...] = ()
    generic: str = ""
    calls: tuple[TracedCall, ...] = ()
    origin: Callable[[Tensor], int] = id
    reads: tuple[HostRead, ...] = ()
    functions: tuple[GraphFunction, ...] = ()
    loss: torch.dtype | None = None
    loss_finite: bool = False
    rules: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    differs: str = ""
    problem: Exception | None = None


def trace_step(task: Task, policy: hs.Policy | str = "mixed", device: str = "cpu") -> Trace:
    """Train the first step of `task` twice from the same start and return what the first one did.

    Generators of random numbers go on as if it had not run. An error of the task is in `Trace.problem`.

    Args:
        task: makes its own model, optimizer and batch.
        policy: preset name or Policy.
        device: where to train.
    """
    trace = Trace(task=task, policy=hs.Policy.of(policy))
    first = _Run(task, trace.policy, device)
    with generators_kept():
        try:
            first.make()
            first.describe(trace)  # before a step may refuse the optimizer
            first.step(trace)
            again = _Run(task, trace.policy, device)
            again.make()
            trace.differs = first.differs(again)
        except Exception as error:  # the task's own: it is what the trace shows
            trace.problem = error
        finally:
            first.close(trace)
    return trace


class _Run:
    """One step of a task."""

    def __init__(self, task: Task, policy: hs.Policy, device: str) -> None:
        self.task, self.policy, self.device = task, policy, device
        self.loss: Tensor | None = None
        self.graph: Any = None
        self.sink: StepSink | None = None
        self.gradients: dict[str, Tensor] = {}

    def make(self) -> None:
        torch.manual_seed(SEED)
        self.model: nn.Module = self.task.model().to(self.device)
        self.optimizer: Optimizer = self.task.optimizer(self.model)
        self.batch = self.task.batch_on(self.device, SEED, 0)
        self.start = {name: t.detach().clone() for name, t in _state(self.model).items()}

    def describe(self, trace: Trace, low: frozenset[str] = frozenset()) -> None:
        """Write down optimizer and weights, `low` being those that the policy lowers."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        trace.optimizer = type(self.optimizer).__name__
        trace.foreign = tuple(
            f"parameter {i} of group {g}, shape {tuple(p.shape)}"
            for g, group in enumerate(groups)
            for i, p in enumerate(group["params"])
            if id(p) not in names
        )
        trace.groups = tuple(
            {k: v for k, v in group.items() if k != "params"}
            | {"names": [names.get(id(p), "") for p in group["params"]]}
            for group in groups
        )
        trace.weights = self._weights(trace, low)

    def _weights(self, trace: Trace, low: frozenset[str]) -> tuple[Weight, ...]:
        """Return what is known of parameters and buffers; `low` are those that the policy lowers."""
        stepped = {name for group in trace.groups for name in group["names"]}
        found = []
        for name, tensor in _state(self.model).items():
            made, gradient = self.start[name], self.gradients.get(name)
            still = made.to(tensor.dtype) == tensor.detach() if made.shape == tensor.shape else torch.tensor(False)
            known = gradient is not None and gradient.shape == still.shape and bool(gradient.any())
            found.append(
                Weight(
                    name=name,
                    trained=tensor.requires_grad,
                    stepped=name in stepped,
                    made=made.dtype,
                    stored=tensor.dtype,
                    precise=tensor.dtype not in LOW_DTYPES or (name in low and trace.policy.master != "none"),
                    gradient=gradient is not None,
                    moved=not bool(still.all()),
                    unmoved=float(still[gradient].double().mean()) if known else -1.0,
                )
            )
        return tuple(found)

    def step(self, trace: Trace | None = None) -> None:
        """Train the step; with a `trace`, watch it."""
        plan = hs.resolve(self.policy, self.model)
        low = frozenset(name for p in plan.parameters if p.low for name in (p.name, *p.aliases))
        if trace is not None:
            self.sink = StepSink()
            trace.rules = {op: decision.rule for op, decision in plan.operators}
        made = hs.TrainStep(
            self.model, self.optimizer, self._loss_fn, policy=self.policy, clip_norm=self.task.clip_norm, blackbox=False
        )
        if trace is None:
            made(*self.batch)
            return
        trace.policy = made.policy
        trace.names = {id(tensor): name for name, tensor in _state(self.model).items()}
        hooks = [p.register_hook(self._arrive(name)) for name, p in self.model.named_parameters() if p.requires_grad]
        skipped = bool(made(*self.batch).host().skipped)
        for hook in hooks:
            hook.remove()
        trace.generic = made.generic
        if skipped:  # weights stayed because the step was skipped
            self.gradients = {name: torch.zeros_like(g) for name, g in self.gradients.items()}
        self.describe(trace, low)  # again: the step has chosen torch's fused form of the optimizer where it suits

    def _arrive(self, name: str) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            if gradient.layout is torch.strided:
                self.gradients[name] = gradient.detach() != 0

        return arrive

    def _loss_fn(self, model: nn.Module, *batch: Any) -> Any:
        if self.sink is None:
            returned = self.task.loss_fn(model, *batch)
        else:
            with Tracer(self.sink, self.model):
                returned = self.task.loss_fn(model, *batch)
        loss = returned[0] if isinstance(returned, tuple) and returned else returned
        if isinstance(loss, Tensor):
            self.loss = loss.detach().clone()
            self.graph = functions_of(loss) if self.sink is not None else ()
        return returned

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

    def close(self, trace: Trace) -> None:
        """Hand over what was watched, also of a step that failed."""
        if self.sink is None:
            return
        trace.calls, trace.reads = tuple(self.sink.calls), tuple(self.sink.reads)
        trace.origin = self.sink.origin
        trace.functions = tuple(self.graph or ())
        if self.loss is not None:
            trace.loss, trace.loss_finite = self.loss.dtype, bool(torch.isfinite(self.loss).all())


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and floating buffers by name."""
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
