"""Trace: the instruments of one replay: which operator, where, made the first value that is not finite, and spoiled it.

Two modes look on. A `TorchFunctionMode` above all regions sees operators as the user calls them, with module and line,
and writes both into the `metadata` of the autograd nodes each call makes. A `TorchDispatchMode` sees what the backward
pass runs; the node that is running says by its metadata which call it belongs to. What that means for who is to blame
is worked out by `Origins`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.cast.rules.recipe import unreported
from halfstep.cast.state import STATE
from halfstep.lens.box.origins import Call, Origins, Ran
from halfstep.lens.sites import (
    RUNS_BACKWARD,
    TAG,
    Site,
    line_of,
    name_of_node,
    public,
    region_here,
    spelled,
    tag,
    user_frame,
)
from halfstep.lens.values import copied, described, extremes, floats, held, read, writes
from halfstep.policy.policy import Policy
from halfstep.trees import map_tensors, tensors

__all__ = ["Trace"]

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
