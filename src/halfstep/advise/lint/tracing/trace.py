"""Trace: train one step of a task under a policy and record what its operators, weights and optimizer did.

Of an operator: the place of its call, formats, and what its numbers show.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.lint.rule import WORDS, Hit
from halfstep.formats import LOW_DTYPES
from halfstep.lens import OperatorCall, OperatorSink, Tracer, user_frame
from halfstep.tasks import Task
from halfstep.tasks.machine import generators_kept
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors

READS, MAKES = frozenset[str](WORDS["WAITS"]), frozenset[str](WORDS["MAKES"])
MASKED_ROW = "masked row"  # a softmax over values that are all -inf
INFINITE_DERIVATIVE = "infinite derivative"  # an argument where the operator's derivative is infinite or nan
NOT_FINITE = "not finite"  # a result with inf or nan from finite arguments
CAST_OVERFLOW = "cast overflow"  # a cast to a low format that makes inf of finite numbers
ROUNDED_INTEGERS = "rounded integers"  # whole numbers, as positions, of which a low format makes different ones equal
BOUNDARY = {"sqrt": 0.0, "acos": 1.0, "asin": 1.0}  # operator -> magnitude at which its derivative is infinite
MASKS = frozenset({"masked_fill", "masked_scatter", "where", "pad", "to", "cat", "stack", "full_like"})
OF_POSITIONS = frozenset({"matmul", "mm", "bmm", "mul", "einsum", "outer", "linear", "to"})
MOST_ELEMENTS = 1 << 22  # elements up to which values are examined: a reading costs a pass over memory
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall(OperatorCall):
    """One call of an operator, with its floating tensors as the user's code gives them; `line` is "path:12"."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    function: str  # the torch.autograd.Function whose forward calls it
    gradients: bool  # autograd records
    shows: frozenset[str]  # what its numbers show: "masked row", ...


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


