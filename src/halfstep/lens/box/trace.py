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

from halfstep.cast.rules.composites import unreported
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
    held,
    in_float64,
    line_of,
    name_of_node,
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

__all__ = ["Call", "Origins", "Ran", "Source", "Trace"]

APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # of the class method

SILENT = frozenset(
    "__get__ __set__ __delete__ size stride dim numel shape is_floating_point is_complex element_size data_ptr "
    "storage_offset untyped_storage is_contiguous register_hook requires_grad_ retain_grad item tolist __len__ "
    "__bool__ __float__ __int__ __format__ __repr__ numpy is_same_size get_device type_as_ nelement ndimension "
    "__hash__ __contains__ __iter__ allclose equal is_nonzero".split()
)
"""What asks and administers; a result of theirs is never a tensor that somebody goes on with."""

OPENED = frozenset({"multi_head_attention_forward"})
"""Composites that hold so much that their parts are the operators worth naming."""


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
        count: how many operator calls there were.
        origins: where values that are not finite come from.
        loss: what came out, if it or a gradient is not finite.
        gradients: of the leaves.
        low: the low format of the last region that was on, or None.
        region: the policy of the last `hs.autocast` that was on, or None.
    """

    model: nn.Module
    count: int = 0
    loss: Tensor | None = None
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    low: torch.dtype | None = None
    region: Policy | None = None

    def __post_init__(self) -> None:
        self._names = {id(m): name for name, m in reversed(list(self.model.named_modules()))}
        self._entered: dict[int, int] = {}
        self._stack: list[tuple[str, int]] = []
        self._depth = 0  # functions under way
        self.origins = Origins()
        self._inner: list[Tensor] = []  # what the kernels of the function under way returned
        self._made: dict[str, Site] = {}  # custom Function -> where it was applied last
        self._seen_modules: set[int] = set()
        self._outsiders: list[nn.Module] = []
        self._functions = _Functions(self)
        self._below: Any = None  # what stood above all regions before, and is called in its place
        self._know(self.model, "")

    # ------------------------------------------------------------------ setting up

    def expect(self, batch: Any) -> None:
        """Take note of what the batch is."""
        for index, tensor in enumerate(tensors(batch)):
            self.origins.come_from("batch", f"input {index}", tensor)

    def _know(self, module: nn.Module, prefix: str) -> None:
        """Take note of the state of `module`."""
        if id(module) in self._seen_modules:
            return
        self._seen_modules.update(id(m) for m in module.modules())
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in named:
                if not is_lazy(tensor):
                    self.origins.come_from(kind, prefix + name, tensor)

    @contextmanager
    def watching(self) -> Iterator[Trace]:
        """Look on while the block runs, in this thread."""
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
            self.region = region_here() or self.region
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
            found = read(func, args, kwargs)
            in_place = writes(func)
            before = [extremes(tensor) for tensor in found]
            copies = None
            if in_place and all(finite for _, finite, _ in before):
                copies = map_tensors((args, kwargs), copied)
            for tensor in found:
                self._tag_custom(tensor)
            self._inner = []
            if self._below is None:
                result = func(*args, **kwargs)
            else:
                result = self._below.__torch_function__(func, (), args, kwargs)
            inner, self._inner = self._inner, []  # what follows are kernels of our own
            outputs = [args[0]] if func is Tensor.__setitem__ else floats(result)
            if not outputs:
                return result
            after = [extremes(tensor) for tensor in outputs]
            self.count += 1
            dtypes, shapes = described(found)
            largest = max((value for value, _, _ in before), default=0.0)
            finite_in, finite_out = (all(finite for _, finite, _ in states) for states in (before, after))
            call = Call(site, dtypes, shapes, largest, finite_in, finite_out)
            self.origins.judge(
                Ran(
                    call=call, order=self.count, func=func, args=args, kwargs=kwargs, found=found, before=before,
                    outputs=outputs, after=after, copies=copies, inner=inner,
                )
            )  # fmt: skip
            for tensor in outputs:
                tag(tensor, site)
            return result
        finally:
            self._depth -= 1

    def _tag_custom(self, tensor: Tensor) -> None:
        """Give a custom Function's node, which no call of the user's showed, the place it was applied at."""
        node: Any = tensor.grad_fn
        if node is not None and TAG not in node.metadata:
            site = self._made.get(name_of_node(node.name()))
            if site is not None:
                node.metadata[TAG] = site


def _opens(func: Callable[..., Any]) -> bool:
    """Return whether the region has no rule for `func` itself, so that its parts may be shown."""
    handler = None if STATE.mode is None else STATE.mode.handlers.get(func)
    return handler is None or handler.__qualname__.startswith("of_composite.")


SOURCES_EXAMINED = 32  # of the first sources; each is computed again in float64

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
        written: whether the program itself put a NaN there.
        masks: for tensors from outside: whether it holds no other infinity than -inf, as additive masks do.
    """

    kind: str
    order: int
    name: str = ""
    call: Call | None = None
    invalid: bool = False
    limit: float = 0.0
    written: bool = False
    masks: bool = False

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Return what puts first causes first: state and batch, then operators; what may be meant comes last."""
        kernels = self.kind == "constant" and self.call is not None and self.call.site.phase == "backward"
        return self.innocent, kernels, self.kind == "operator", self.order

    @property
    def innocent(self) -> bool:
        """Whether it may be meant."""
        return self.kind in {"deliberate", "unwritten"} or self.masks


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Ran:
    """One operator call with its tensors, which nobody keeps.

    Attributes:
        call: what is kept of it.
        order: how many calls there were with it.
        func: what was called, with `args` and `kwargs`.
        found: its input tensors that may hold what is not finite.
        before: `extremes` of them before the call.
        outputs: what it returned or wrote to.
        after: `extremes` of them.
        copies: arguments as they were, for what writes to them; None where nobody needs those.
        inner: what the kernels inside returned.
    """

    call: Call
    order: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: list[Tensor]
    before: list[tuple[float, bool, bool]]
    outputs: list[Tensor]
    after: list[tuple[float, bool, bool]]
    copies: Any
    inner: list[Tensor]


class Origins:
    """The origins of what is not finite in one replay; note [origins].

    Attributes:
        sources: operators that made values that are not finite, in order.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[Source]]] = {}
        self._outside: dict[int, tuple[str, str]] = {}  # storage -> (kind, name) of batch and state
        self._insides: dict[int, tuple[StorageWeakRef, Call, frozenset[Source]]] = {}
        self._order = 0

    def come_from(self, kind: str, name: str, tensor: Tensor) -> None:
        """Take note of a tensor that is there before the first call."""
        self._outside.setdefault(storage(tensor), (kind, name))

    def judge(self, ran: Ran) -> None:
        """Say of the results of a call where what is not finite in them comes from."""
        call, self._order = ran.call, ran.order
        if call.finite_out:
            for tensor in ran.outputs:
                self._clear(tensor)
            self._keep(ran.inner, call, frozenset())
            return
        inherited = frozenset[Source]()
        for tensor, (_, finite, _) in zip(ran.found, ran.before, strict=True):
            if not finite:
                inherited |= self.of(tensor, call)
        origins = inherited
        if call.finite_in:
            constant = not all(map(math.isfinite, constants((*ran.args, *ran.kwargs.values()))))
            if constant and not any(nan for _, _, nan in ran.after):  # 0 * -inf is not what anybody means
                origins = frozenset({Source("deliberate", ran.order, call=call)})
            elif call.site.op in UNWRITTEN:
                origins = frozenset({Source("unwritten", ran.order, call=call)})
            else:
                origins = frozenset({self._source(ran)})
        elif _adds(ran, inherited):
            source = self._source(ran)
            origins = frozenset({source}) if all(s.innocent for s in inherited) else inherited | {source}
        for tensor, (_, finite, _) in zip(ran.outputs, ran.after, strict=True):
            if finite:
                self._clear(tensor)
            else:
                self._set(tensor, origins)
        self._keep(ran.inner, call, origins)

    def _keep(self, inner: list[Tensor], call: Call, origins: frozenset[Source]) -> None:
        """Remember whose the tensors are that an operator keeps for its backward pass and shows nobody."""
        for tensor in inner:
            self._insides[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), call, origins)

    def _source(self, ran: Ran) -> Source:
        """Return the source that the call is, having computed it again in float64 to tell overflow from the rest."""
        limit = 0.0
        floating = [t.dtype for t in ran.outputs if t.is_floating_point()]
        if floating:
            limit = torch.finfo(floating[0]).max
        nan_only = any(bool(torch.isnan(t).any()) for t in ran.outputs) and not any(
            bool(torch.isinf(t).any()) for t in ran.outputs
        )
        invalid = nan_only
        if len(self.sources) < SOURCES_EXAMINED and (ran.copies is not None or not writes(ran.func)):
            wide = in_float64(ran.func, *(ran.copies or (ran.args, ran.kwargs)))
            if wide is not None:
                invalid = _invalid(spelled(ran.func), ran.call, ran.found, floats(wide))
                # an eps that the format lost: NaN from operators inside, none of which ran over
                lost = nan_only and len(ran.inner) > 1 and not any(bool(torch.isinf(t).any()) for t in ran.inner)
                invalid = invalid or lost
            else:
                invalid = nan_only or spelled(ran.func) in POLES
        name = ""
        largest = max(ran.found, key=lambda tensor: extremes(tensor)[0], default=None)
        if largest is not None and limit and not invalid and extremes(largest)[0] > limit:
            name = self._outside.get(storage(largest), ("", ""))[1]  # what the format of the result cannot hold
        written = any(map(math.isnan, constants((*ran.args, *ran.kwargs.values()))))
        source = Source("operator", ran.order, name, ran.call, invalid or written, limit, written)
        self.sources.append(source)
        return source

    def of(self, tensor: Tensor, call: Call | None) -> frozenset[Source]:
        """Return the sources of a tensor that is not finite."""
        key = storage(tensor)
        kept = self._origins.get(key)
        if kept is not None:
            return kept[1]
        inside = self._insides.get(key)
        if inside is not None and key not in self._outside:
            invalid = extremes(tensor)[2] or inside[1].site.op in POLES
            made = inside[2] or frozenset({Source("operator", self._order, call=inside[1], invalid=invalid)})
            self._set(tensor, made)
            return made
        kind, name = self._outside.get(key, ("constant", ""))
        _, _, nan = extremes(tensor)
        masks = kind in {"buffer", "batch", "constant"} and not nan and not bool((tensor.detach() == math.inf).any())
        source = frozenset({Source(kind, self._order, name, call, masks=masks)})
        self._set(tensor, source)
        return source

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        if held(tensor):
            self._origins[storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), sources)

    def _clear(self, tensor: Tensor) -> None:
        if self._origins and held(tensor):
            if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():  # all of it is written
                self._origins.pop(storage(tensor), None)

    def accused(self, tensor: Tensor) -> list[Source]:
        """Return the sources of `tensor`, a loss or a gradient that is not finite: the first cause first."""
        found = [s for s in self.of(tensor, None) if s.kind != "constant" or s.call is not None]
        found = found or [s for s in self.sources if not s.innocent]  # somebody copied it where nobody looks
        return sorted(found or self.of(tensor, None), key=Source.rank)


def _adds(ran: Ran, inherited: frozenset[Source]) -> bool:
    """Return whether an operator that met infinities made others of its own; note [origins]."""
    op = ran.call.site.op
    if all(s.innocent for s in inherited):
        had_nan = any(nan for _, _, nan in ran.before)
        if any(nan for _, _, nan in ran.after) and not had_nan:
            return not all(s.kind == "batch" for s in inherited) or op in {
                "softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "cross_entropy",
            }  # fmt: skip
    if not pointwise(op) or len(ran.outputs) != 1:
        return False
    try:
        spoiled = torch.zeros_like(ran.outputs[0], dtype=torch.bool)
        for tensor in ran.found:
            spoiled = spoiled | ~torch.isfinite(tensor)
        return spoiled.shape == ran.outputs[0].shape and bool((~torch.isfinite(ran.outputs[0]) & ~spoiled).any())
    except RuntimeError:
        return False


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
