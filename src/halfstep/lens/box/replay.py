"""Replay: run kept micro-batches again, exactly, with instruments or without, and leave everything as it was.

Its backward pass returns the gradients of leaves, which changes no ``.grad`` and runs no hook that would step an
optimizer or reduce over ranks; only re-entrant checkpointing needs accumulation into ``.grad``.

`Trace`, the instruments, is the sink of a tracer. It receives operators as the user calls them, with module and line,
and writes both into the `metadata` of the autograd nodes that each call makes. It receives the kernels of the backward
pass too; the metadata of the running node gives the call a kernel belongs to.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from halfstep.cast.rules.recipe import unreported
from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.origins import Call, Origins, Source
from halfstep.lens.calls import (
    RUNS_BACKWARD,
    Site,
    autocasting,
    extremes,
    floats,
    has_storage,
    numbers_of,
    public,
    region_here,
    spelled,
)
from halfstep.lens.tracing import KernelMode, Sink, Tracer, line_of, user_frame
from halfstep.meeting import processes
from halfstep.policy.operators import known
from halfstep.policy.policy import Policy
from halfstep.snapshot import Modules, Snapshot, contents, gradients, noted, put_buffers
from halfstep.step.parts.record import MicroBatch, put_random
from halfstep.torch_private.autograd import current_autograd_node, current_graph_task_id, engine_run_backward
from halfstep.torch_private.modes import DisableTorchFunction, disable_current_modes
from halfstep.trees import graph_of, map_tensors, tensors
from halfstep.update.updater import Deferral

SILENT = frozenset(  # queries and bookkeeping: no result of theirs is a tensor that the program computes with
    "__get__ __set__ __delete__ size stride dim numel shape is_floating_point is_complex element_size data_ptr "
    "storage_offset untyped_storage is_contiguous register_hook requires_grad_ retain_grad item tolist __len__ "
    "__bool__ __float__ __int__ __format__ __repr__ numpy is_same_size get_device type_as_ nelement ndimension "
    "__hash__ __contains__ __iter__ allclose equal is_nonzero".split()
)
OPENED = frozenset({"multi_head_attention_forward"})  # composites of so many operators that a verdict names the part
TAG = "halfstep.site"  # the key of a `Site` in the metadata of autograd nodes
CODES: WeakKeyDictionary[type, CodeType | None] = WeakKeyDictionary()  # custom Function -> the code of its forward
ENGINE = "_engine_run_backward"  # the function of torch that runs the autograd engine


@contextmanager
def _unobserved() -> Iterator[None]:
    """Let the block read values without passing a mode: neither the trace's nor a region's."""
    with DisableTorchFunction(), disable_current_modes():
        yield


@dataclass(eq=False)
class Trace(Sink):
    """The instruments of one replay, and what they have seen."""

    model: nn.Module  # the user's model; names of modules, parameters and buffers are those in it
    loss: Tensor | None = None  # the loss of the replay, if it or a gradient is not finite
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # leaf -> its gradient, of such a replay
    low: torch.dtype | None = None  # the low format of the last region that was on, or None
    region: Policy | None = None  # the policy of the last `hs.autocast` that was on, or None
    # call -> the floats among its arguments, and the format of its result
    numbers: dict[Site, tuple[tuple[float, ...], torch.dtype]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._depth = 0  # functions that are running
        self.origins = Origins()  # where values that are not finite come from
        self._inner: list[Tensor] = []  # results of the kernels of the running function
        self._applied: dict[str, Site] = {}  # custom Function -> where it was applied last
        self._forwards: dict[CodeType, tuple[str, ...]] = {}  # see `_customs`
        self._seen_modules: set[int] = set()
        self._outsiders: list[nn.Module] = []  # modules outside the model, kept alive so that no id is used twice
        self._expect_state(self.model, "")

    @cached_property
    def cause(self) -> tuple[Source, Tensor | None]:
        """Where the values that are not finite come from first, and the leaf whose gradient shows it, or None."""
        assert self.loss is not None
        if not extremes(self.loss)[1]:
            return self.origins.accused(self.loss)[0], None
        found: list[tuple[Source, Tensor]] = []
        for leaf, gradient in self.gradients.items():
            if not extremes(gradient)[1]:
                found += [(source, leaf) for source in self.origins.accused(gradient)]
        return min(found, key=lambda pair: pair[0].rank())

    # ------------------------------------------------------------------ setting up

    def _expect_state(self, module: nn.Module, prefix: str) -> None:
        if id(module) in self._seen_modules:
            return
        self._seen_modules.update(id(m) for m in module.modules())
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in named:
                if not is_lazy(tensor):
                    self.origins.expect(kind, prefix + name, tensor)

    def watching(self) -> Tracer:
        """Return a context that watches what its block runs in this thread."""
        return Tracer(self, self.model)

    def entering(self, module: nn.Module) -> None:
        """Name a module outside the model and its parts by its class; without parts it has the name of its caller."""
        names = self.tracer.names
        if id(module) in names:
            return
        own = type(module).__name__
        self._expect_state(module, own + ".")
        if next(module.children(), None) is None:
            return
        for name, part in module.named_modules():
            names.setdefault(id(part), f"{own}.{name}" if name else own)
        self._outsiders.append(module)

    # ------------------------------------------------------------------ watching

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that the user called, and record what it did to its tensors."""
        op = spelled(func)
        if self._depth or op in SILENT or getattr(func, "__name__", "") in SILENT:
            return func(*args, **kwargs)
        if (op in RUNS_BACKWARD and isinstance(func, FunctionType)) or (op in OPENED and _opens(func)):
            with self.tracer.parts():
                return unreported(func)(*args, **kwargs)
        if devices := autocasting():
            self.low = torch.get_autocast_dtype(devices[0])
            if (region := region_here()) is not None:
                self.region = region.policy
        return self._watched(func, args, kwargs, self._site_of(op))

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel; record it if the backward pass runs it outside of any function."""
        if self._depth:
            result = func(*args, **kwargs)
            self._inner += [t for t in floats(result) if has_storage(t)]
            return result
        node: Any = current_autograd_node()
        if node is None and current_graph_task_id() == -1:
            return func(*args, **kwargs)
        return self._watched(func, args, kwargs, self._site_of_node(node, str(func).split(".")[1]))

    def _site_of(self, op: str) -> Site:
        frame, tracer = user_frame(sys._getframe()), self.tracer  # no local may refer to its own frame: a cycle
        node: Any = current_autograd_node()
        if node is not None and (frame is None or _engine_between(sys._getframe(), frame)):
            return self._site_of_node(node, op)
        self._note_custom(frame)
        module, call = tracer.module, tracer.entry
        if node is not None:  # a custom backward, or a recomputation of checkpointing
            known, recomputed = node.metadata.get(TAG), bool(tracer.running)
            if known is not None and not recomputed:
                return Site(op, known.module, line_of(frame), "backward", known.call)
            return Site(op, module, line_of(frame), "forward" if recomputed else "backward", call)
        return Site(op, module, line_of(frame), "forward", call)

    def _note_custom(self, frame: FrameType | None) -> None:
        """Note where the custom Function whose forward is running, if one is, was applied.

        It is recognised by its code: ``apply`` has no Python frame in torch 2.15.
        No call passes a mode with the autograd node of such a Function. The first argument of a forward without
        setup_context is that node, and is tagged here; the others are tagged when an operator uses their result.
        """
        while frame is not None and not (names := self._customs(frame.f_code)):
            frame = frame.f_back
        if frame is None:
            return
        caller = user_frame(frame.f_back)
        if caller is None or _engine_between(frame, caller):
            return
        module, call = self.tracer.module, self.tracer.entry
        node = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(node, BackwardCFunction):
            names = (type(node).__name__.removesuffix("Backward"),)
        for name in names:
            self._applied[name] = Site(name, module, line_of(caller), "forward", call)
        if isinstance(node, BackwardCFunction):
            node.metadata.setdefault(TAG, self._applied[names[0]])

    def _customs(self, code: CodeType) -> tuple[str, ...]:
        """Return the names of the custom Functions whose forward has this code; () for any other code."""
        if code not in self._forwards:
            classes = list(torch.autograd.Function.__subclasses__())
            for kind in classes:  # grows while it is read
                classes += kind.__subclasses__()
                CODES[kind] = CODES.get(kind) or getattr(inspect.unwrap(kind.forward), "__code__", None)
            found = (kind.__name__ for kind in classes if CODES[kind] is code)
            self._forwards[code] = tuple(dict.fromkeys(found))
        return self._forwards[code]

    def _site_of_node(self, node: Any, op: str) -> Site:
        known = None if node is None else node.metadata.get(TAG)
        if known is not None:
            return Site(known.op, known.module, known.line, "backward", known.call)
        return Site(public(op) if node is None else _name_of(node), "", "", "backward")

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        self._depth += 1
        applied = self._applied
        try:
            with _unobserved():
                call = Call(self.origins, site, func, args, kwargs)
            for tensor in call.inputs:  # the nodes of custom Functions: with the sites where these were applied
                node: Any = tensor.grad_fn
                if node is not None and TAG not in node.metadata and (name := _name_of(node)) in applied:
                    node.metadata[TAG] = applied[name]
            self._inner = []
            if self.tracer.below is None:
                result = func(*args, **kwargs)
            else:
                result = self.tracer.below.__torch_function__(func, (), args, kwargs)
            with _unobserved():
                self.origins.follow(call, args[0] if func is Tensor.__setitem__ else result, self._inner)
            if call.outputs:
                self.numbers[site] = numbers_of(func, args, kwargs), call.outputs[0].dtype
            for tensor in call.outputs:
                _tag(tensor, site)
            return result
        finally:
            self._depth -= 1


def _name_of(node: Any) -> str:
    """Return what an autograd node belongs to: "MulBackward0" -> "mul"; a custom Function's name stays."""
    stem = node.name().rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
    name = public("".join(("_" if c.isupper() and i else "") + c.lower() for i, c in enumerate(stem)))
    return name if name in known() else stem