class Trace(OperatorSink):
    """One traced step; what comes behind an error is not known.

    It receives the operators of the forward pass before the policy casts, and keeps their tensors, as ids must be
    unique.
    """

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, task: Task, policy: hs.Policy) -> None:
        super().__init__()
        self.task = task
        self.policy = policy  # with nothing "auto" left if the step could be prepared
        self.weights: tuple[Weight, ...] = ()
        self.foreign: tuple[str, ...] = ()  # what the optimizer steps and the model does not have, in words
        self.groups: tuple[Mapping[str, Any], ...] = ()  # of the optimizer; the names of their parameters are "names"
        self.generic = ""  # why the update went through optimizer.step(); "" if halfstep's operators made it in fp32
        self.calls: list[TracedCall] = []
        self.reads: list[tuple[str, str]] = []  # where the host waits for a value: function, "path:12"
        self.functions: Mapping[str, tuple[Hit, bool]] = {}  # see `_functions_of`
        self.loss: Tensor | None = None
        self.rules: Mapping[str, str] = {}  # of operators; others run in the formats of their inputs
        self.names: Mapping[int, str] = {}  # identity of a parameter or buffer -> its name
        self.differs = ""  # what is different when the same step is made again
        self.problem: Exception | None = None  # of the task
        self._gradients: dict[str, Tensor] = {}  # name of a parameter -> where its gradient is not 0
        self._origins: dict[int, int] = {}
        self._kept: list[Any] = []

    def origin(self, tensor: Tensor) -> int:
        """Return the identity of what `tensor` is a view, a cast or a guarded copy of, or its own."""
        return self._origins.get(id(tensor), id(tensor))

    def line(self) -> str:
        """Return "path:12"."""
        frame = user_frame()
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ":0"

    def operator(
        self, call: OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operator and record it."""
        inputs, function = _floating((args, kwargs)), _function()
        before = frozenset(_of_arguments(call.op, inputs, args, kwargs))
        result = func(*args, **kwargs)
        outputs = _floating(result)
        traced = TracedCall(
            module=call.module, op=call.op, nth=call.nth, line=call.line, in_place=call.in_place, inputs=inputs,
            outputs=outputs, numbers=_numbers(args, kwargs), function=function, gradients=torch.is_grad_enabled(),
            shows=frozenset(_of_results(call.op, outputs, before)),
        )  # fmt: skip
        self.calls.append(traced)
        self._follow(call.op, func, args, result)
        return result

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no operator; the host may wait for it."""
        result = func(*args, **kwargs)
        self._follow("", func, args, result)
        return result

    def _follow(self, op: str, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(t.dtype in {torch.bool, torch.uint8} for t in tensors(args[1:]))
        if name in READS or op in READS or by_mask:
            self.reads.append(("x[mask]" if name == "__getitem__" else name or op, self.line()))
        if not isinstance(result, Tensor):
            return
        self._kept.append(result)
        if (name in MAKES or op in MAKES) and args and isinstance(args[0], Tensor) and result is not args[0]:
            self._kept.append(args[0])
            self._origins[id(result)] = self.origin(args[0])

    def build(self) -> None:
        """Make model, optimizer and batch from the seed."""
        torch.manual_seed(SEED)
        self.model = self.task.model().to("cpu")
        self.optimizer = self.task.optimizer(self.model)
        self._batch = self.task.batch_on("cpu", SEED, 0)
        self._start = {name: t.detach().clone() for name, t in _state(self.model).items()}
        self._describe()  # before a step may refuse the optimizer

    def step(self, traced: AbstractContextManager[Any]) -> None:
        """Train the step, with the forward pass in a block that may trace it."""

        def loss_fn(model: nn.Module, *batch: Any) -> Any:
            with traced:
                returned = self.task.loss_fn(model, *batch)
            loss = returned[0] if isinstance(returned, tuple) and returned else returned
            if isinstance(loss, Tensor):
                self.loss, self.functions = loss.detach().clone(), _functions_of(loss)
            return returned

        plan = hs.resolve(self.policy, self.model)
        self.rules = {op: decision.rule for op, decision in plan.operators}
        options: Any = {"policy": self.policy, "clip_norm": self.task.clip_norm, "blackbox": False}
        made = hs.TrainStep(self.model, self.optimizer, loss_fn, **options)
        self.policy = made.policy
        self.names = {id(tensor): name for name, tensor in _state(self.model).items()}
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        hooks = [p.register_hook(partial(self._arrived, name)) for name, p in trained]
        skipped = bool(made(*self._batch).host().skipped)
        for hook in hooks:
            hook.remove()
        self.generic = made.generic
        if skipped:  # weights stayed because the step was skipped
            self._gradients = {name: torch.zeros_like(g) for name, g in self._gradients.items()}
        # again: the step has chosen torch's fused form of the optimizer where it suits
        self._describe(frozenset(name for p in plan.parameters if p.low for name in (p.name, *p.aliases)))

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            self._gradients[name] = gradient.detach() != 0

    def _describe(self, low: frozenset[str] = frozenset()) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = self.optimizer.param_groups
        parts = [(g, i, p) for g, one in enumerate(groups) for i, p in enumerate(one["params"])]
        every = [(f"parameter {i} of group {g}", p) for g, i, p in parts]
        self.foreign = tuple(f"{where}, shape {tuple(p.shape)}" for where, p in every if id(p) not in names)
        self.groups = tuple(group | {"names": [names.get(id(p), "") for p in group["params"]]} for group in groups)
        stepped = {name for group in self.groups for name in group["names"]}
        found = []
        for name, tensor in _state(self.model).items():
            made, gradient = self._start[name], self._gradients.get(name)
            still = made.to(tensor.dtype) == tensor.detach() if made.shape == tensor.shape else torch.tensor(False)
            known = gradient is not None and gradient.shape == still.shape and bool(gradient.any())
            precise = tensor.dtype not in LOW_DTYPES or (name in low and self.policy.master != "none")
            unmoved = float(still[gradient].double().mean()) if known else -1.0
            weight = Weight(
                name=name, trained=tensor.requires_grad, stepped=name in stepped, made=made.dtype, stored=tensor.dtype,
                precise=precise, gradient=gradient is not None, moved=not bool(still.all()), unmoved=unmoved,
            )  # fmt: skip
            found.append(weight)
        self.weights = tuple(found)

    def difference(self, again: Trace) -> str:
        """Train the step `again`, and return what differs from this one, "" if nothing does."""
        for name, value in self._start.items():
            if name not in again._start or not _same(value, again._start[name]):
                return f"weight {name!r} of a second model"
        mine, other = list(tensors(self._batch)), list(tensors(again._batch))
        if len(mine) != len(other) or not all(map(_same, mine, other)):
            return f"batches({SEED}, 0), called a second time,"
        again.step(nullcontext())
        if self.loss is not None and again.loss is not None and not _same(self.loss, again.loss):
            return f"the loss of the same weights, batch and seed ({float(self.loss):.9g} and {float(again.loss):.9g})"
        return ""


def trace_step(task: Task, policy: hs.Policy) -> Trace:
    """Train the first step of `task` twice from the same start, on the CPU, and return what the first one did."""
    trace = Trace(task, policy)
    with generators_kept():
        try:
            trace.build()
            trace.step(Tracer(trace, trace.model))
            again = Trace(task, trace.policy)
            again.build()
            trace.differs = trace.difference(again)
        except Exception as error:  # the task's own: it is what the trace shows
            trace.problem = error
    return trace


def _function() -> str:
    """Return the autograd.Function whose forward runs, by the context that it is given."""
    frame = user_frame()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                return type(context).__name__.removesuffix("Backward")
        frame = frame.f_back
    return ""


def _numbers(args: Any, kwargs: Any) -> tuple[float, ...]:
    return tuple(a for a in (*args, *kwargs.values()) if type(a) is float)


def _floating(tree: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors(tree) if t.is_floating_point() and t.layout is torch.strided)


def _is_read(given: tuple[Tensor, ...]) -> bool:
    return not any(t.is_meta or t.numel() > MOST_ELEMENTS for t in given)


def _finite(given: tuple[Tensor, ...]) -> bool:
    return all(bool(torch.isfinite(t.detach()).all()) for t in given)


def _of_arguments(op: str, inputs: tuple[Tensor, ...], args: Any, kwargs: Any) -> Iterator[str]:
    """Yield what the arguments of a call show, and what makes its results show something."""
    with DisableTorchFunction(), torch.no_grad():
        if op in OF_POSITIONS and _is_read(inputs):
            for tensor in tensors((args, kwargs)):
                if not tensor.requires_grad and tensor.layout is torch.strided:
                    yield from (f"whole {dtype}" for dtype in _merging(tensor))
        first = inputs[0].detach() if inputs and _is_read(inputs) else None
        if first is None or not first.numel():
            return
        if op in {"softmax", "log_softmax", "softmin"} and first.dim():
            dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
            if isinstance(dim, int) and bool((first == -math.inf).all(dim).any()):
                yield MASKED_ROW
        power = args[1] if op == "pow" and len(args) > 1 else None
        infinite = op in BOUNDARY and bool((first.abs() == BOUNDARY[op]).any())
        if isinstance(power, float) and 0 < power < 1:
            infinite = bool((first == 0).any())
        if infinite and inputs[0].requires_grad:
            yield INFINITE_DERIVATIVE
        if _finite(inputs) and all(map(math.isfinite, _numbers(args, kwargs))):
            yield "finite"


def _merging(values: Tensor) -> Iterator[torch.dtype]:
    """Yield the low formats in which different ones of `values`, if they are whole numbers, become equal."""
    if values.dtype in LOW_DTYPES or values.dtype is torch.bool or values.is_complex() or values.numel() < 2:
        return
    wide = values.double()
    if bool(torch.isfinite(wide).all()) and bool((wide == wide.round()).all()):
        different = wide.unique()
        yield from (d for d in LOW_DTYPES if different.to(d).unique().numel() < different.numel())


def _of_results(op: str, outputs: tuple[Tensor, ...], before: frozenset[str]) -> Iterator[str]:
    """Yield what a call shows, given its results and what its arguments showed."""
    if not outputs or not before or not _is_read(outputs):
        return
    yield from before & {MASKED_ROW, INFINITE_DERIVATIVE}
    with DisableTorchFunction(), torch.no_grad():
        if "finite" in before and not _finite(outputs):
            if op == "to" and outputs[0].dtype in LOW_DTYPES:
                yield CAST_OVERFLOW
            elif op not in MASKS and any(t.requires_grad for t in outputs):
                yield NOT_FINITE
    if f"whole {outputs[0].dtype}" in before:
        yield ROUNDED_INTEGERS


def hit_at(line: str, what: str) -> Hit:
    """Return a hit at "path:12"."""
    file, _, number = line.rpartition(":")
    return Hit(int(number), what, file)


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
    waiting: list[Any] = [loss.grad_fn]
    seen = {None, *waiting}
    for node in waiting if loss.requires_grad else ():
        new = dict.fromkeys(each for each, _ in node.next_functions if each not in seen)
        seen |= new.keys()
        waiting += new
        made = getattr(node, "_forward_cls", None)
        # custom_fwd of torch.amp, or hs.operator, gives its forward a rule for formats
        ruled = hasattr(node, "_fwd_used_autocast") or hasattr(node, "halfstep_formats")
        if made is not None and not ruled and not made.__module__.startswith(("torch.", "halfstep.")):
            name = made.__name__
            low = any(meta.dtype in LOW_DTYPES for meta in getattr(node, "_input_metadata", ()))
            found[name] = place_of(made, name), low or (name in found and found[name][1])
    return found


def _state(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
