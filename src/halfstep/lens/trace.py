"""Trace: the instruments of one replay: which operator, where, made the first value that is not finite, and spoiled it.

Two modes look on. A `TorchFunctionMode` above all regions sees operators as the user calls them, with module and line,
and writes both into the `metadata` of the autograd nodes each call makes. A `TorchDispatchMode` sees what the backward
pass runs; the node that is running says by its metadata which call it belongs to.

Note [origins]: every storage that holds a value that is not finite carries the set of `Source`s it comes from. An
operator whose result is finite ends them; one whose inputs are finite and whose result is not begins one. At the end
the loss, or a gradient, names its sources: infinities that were masked away are never among them. Infinities written on
purpose (``masked_fill(-inf)``, a mask in a buffer) are sources that are not accused; an operator that makes NaN from
nothing but those is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.cast.composites import unreported
from halfstep.cast.state import STATE
from halfstep.lens.sites import TAG, Site, line_of, name_of_node, pointwise, public, spelled, tag, user_frame
from halfstep.lens.values import (
    constant_infinity,
    copied,
    described,
    extremes,
    floats,
    held,
    in_float64,
    storage,
    writes,
)
from halfstep.trees import map_tensors, tensors

__all__ = ["Call", "Source", "Trace"]

APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # of the class method
CALLS_KEPT = 20_000  # of the newest calls; a call takes about 300 bytes
SOURCES_EXAMINED = 32  # of the first sources; each is computed again in float64

SILENT = frozenset(
    "__get__ __set__ __delete__ size stride dim numel shape is_floating_point is_complex element_size data_ptr "
    "storage_offset untyped_storage is_contiguous register_hook requires_grad_ retain_grad item tolist __len__ "
    "__bool__ __float__ __int__ __format__ __repr__ numpy is_same_size get_device type_as_ nelement ndimension "
    "__hash__ __contains__ __iter__ allclose equal is_nonzero".split()
)
"""What asks and administers; a result of theirs is never a tensor that somebody goes on with."""

RUNS_BACKWARD = frozenset({"backward", "grad"})
"""Functions of torch.autograd that report themselves to modes as operators do, and call everything else."""

UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted"}
)

OPENED = frozenset({"multi_head_attention_forward"})
"""Composites that hold so much that their parts are the operators worth naming."""

GROWS = frozenset(
    "exp exp2 expm1 special.expm1 sinh cosh pow float_power prod cumprod ldexp matrix_exp matrix_power "
    "linalg.matrix_power linalg.matrix_exp det linalg.det".split()
)
"""Operators that may pass the largest float64 number from moderate fp32 inputs. Of any other, infinity is a pole."""

POLES = frozenset(
    "div true_divide reciprocal log log2 log10 log1p rsqrt atanh acos asin logit xlogy sqrt tan digamma lgamma".split()
)
"""What is taken for a pole where nothing can be computed again in float64."""

HUGE = 1e100  # inputs from which products and quotients of a few may leave float64 too


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call as it was seen.

    Attributes:
        site: where.
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
    """Where values that are not finite begin.

    Attributes:
        kind: "operator", "batch", "parameter", "buffer", "constant", "deliberate" or "unwritten".
        order: number of calls before it.
        name: of the parameter, buffer or input.
        call: the operator call that made it, or the first that met it.
        invalid: for an operator: whether float64 gives no number either.
        limit: largest number of the format of the result.
        masks: for tensors from outside: whether it holds no other infinity than -inf, as additive masks do.
    """

    kind: str
    order: int
    name: str = ""
    call: Call | None = None
    invalid: bool = False
    limit: float = 0.0
    masks: bool = False

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Return what puts first causes first: state and batch, then operators; what may be meant comes last."""
        kernels = self.kind == "constant" and self.call is not None and self.call.site.phase == "backward"
        return self.innocent, kernels, self.kind == "operator", self.order

    @property
    def innocent(self) -> bool:
        """Whether it may be meant."""
        return self.kind in {"deliberate", "unwritten"} or self.masks


class _Functions(TorchFunctionMode):
    """Hands every operator the user calls to the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.function(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    """Hands what the backward pass runs to the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its type out
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.kernel(func, args, kwargs or {})