def _tag(tensor: Tensor, site: Site) -> None:
    """Write `site` into the autograd nodes that lead to `tensor` and that no earlier call made."""
    todo: list[Any] = [tensor.grad_fn]  # torch types a node's metadata as a method
    while todo:
        node = todo.pop()
        if node is None or TAG in node.metadata or node.name().endswith("AccumulateGrad"):
            continue
        node.metadata[TAG] = site
        todo += [following for following, _ in node.next_functions]


def _engine_between(below: FrameType, above: FrameType) -> bool:
    between = takewhile(lambda frame: frame is not above, (frame for frame, _ in walk_stack(below)))
    return any(frame.f_code.co_name == ENGINE for frame in between)


def _opens(func: Callable[..., Any]) -> bool:
    """Return whether the region has no rule for `func` itself, so that its parts are watched."""
    handler = None if STATE.mode is None else STATE.mode.handlers.get(func)
    return handler is None or handler.__qualname__.startswith("of_composite.")


# ------------------------------------------------------------------ the replay

Windows = Callable[..., "Attempt"]  # ``windows(window, traced=, factor=, only=) -> Attempt``: see `Replay.windows`
COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
REENTRANT = "CheckpointFunctionBackward"  # the node of a checkpoint that accumulates into ``.grad``


@dataclass(eq=False)
class Attempt:
    """The outcome of one replay."""

    losses: list[Tensor] = field(default_factory=list)  # detached, one for each micro-batch
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # leaf -> its gradient, summed over the micro-batches
    bad: bool = False  # whether the loss or a gradient is not finite
    index: int | None = None  # number of the first micro-batch that is not finite, or None
    micro: MicroBatch | None = None  # that micro-batch
    trace: Trace | None = None  # its instruments; None in a replay without
    odd: str = ""  # why the replay shows nothing, or why there was none, in words
    added: Tensor | None = None  # the leaf whose gradients are finite in each micro-batch and whose sum is not, or None

    @property
    def source(self) -> Source | None:
        """Where the values that are not finite come from first; None if it is not known."""
        return None if self.trace is None else self.trace.cause[0]

    @property
    def only(self) -> int | None:
        """The micro-batch that is not finite by itself; None if it takes the sum of all."""
        return None if self.added is not None else self.index


