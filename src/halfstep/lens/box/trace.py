"""Trace: the instruments of one replay, which find the operator that made the first value that is not finite.

A `TorchFunctionMode` above all regions sees operators as the user calls them, with module and line, and writes both
into the `metadata` of the autograd nodes that each call makes. A `TorchDispatchMode` sees the kernels of the backward
pass; the metadata of the running node gives the call it belongs to.

Note [origins]: every storage that holds a value that is not finite carries the set of `Source`s it comes from. An
operator whose result is finite ends them; one whose inputs are finite and whose result is not begins one. At the end
the loss, or a gradient, names its sources: infinities that were masked away are never among them. Infinities written on
purpose (``masked_fill(-inf)``, a mask in a buffer) are sources that are not accused; an operator that makes NaN from
nothing but those is.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from halfstep.cast.rules.recipe import unreported
from halfstep.cast.state import STATE
from halfstep.lens.calls import (
    RUNS_BACKWARD,
    TAG,
    Site,
    constants,
    copied,
    described,
    extremes,
    floats,
    has_storage,
    in_float64,
    line_of,
    name_of_node,
    numbers_of,
    pointwise,
    public,
    read,
    region_here,
    spelled,
    storage,
    tag,
    user_frame,
    writes,
)
from halfstep.policy.policy import Policy
from halfstep.trees import map_tensors, tensors

__all__ = ["Source", "Trace"]

SILENT = frozenset(
    "__get__ __set__ __delete__ size stride dim numel shape is_floating_point is_complex element_size data_ptr "
    "storage_offset untyped_storage is_contiguous register_hook requires_grad_ retain_grad item tolist __len__ "
    "__bool__ __float__ __int__ __format__ __repr__ numpy is_same_size get_device type_as_ nelement ndimension "
    "__hash__ __contains__ __iter__ allclose equal is_nonzero".split()
)
"""Queries and bookkeeping: no result of theirs is a tensor that the program computes with."""

OPENED = frozenset({"multi_head_attention_forward"})
"""Composites of so many operators that a verdict names the part."""


class _Functions(TorchFunctionMode):
    """Passes every operator that the user calls to the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.function(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    """Passes the kernels of the backward pass to the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its type out
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.kernel(func, args, kwargs or {})


@contextmanager
def _unobserved() -> Iterator[None]:
    """Let the block read values without passing a mode: neither the trace's nor a region's."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@dataclass(eq=False)
class Trace:
    """The instruments of one replay, and what they have seen.

    Args:
        model: the user's model; names of modules, parameters and buffers are those in it.

    Attributes:
        count: how many operator calls there were.
        origins: where values that are not finite come from.
        loss: the loss of the replay, if it or a gradient is not finite.
        gradients: leaf -> its gradient, of such a replay.
        low: the low format of the last region that was on, or None.
        region: the policy of the last `hs.autocast` that was on, or None.
        numbers: call -> the floats among its arguments, and the format of its result.
    """

    model: nn.Module
    count: int = 0
    loss: Tensor | None = None
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    low: torch.dtype | None = None
    region: Policy | None = None
    numbers: dict[Site, tuple[tuple[float, ...], torch.dtype]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = {id(m): name for name, m in reversed(list(self.model.named_modules()))}
        self._entered: dict[int, int] = {}
        self._stack: list[tuple[str, int]] = []
        self._depth = 0  # functions that are running
        self.origins = Origins()
        self._inner: list[Tensor] = []  # results of the kernels of the running function
        self._applied: dict[str, Site] = {}  # custom Function -> where it was applied last
        self._forwards: dict[CodeType, tuple[str, ...]] = {}  # see `_customs`
        self._seen_modules: set[int] = set()
        self._outsiders: list[nn.Module] = []
        self._functions = _Functions(self)
        self._below: Any = None  # the mode that stood above all regions before; the trace calls it
        self._expect_state(self.model, "")

    # ------------------------------------------------------------------ setting up

    def expect(self, batch: Any) -> None:
        """Note the tensors of the batch."""
        for index, tensor in enumerate(tensors(batch)):
            self.origins.expect("batch", f"input {index}", tensor)

    def _expect_state(self, module: nn.Module, prefix: str) -> None:
        """Note parameters and buffers of `module`."""
        if id(module) in self._seen_modules:
            return
        self._seen_modules.update(id(m) for m in module.modules())
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in named:
                if not is_lazy(tensor):
                    self.origins.expect(kind, prefix + name, tensor)

    @contextmanager
    def watching(self) -> Iterator[Trace]:
        """Watch what the block runs in this thread."""
        before = STATE.above
        self._below = before
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_Kernels(self))
            stack.enter_context(self._functions)
            STATE.above = self._functions
            try:
                yield self
            finally:
                STATE.above = before

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            name = self._name_outsider(module)
        self._entered[id(module)] = self._entered.get(id(module), 0) + 1
        self._stack.append((name, self._entered[id(module)]))

    def _name_outsider(self, module: nn.Module) -> str:
        """Name a module outside the model: by its class if it has parts, else by the module that calls it."""
        above = self._stack[-1][0] if self._stack else ""
        kind = type(module)
        own = getattr(kind, "_halfstep_original", kind).__name__
        self._expect_state(module, own + ".")
        if next(module.children(), None) is None:
            return above
        for name, part in module.named_modules():
            self._names.setdefault(id(part), f"{own}.{name}" if name else own)
        self._outsiders.append(module)  # kept alive, so that no id is used twice
        return own

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    # ------------------------------------------------------------------ watching

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that the user called, and record what it did to its tensors."""
        op = spelled(func)
        if op in RUNS_BACKWARD and not self._depth and isinstance(func, FunctionType):
            with self._functions:
                return unreported(func)(*args, **kwargs)
        if self._depth or op in SILENT or getattr(func, "__name__", "") in SILENT:
            return func(*args, **kwargs)
        if op in OPENED and _opens(func):
            with self._functions:
                return unreported(func)(*args, **kwargs)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self.low = torch.get_autocast_dtype("cuda" if torch.is_autocast_enabled("cuda") else "cpu")
            self.region = region_here() or self.region
        return self._watched(func, args, kwargs, self._site_of(op))

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel; record it if the backward pass runs it outside of any function."""
        if self._depth:
            result = func(*args, **kwargs)
            self._inner += [t for t in floats(result) if has_storage(t)]
            return result
        node: Any = torch._C._current_autograd_node()
        if node is None and torch._C._current_graph_task_id() == -1:
            return func(*args, **kwargs)
        return self._watched(func, args, kwargs, self._site_of_node(node, str(func).split(".")[1]))

    def _site_of(self, op: str) -> Site:
        frame, engine = user_frame(sys._getframe(3))
        node: Any = torch._C._current_autograd_node()
        if node is not None and (engine or frame is None):
            return self._site_of_node(node, op)
        self._note_custom(frame)
        module, call = self._stack[-1] if self._stack else ("", 0)
        if node is not None:  # a custom backward, or a recomputation of checkpointing
            known = node.metadata.get(TAG)
            recomputed = bool(self._stack)
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
        caller, engine = user_frame(frame.f_back)
        if caller is None or engine:
            return
        module, call = self._stack[-1] if self._stack else ("", 0)
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
            forwards = ((kind.__name__, inspect.unwrap(kind.forward)) for kind in classes)
            found = [name for name, forward in forwards if getattr(forward, "__code__", None) is code]
            self._forwards[code] = tuple(dict.fromkeys(found))
        return self._forwards[code]

    def _site_of_node(self, node: Any, op: str) -> Site:
        known = None if node is None else node.metadata.get(TAG)
        if known is not None:
            return Site(known.op, known.module, known.line, "backward", known.call)
        name = public(op) if node is None else name_of_node(node.name())
        return Site(name, "", "", "backward")

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        self._depth += 1
        try:
            with _unobserved():
                inputs = read(func, args, kwargs)
                before = [extremes(tensor) for tensor in inputs]
                finite_in = all(finite for _, finite, _ in before)
                in_place = writes(func)
                # what the operator overwrites is needed again in `_source`, and only there
                copies = map_tensors((args, kwargs), copied) if in_place and finite_in else None
            for tensor in inputs:
                self._tag_custom(tensor)
            self._inner = []
            if self._below is None:
                result = func(*args, **kwargs)
            else:
                result = self._below.__torch_function__(func, (), args, kwargs)
            outputs = [args[0]] if func is Tensor.__setitem__ else floats(result)
            if not outputs:
                return result
            with _unobserved():
                after = [extremes(tensor) for tensor in outputs]
                self.count += 1
                dtypes, shapes = described(inputs)
                largest = max((value for value, _, _ in before), default=0.0)
                finite_out = all(finite for _, finite, _ in after)
                record = CallRecord(site, dtypes, shapes, largest, finite_in, finite_out)
                again = None if in_place and copies is None else copies or (args, kwargs)
                call = _Call(record, self.count, func, args, kwargs, again, inputs, before, outputs, after, self._inner)
                self.origins.follow(call)
            self.numbers[site] = numbers_of(func, args, kwargs), outputs[0].dtype
            for tensor in outputs:
                tag(tensor, site)
            return result
        finally:
            self._depth -= 1

    def _tag_custom(self, tensor: Tensor) -> None:
        """Tag the node of a custom Function with the site where it was applied."""
        node: Any = tensor.grad_fn
        if node is not None and TAG not in node.metadata:
            site = self._applied.get(name_of_node(node.name()))
            if site is not None:
                node.metadata[TAG] = site


def _opens(func: Callable[..., Any]) -> bool:
    """Return whether the region has no rule for `func` itself, so that its parts are watched."""
    handler = None if STATE.mode is None else STATE.mode.handlers.get(func)
    return handler is None or handler.__qualname__.startswith("of_composite.")


SOURCES_EXAMINED = 32
"""So many of the first sources are computed again in float64."""

UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted"}
)

