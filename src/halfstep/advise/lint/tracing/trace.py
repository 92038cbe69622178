"""Trace: train one step of a task under a policy and return what its operators, weights and optimizer did.

Of an operator: the place of its call, formats, and what its numbers show.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.lint.rule import Hit
from halfstep.formats import LOW_DTYPES
from halfstep.lens import OperatorCall, OperatorSink, Tracer, user_frame
from halfstep.tasks import Task
from halfstep.tasks.machine import generators_kept
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors

READS = frozenset(  # functions for whose result, or its shape, the host waits
    "item tolist numpy __bool__ __float__ __int__ __index__ is_nonzero nonzero equal allclose masked_select unique "
    "unique_consecutive".split()
)

MAKES = frozenset(
    "to float double half bfloat16 type type_as contiguous clone detach unsqueeze squeeze view reshape expand "
    "expand_as transpose permute flatten __getitem__ __get__ clamp add sub sqrt max".split()
)
"""Functions whose result stands for their argument where a formula of several operators is looked for."""

MASKED_ROW = "masked row"  # a softmax over values that are all -inf
INFINITE_DERIVATIVE = "infinite derivative"  # an argument where the operator's derivative is infinite or nan
NOT_FINITE = "not finite"  # a result with inf or nan from finite arguments
CAST_OVERFLOW = "cast overflow"  # a cast to a low format that makes inf of finite numbers
ROUNDED_INTEGERS = "rounded integers"  # whole numbers, as positions, of which a low format makes different ones equal

SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
BOUNDARY = {"sqrt": 0.0, "acos": 1.0, "asin": 1.0}  # operator -> magnitude at which its derivative is infinite
MASKS = frozenset({"masked_fill", "masked_scatter", "where", "pad", "to", "cat", "stack", "full_like"})
OF_POSITIONS = frozenset({"matmul", "mm", "bmm", "mul", "einsum", "outer", "linear", "to"})
MOST_ELEMENTS = 1 << 22  # elements up to which values are examined: a reading costs a pass over memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """One call of an operator, with its floating tensors as the user's code gives them."""

    op: str
    module: str
    file: str  # of the innermost frame that is neither torch's nor halfstep's, "" and line 0 if there is none
    line: int
    in_place: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    function: str  # the torch.autograd.Function whose forward calls it
    gradients: bool  # autograd records
    shows: frozenset[str]  # what its numbers show: "masked row", ...


class StepSink(OperatorSink):
    """Records the operators of a forward pass before the policy casts; keeps their tensors, as ids must be unique."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self.reads: list[tuple[str, str, int]] = []  # where the host waits for a value: function, file, line
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
        inputs, function = _floating((args, kwargs)), self._function()
        before = _shown(call.op, args, kwargs)
        result = func(*args, **kwargs)
        outputs = _floating(result)
        file, _, line = call.line.rpartition(":")
        shows, gradients = _shown(call.op, args, kwargs, outputs, before), torch.is_grad_enabled()
        traced = TracedCall(
            op=call.op, module=call.module, file=file, line=int(line), in_place=call.in_place, inputs=inputs,
            outputs=outputs, numbers=_numbers(args, kwargs), function=function, gradients=gradients, shows=shows,
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
            file, _, line = self.line().rpartition(":")
            self.reads.append(("x[mask]" if name == "__getitem__" else name or op, file, int(line)))
        if not isinstance(result, Tensor):
            return
        self._kept.append(result)
        if (name in MAKES or op in MAKES) and args and isinstance(args[0], Tensor) and result is not args[0]:
            self._kept.append(args[0])
            self._origins[id(result)] = self.origin(args[0])

    def _function(self) -> str:
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


def _shown(
    op: str, args: Any, kwargs: Any, outputs: tuple[Tensor, ...] = (), before: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return what the arguments show, or, given the results and what was found `before`, what the call shows."""
    inputs = _floating((args, kwargs))
    if any(t.numel() > MOST_ELEMENTS for t in (*inputs, *outputs)) or any(t.is_meta for t in inputs):
        return frozenset()
    with DisableTorchFunction(), torch.no_grad():
        if not outputs:
            return frozenset(_of_arguments(op, inputs, args, kwargs))
        return frozenset(_of_results(op, outputs, before))


def _of_arguments(op: str, inputs: tuple[Tensor, ...], args: Any, kwargs: Any) -> Iterator[str]:
    if op in OF_POSITIONS:
        for tensor in tensors((args, kwargs)):
            if not tensor.requires_grad and tensor.layout is torch.strided:
                yield from (f"whole {dtype}" for dtype in _merging(tensor))
    first = inputs[0].detach() if inputs else None
    if first is None or not first.numel():
        return
    if op in SOFTMAXES and first.dim():
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
        if isinstance(dim, int) and bool((first == -math.inf).all(dim).any()):
            yield MASKED_ROW
    power = args[1] if op == "pow" and len(args) > 1 else None
    infinite = op in BOUNDARY and bool((first.abs() == BOUNDARY[op]).any())
    if isinstance(power, float) and 0 < power < 1:
        infinite = bool((first == 0).any())
    if infinite and inputs[0].requires_grad:
        yield INFINITE_DERIVATIVE
    numbers = _numbers(args, kwargs)
    if all(bool(torch.isfinite(t.detach()).all()) for t in inputs) and all(map(math.isfinite, numbers)):
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
    low = outputs[0].dtype in LOW_DTYPES
    yield from before & {MASKED_ROW, INFINITE_DERIVATIVE}
    if "finite" in before and not all(bool(torch.isfinite(t.detach()).all()) for t in outputs):
        if op == "to" and low:
            yield CAST_OVERFLOW
        elif op not in MASKS and any(t.requires_grad for t in outputs):
            yield NOT_FINITE
    if f"whole {outputs[0].dtype}" in before:
        yield ROUNDED_INTEGERS


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