@dataclass(kw_only=True, eq=False)
class Replay:
    """Runs micro-batches again."""

    model: nn.Module  # the user's model, unwrapped
    forward: Callable[[tuple[Any, ...], dict[str, Any]], Any]  # ``forward(batch, named) -> loss``, in its region
    window: Sequence[MicroBatch]  # the micro-batches
    buffers: Sequence[tuple[nn.Module, str, Tensor]] = ()  # (module, name, value before the window)
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # returns the context of a backward pass
    wide: bool = False  # whether gradients of micro-batches are added in fp32, whatever the format of their parameter

    def run(self, *, traced: bool = False, factor: float = 1.0, only: int | None = None) -> Attempt:
        """Run the window once more, or micro-batch `only` of it.

        Args:
            traced: whether with instruments; the trace is that of the first micro-batch that is not finite.
            factor: factor of every seed.
            only: number of the micro-batch; None: all.
        """
        with self.windows() as windows:
            return windows(self.window, traced=traced, factor=factor, only=only)

    @contextmanager
    def windows(self) -> Iterator[Windows]:
        """Return in a block a function that runs one window after the other, each from the state that the last left.

        It takes the arguments of `run` after the window. At the end of the block all is as it was before.
        """
        modules = Modules(self.model)  # and other models that the loss function calls: a critic, a teacher
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.enable_grad())
            if processes()[1] > 1:
                stack.enter_context(KernelMode(_RefuseCollectives()))
            stack.enter_context(Snapshot(noted(), modules).returning(Deferral()))
            stack.enter_context(modules.watching())
            put_buffers(self.buffers)

            def run(
                window: Sequence[MicroBatch], *, traced: bool = False, factor: float = 1.0, only: int | None = None
            ) -> Attempt:
                attempt = Attempt()
                for index, micro in enumerate(window):
                    if only is None or index == only:
                        self._one(attempt, index, micro, modules, traced=traced, factor=factor)
                        if attempt.only is not None:
                            break
                return attempt

            yield run

    def _one(
        self, attempt: Attempt, index: int, micro: MicroBatch, modules: Modules, *, traced: bool, factor: float
    ) -> None:
        put_random(micro.random)
        batch, named = map_tensors((micro.batch, micro.named), _own_copy)
        trace = Trace(self.model) if traced else None
        with ExitStack() as stack:
            if trace is not None:
                for number, tensor in enumerate(tensors((batch, named))):
                    trace.origins.expect("batch", f"input {number}", tensor)
                stack.enter_context(trace.watching())
            loss = self.forward(batch, named)
            if not isinstance(loss, Tensor):
                attempt.odd = f"the loss function returned {type(loss).__name__} in the replay"
                return
            with torch.no_grad():
                seed = torch.ones_like(loss) if micro.seed is None else micro.seed.to(loss.dtype).reshape(loss.shape)
                if factor != 1.0:  # a factor of 1 would be a call in the trace
                    seed = seed * factor
            with self.around():
                gradients = _gradients(loss, seed, modules)
        attempt.losses.append(loss.detach())
        bad = not all(extremes(one)[1] for one in (*gradients.values(), loss))
        if bad and attempt.index is None:
            attempt.bad, attempt.index, attempt.micro, attempt.trace = True, index, micro, trace
            if trace is not None:
                trace.loss = loss
                trace.gradients = gradients
                return
        for leaf, gradient in gradients.items():
            total = attempt.gradients.get(leaf)
            if self.wide and len(self.window) > 1 and gradient.dtype in LOW_DTYPES:
                gradient = gradient.float()
            attempt.gradients[leaf] = gradient if total is None else total + gradient
        sums = (leaf for leaf in gradients if not extremes(attempt.gradients[leaf])[1])
        if not attempt.bad and (first := next(sums, None)) is not None:
            attempt.bad, attempt.index, attempt.micro, attempt.added = True, index, micro, first