GROWS = frozenset(
    "exp exp2 expm1 special.expm1 sinh cosh pow float_power prod cumprod ldexp matrix_exp matrix_power "
    "linalg.matrix_power linalg.matrix_exp det linalg.det".split()
)
"""Operators that may pass the largest float64 number from moderate fp32 inputs. Of any other, infinity is a pole."""

POLES = frozenset(
    "div true_divide reciprocal log log2 log10 log1p rsqrt atanh acos asin logit xlogy sqrt tan digamma lgamma".split()
)
"""Operators whose infinity is taken for a pole where a call cannot be computed again in float64."""

NORMALISING = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy"})
"""Operators that make NaN of a batch of masks alone: a row is masked out entirely."""

HUGE = 1e100
"""Products and quotients of a few numbers this large may leave float64 too."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What is kept of one operator call.

    Attributes:
        site: where it was called.
        dtypes: formats of its input tensors.
        shapes: shapes of them.
        largest: largest finite magnitude among them; 0.0 if they hold none.
        finite_in: whether all of them were finite.
        finite_out: whether its results were.
    """

    site: Site
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    largest: float
    finite_in: bool
    finite_out: bool


@dataclass(eq=False, slots=True)
class Source:
    """Where values that are not finite come from first.

    Attributes:
        kind: "operator", "batch", "parameter", "buffer", "constant", "deliberate" or "unwritten".
        order: number of calls before it.
        name: of the parameter, buffer or input.
        call: the operator call that made the values, or the first that read them.
        invalid: for an operator: whether float64 gives no number either.
        limit: largest number of the format of the result.
        written: whether the program itself wrote a NaN there.
        masks: for tensors from outside: whether -inf is the only infinity in it, as in additive masks.
    """

    kind: str
    order: int
    name: str = ""
    call: CallRecord | None = None
    invalid: bool = False
    limit: float = 0.0
    written: bool = False
    masks: bool = False

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Return a sort key that puts first causes first: state and batch, then operators; innocent ones come last."""
        kernels = self.kind == "constant" and self.call is not None and self.call.site.phase == "backward"
        return self.innocent, kernels, self.kind == "operator", self.order

    @property
    def innocent(self) -> bool:
        """Whether the program may have written it on purpose."""
        return self.kind in {"deliberate", "unwritten"} or self.masks


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """One operator call with its tensors, for as long as it runs.

    Attributes:
        record: what is kept of it.
        order: number of calls up to it.
        func: the operator, called with `args` and `kwargs`.
        again: arguments with which it can be computed again, None if it has overwritten them.
        inputs: its input tensors of floating or complex numbers.
        before: `extremes` of them before the call.
        outputs: the tensors it returned or wrote to.
        after: `extremes` of them.
        inner: results of the kernels inside.
    """

    record: CallRecord
    order: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: Any
    inputs: list[Tensor]
    before: list[tuple[float, bool, bool]]
    outputs: list[Tensor]
    after: list[tuple[float, bool, bool]]
    inner: list[Tensor]


class Origins:
    """The origins of the values of one replay that are not finite; note [origins].

    Attributes:
        sources: operators that made such values, in order.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}
        self._outside: dict[int, tuple[str, str]] = {}  # storage -> (kind, name) of batch and state
        self._insides: dict[int, tuple[StorageWeakRef, CallRecord, frozenset[Source]]] = {}
        self._order = 0

    def expect(self, kind: str, name: str, tensor: Tensor) -> None:
        """Note a tensor that exists before the first call."""
        self._outside.setdefault(storage(tensor), (kind, name))

    def follow(self, call: _Call) -> None:
        """Note where the values of the call's results that are not finite come from."""
        record, self._order = call.record, call.order
        if record.finite_out:
            for tensor in call.outputs:
                self._clear(tensor)
            self._note_inside(call.inner, record, frozenset())
            return
        origins = frozenset[Source]()
        for tensor, (_, finite, _) in zip(call.inputs, call.before, strict=True):
            if not finite:
                origins |= self.of(tensor, record)
        if record.finite_in:
            constant = not all(map(math.isfinite, constants((*call.args, *call.kwargs.values()))))
            if constant and not any(nan for _, _, nan in call.after):  # a NaN, such as 0 * -inf, is not meant
                origins = frozenset({Source("deliberate", call.order, call=record)})
            elif record.site.op in UNWRITTEN:
                origins = frozenset({Source("unwritten", call.order, call=record)})
            else:
                origins = frozenset({self._source(call)})
        elif _adds(call, origins):
            kept = frozenset[Source]() if all(s.innocent for s in origins) else origins
            origins = kept | {self._source(call)}
        for tensor, (_, finite, _) in zip(call.outputs, call.after, strict=True):
            if finite:
                self._clear(tensor)
            else:
                self._set(tensor, origins)
        self._note_inside(call.inner, record, origins)

    def _note_inside(self, inner: list[Tensor], record: CallRecord, origins: frozenset[Source]) -> None:
        """Note which call made tensors that an operator saves for its backward pass and does not return."""
        for tensor in inner:
            self._insides[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), record, origins)

    def _source(self, call: _Call) -> Source:
        """Return the call as a source; a run in float64 tells overflow from a value that does not exist."""
        op = spelled(call.func)
        limit = next((torch.finfo(t.dtype).max for t in call.outputs if t.is_floating_point()), 0.0)
        nan_only = any(nan for _, _, nan in call.after) and not _any_inf(call.outputs)
        invalid = nan_only
        if len(self.sources) < SOURCES_EXAMINED and call.again is not None:
            wide = in_float64(call.func, *call.again)
            if wide is None:
                invalid = nan_only or op in POLES
            else:
                # NaN although no operator inside overflowed: the format has lost an eps
                lost = nan_only and len(call.inner) > 1 and not _any_inf(call.inner)
                invalid = lost or _invalid(op, call, floats(wide))
        name = ""
        if call.record.largest > limit > 0.0 and not invalid:  # the format of the result cannot hold an input
            largest = max(range(len(call.inputs)), key=lambda index: call.before[index][0])
            name = self._outside.get(storage(call.inputs[largest]), ("", ""))[1]
        written = any(map(math.isnan, constants((*call.args, *call.kwargs.values()))))
        source = Source("operator", call.order, name, call.record, invalid or written, limit, written)
        self.sources.append(source)
        return source

    def of(self, tensor: Tensor, record: CallRecord | None) -> frozenset[Source]:
        """Return the sources of a tensor that is not finite; `record`: the call that reads it."""
        key = storage(tensor)
        kept = self._origins.get(key)
        if kept is not None:
            return kept[1]
        nan = extremes(tensor)[2]
        inside = self._insides.get(key)
        if inside is not None and key not in self._outside:
            _, maker, made = inside
            invalid = nan or maker.site.op in POLES
            made = made or frozenset({Source("operator", self._order, call=maker, invalid=invalid)})
        else:
            kind, name = self._outside.get(key, ("constant", ""))
            masks = (
                kind in {"buffer", "batch", "constant"} and not nan and not bool((tensor.detach() == math.inf).any())
            )
            made = frozenset({Source(kind, self._order, name, record, masks=masks)})
        self._set(tensor, made)
        return made

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        if has_storage(tensor):
            self._origins[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _clear(self, tensor: Tensor) -> None:
        if self._origins and has_storage(tensor):
            if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():  # all of it is written
                self._origins.pop(storage(tensor), None)

    def accused(self, tensor: Tensor) -> list[Source]:
        """Return the sources of `tensor`, a loss or a gradient that is not finite: the first cause first."""
        found = [s for s in self.of(tensor, None) if s.kind != "constant" or s.call is not None]
        found = found or [s for s in self.sources if not s.innocent]  # code that no mode sees has copied the value
        return sorted(found or self.of(tensor, None), key=Source.rank)


def _any_inf(found: list[Tensor]) -> bool:
    return any(bool(torch.isinf(t).any()) for t in found)


def _adds(call: _Call, inherited: frozenset[Source]) -> bool:
    """Return whether an operator whose inputs were not finite made more such values of its own; note [origins]."""
    op = call.record.site.op
    if all(s.innocent for s in inherited):
        had_nan = any(nan for _, _, nan in call.before)
        if any(nan for _, _, nan in call.after) and not had_nan:
            return op in NORMALISING or not all(s.kind == "batch" for s in inherited)
    if not pointwise(op) or len(call.outputs) != 1:
        return False
    try:
        (output,) = call.outputs
        spoiled = torch.zeros_like(output, dtype=torch.bool)
        for tensor in call.inputs:
            spoiled = spoiled | ~torch.isfinite(tensor)
        return spoiled.shape == output.shape and bool((~torch.isfinite(output) & ~spoiled).any())
    except RuntimeError:
        return False


def _invalid(op: str, call: _Call, wide: list[Tensor]) -> bool:
    """Return whether the results in float64 show that the operator has no value there, in any format."""
    states = [extremes(t) for t in wide]
    if all(finite for _, finite, _ in states):
        return False
    if any(nan for _, _, nan in states):
        return True
    if call.record.largest > HUGE or any(t.dtype not in {torch.float64, torch.complex128} for t in wide):
        return False
    if op not in GROWS:
        return True
    # 0 ** -1
    return any(t.shape == w.shape and bool((w.isinf() & (t == 0)).any()) for t in call.inputs for w in wide)