@dataclass(eq=False)
class Trace:
    """What one replay shows.

    Args:
        model: the user's model; names of modules, parameters and buffers are those in it.

    Attributes:
        calls: operator calls in order, the newest `CALLS_KEPT`.
        count: how many there were.
        sources: operators that made values that are not finite, in order.
        loss: what came out, if it or a gradient is not finite.
        gradients: of the leaves.
        low: the low format of the last torch.autocast region that was on, or None.
    """

    model: nn.Module
    calls: list[Call] = field(default_factory=list)
    count: int = 0
    sources: list[Source] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    low: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._names = {id(m): name for name, m in reversed(list(self.model.named_modules()))}
        self._entered: dict[int, int] = {}
        self._stack: list[tuple[str, int]] = []
        self._depth = 0  # functions under way
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}
        self._outside: dict[int, tuple[str, str]] = {}  # storage -> (kind, name) of batch and state
        self._inner: list[Tensor] = []  # what the kernels of the function under way returned
        self._insides: dict[int, tuple[StorageWeakRef, Call, frozenset[Source]]] = {}
        self._made: dict[str, Site] = {}  # custom Function -> where it was applied last
        self._sources = 0
        self._seen_modules: set[int] = set()
        self._outsiders: list[nn.Module] = []
        self._functions = _Functions(self)
        self._know(self.model, "")

    # ------------------------------------------------------------------ setting up

    def expect(self, batch: Any) -> None:
        """Take note of what the batch is."""
        for index, tensor in enumerate(tensors(batch)):
            self._outside.setdefault(storage(tensor), ("batch", f"input {index}"))

    def _know(self, module: nn.Module, prefix: str) -> None:
        """Take note of the state of `module`."""
        if id(module) in self._seen_modules:
            return
        self._seen_modules.update(id(m) for m in module.modules())
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in named:
                if not is_lazy(tensor):
                    self._outside.setdefault(storage(tensor), (kind, prefix + name))

    @contextmanager
    def watching(self) -> Iterator[Trace]:
        """Look on while the block runs, in this thread."""
        before = STATE.above
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
        """Name a module that is not in the model: by its class if it has parts, else by what calls it."""
        above = self._stack[-1][0] if self._stack else ""
        kind = type(module)
        own = getattr(kind, "_halfstep_original", kind).__name__
        self._know(module, own + ".")
        if next(module.children(), None) is None:
            return above
        for name, part in module.named_modules():
            self._names.setdefault(id(part), f"{own}.{name}" if name else own)
        self._outsiders.append(module)  # so that no address comes twice
        return own

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    # ------------------------------------------------------------------ looking on

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function the user called and keep what it did to its tensors."""
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
        return self._watched(func, args, kwargs, self._site_of(op))

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel; those of the backward pass that no function is under way for are kept."""
        if self._depth:
            result = func(*args, **kwargs)
            self._inner += [t for t in floats(result) if held(t)]
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
        self._heed_custom(frame)
        module, call = self._stack[-1] if self._stack else ("", 0)
        if node is not None:  # a custom backward, or what checkpointing computes again
            known = node.metadata.get(TAG)
            recomputed = bool(self._stack)
            if known is not None and not recomputed:
                return Site(op, known.module, line_of(frame), "backward", known.call)
            return Site(op, module, line_of(frame), "forward" if recomputed else "backward", call)
        return Site(op, module, line_of(frame), "forward", call)

    def _heed_custom(self, frame: FrameType | None) -> None:
        """Remember where the custom Function whose forward is running, if one is, was applied.

        A node of autograd that no call of the user's shows: the first argument of a forward without setup_context is
        that node, and is told at once; others are told when something is done to their result.
        """
        inner, above = frame, None if frame is None else frame.f_back
        while above is not None and above.f_code is not APPLY:
            inner, above = above, above.f_back
        if inner is None or above is None:
            return
        caller, engine = user_frame(above)
        if caller is None or engine:
            return
        module, call = self._stack[-1] if self._stack else ("", 0)
        name = above.f_locals["cls"].__name__
        site = Site(name, module, line_of(caller), "forward", call)
        self._made[name] = site
        node = inner.f_locals.get(next(iter(inner.f_code.co_varnames), ""))
        if isinstance(node, BackwardCFunction):
            node.metadata.setdefault(TAG, site)

    def _site_of_node(self, node: Any, op: str) -> Site:
        known = None if node is None else node.metadata.get(TAG)
        if known is not None:
            return Site(known.op, known.module, known.line, "backward", known.call)
        name = public(op) if node is None else name_of_node(node.name())
        return Site(name, "", "", "backward")

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        self._depth += 1
        try:
            found = floats((args, kwargs))
            in_place = writes(func)
            before = [extremes(tensor) for tensor in found]
            copies = None
            if in_place and all(finite for _, finite, _ in before):
                copies = map_tensors((args, kwargs), copied)
            for tensor in found:
                self._tag_custom(tensor)
            self._inner = []
            result = func(*args, **kwargs)
            inner, self._inner = self._inner, []  # what follows are kernels of our own
            outputs = [args[0]] if func is Tensor.__setitem__ else floats(result)
            if not outputs:
                return result
            self._judge(func, args, kwargs, site, found, before, outputs, copies, inner)
            for tensor in outputs:
                tag(tensor, site)
            return result
        finally:
            self._depth -= 1

    def _judge(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: Site,
        found: list[Tensor],
        before: list[tuple[float, bool, bool]],
        outputs: list[Tensor],
        copies: Any,
        inner: list[Tensor],
    ) -> None:
        after = [extremes(tensor) for tensor in outputs]
        finite_in = all(finite for _, finite, _ in before)
        finite_out = all(finite for _, finite, _ in after)
        self.count += 1
        dtypes, shapes = described(found)
        call = Call(site, dtypes, shapes, max((v for v, _, _ in before), default=0.0), finite_in, finite_out)
        self.calls.append(call)
        if len(self.calls) > CALLS_KEPT:
            del self.calls[: CALLS_KEPT // 2]
        if finite_out:
            for tensor in outputs:
                self._clear(tensor)
            self._keep_insides(inner, call, frozenset())
            return
        inherited = frozenset[Source]()
        for tensor, (_, finite, _) in zip(found, before, strict=True):
            if not finite:
                inherited |= self._of(tensor, call)
        origins = inherited
        if finite_in:
            constant = constant_infinity((*args, *kwargs.values()))
            if constant and not any(nan for _, _, nan in after):  # 0 * -inf is not what anybody means
                origins = frozenset({Source("deliberate", self.count, call=call)})
            elif site.op in UNWRITTEN:
                origins = frozenset({Source("unwritten", self.count, call=call)})
            else:
                origins = frozenset({self._source(func, args, kwargs, call, found, outputs, copies, inner)})
        elif self._adds(site.op, found, before, outputs, after, inherited):
            source = self._source(func, args, kwargs, call, found, outputs, None, inner)
            origins = frozenset({source}) if all(s.innocent for s in inherited) else inherited | {source}
        for tensor, (_, finite, _) in zip(outputs, after, strict=True):
            if finite:
                self._clear(tensor)
            else:
                self._set(tensor, origins)
        self._keep_insides(inner, call, origins)

    def _keep_insides(self, inner: list[Tensor], call: Call, origins: frozenset[Source]) -> None:
        """Remember whose the tensors are that an operator keeps for its backward pass and shows nobody."""
        for tensor in inner:
            self._insides[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), call, origins)

    def _adds(
        self,
        op: str,
        found: list[Tensor],
        before: list[tuple[float, bool, bool]],
        outputs: list[Tensor],
        after: list[tuple[float, bool, bool]],
        inherited: frozenset[Source],
    ) -> bool:
        """Return whether an operator that met infinities made others of its own; note [origins]."""
        if all(s.innocent for s in inherited):
            had_nan = any(nan for _, _, nan in before)
            if any(nan for _, _, nan in after) and not had_nan:
                return not all(s.kind == "batch" for s in inherited) or op in {
                    "softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy",
                }  # fmt: skip
        if not pointwise(op) or len(outputs) != 1:
            return False
        try:
            spoiled = torch.zeros_like(outputs[0], dtype=torch.bool)
            for tensor in found:
                spoiled = spoiled | ~torch.isfinite(tensor)
            return bool((~torch.isfinite(outputs[0]) & ~spoiled).any()) if spoiled.shape == outputs[0].shape else False
        except RuntimeError:
            return False

    def _source(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Call,
        found: list[Tensor],
        outputs: list[Tensor],
        copies: Any,
        inner: list[Tensor],
    ) -> Source:
        """Return the source that `call` is, having computed it again in float64 to tell overflow from the rest."""
        self._sources += 1
        limit = 0.0
        floating = [t.dtype for t in outputs if t.is_floating_point()]
        if floating:
            limit = torch.finfo(floating[0]).max
        nan_only = any(bool(torch.isnan(t).any()) for t in outputs) and not any(
            bool(torch.isinf(t).any()) for t in outputs
        )
        invalid = nan_only
        if self._sources <= SOURCES_EXAMINED and (copies is not None or not writes(func)):
            wide = in_float64(func, *(copies if copies is not None else (args, kwargs)))
            if wide is not None:
                invalid = _invalid(spelled(func), call, found, floats(wide))
                # an eps that the format lost: NaN from operators inside, none of which ran over
                lost = nan_only and len(inner) > 1 and not any(bool(torch.isinf(t).any()) for t in inner)
                invalid = invalid or lost
            else:
                invalid = nan_only or spelled(func) in POLES
        name = ""
        for tensor in found:  # a weight, or an input, that the format of the result cannot hold
            if limit and not invalid and extremes(tensor)[0] > limit:
                name = self._outside.get(storage(tensor), ("", ""))[1]
        source = Source("operator", self.count, name, call, invalid, limit)
        self.sources.append(source)
        return source

    # ------------------------------------------------------------------ origins

    def _of(self, tensor: Tensor, call: Call | None) -> frozenset[Source]:
        """Return the sources of a tensor that is not finite."""
        key = storage(tensor)
        kept = self._origins.get(key)
        if kept is not None:
            return kept[1]
        inside = self._insides.get(key)
        if inside is not None and key not in self._outside:
            invalid = extremes(tensor)[2] or inside[1].site.op in POLES
            made = inside[2] or frozenset({Source("operator", self.count, call=inside[1], invalid=invalid)})
            self._set(tensor, made)
            return made
        kind, name = self._outside.get(key, ("constant", ""))
        _, _, nan = extremes(tensor)
        masks = kind in {"buffer", "batch", "constant"} and not nan and not bool((tensor.detach() == math.inf).any())
        source = frozenset({Source(kind, self.count, name, call, masks=masks)})
        self._set(tensor, source)
        return source

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        if held(tensor):
            self._origins[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _clear(self, tensor: Tensor) -> None:
        if self._origins and held(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() <= tensor.numel() * tensor.element_size():
                self._origins.pop(storage._cdata, None)

    def accused(self, tensor: Tensor) -> list[Source]:
        """Return the sources of `tensor`, a loss or a gradient that is not finite: the first cause first."""
        found = [s for s in self._of(tensor, None) if s.kind != "constant" or s.call is not None]
        found = found or [s for s in self.sources if not s.innocent]  # somebody copied it where nobody looks
        return sorted(found or self._of(tensor, None), key=Source.rank)

    def _tag_custom(self, tensor: Tensor) -> None:
        """Give a custom Function's node, which no call of the user's showed, the place it was applied at."""
        node: Any = tensor.grad_fn
        if node is not None and TAG not in node.metadata:
            site = self._made.get(name_of_node(node.name()))
            if site is not None:
                node.metadata[TAG] = site


def _invalid(op: str, call: Call, found: list[Tensor], wide: list[Tensor]) -> bool:
    """Return whether what an operator gave in float64 says that it has no value there, in any format."""
    states = [extremes(t) for t in wide]
    if all(finite for _, finite, _ in states):
        return False
    if any(nan for _, _, nan in states):
        return True
    if call.largest > HUGE or any(t.dtype not in {torch.float64, torch.complex128} for t in wide):
        return False
    if op not in GROWS:
        return True
    return any(t.shape == w.shape and bool((w.isinf() & (t == 0)).any()) for t in found for w in wide)  # 0 ** -1


def _opens(func: Callable[..., Any]) -> bool:
    """Return whether the region has no rule for `func` itself, so that its parts may be shown."""
    handler = None if STATE.mode is None else STATE.mode.handlers.get(func)
    return handler is None or handler.__qualname__.startswith("of_composite.")