class _RefuseCollectives(Sink):
    """Refuses collectives (of SyncBatchNorm, of a gathered batch): the other ranks run no replay, or another one."""

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in COLLECTIVE:
            raise StepError(
                f"the forward or backward pass communicates with other ranks ({func}), and a replay runs on one alone"
            )
        return func(*args, **kwargs)


def _own_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and tensor.is_leaf else copy


def _gradients(loss: Tensor, seed: Tensor, modules: Modules) -> dict[Tensor, Tensor]:
    nodes = [] if loss.grad_fn is None else [*graph_of(loss)]
    leaves = list(dict.fromkeys(v for node in nodes if isinstance(v := getattr(node, "variable", None), Tensor)))
    reentrant = any(node.name() == REENTRANT for node in nodes)
    if not leaves and not reentrant:
        return {}
    if not reentrant:
        found = _run_backward(loss, seed, *leaves)
        return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}
    leaves = list(dict.fromkeys([*leaves, *modules.parameters()]))
    hooks = [h for h in (getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves) if h]
    with Snapshot(gradients(leaves), contents(hooks)).returning():
        for hook in hooks:
            hook.clear()
        for leaf in leaves:
            leaf.grad = None
        _run_backward(loss, seed)
        return {leaf: leaf.grad for leaf in leaves if leaf.grad is not None}


def _run_backward(loss: Tensor, seed: Tensor, *leaves: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `leaves`; without leaves accumulate those of all.

    torch's public functions for this pass modes as one operator, which would hide the operators inside.
    """
    return engine_run_backward((loss,), (seed,), False, False, leaves, True, accumulate_grad=not leaves) or ()
