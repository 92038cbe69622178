"""Tracing: a `Tracer` hands every operator that a block calls to a `Sink`, with its module and its line.

At the level of functions a call arrives as the user's program makes it, before any rule and any autocast:
`Sink.function`. At the level of kernels it arrives as torch's dispatcher runs it, forward and backward, with the
tensors it works on: `Sink.kernel`. A tracer switches on the levels whose method its sink defines. A sink runs each call
itself, so it can change the arguments, look at the result, or refuse.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from halfstep.arguments import MODEL, check
from halfstep.cast.rules.recipe import unreported
from halfstep.cast.state import STATE
from halfstep.errors import AuditError, ours
from halfstep.lens.calls import Args, Kwargs
from halfstep.policy.operators import known, operator_name
from halfstep.torch_private.modes import TorchDispatchMode, peek_interpreter_stack

OPENED = frozenset({F.multi_head_attention_forward, F.normalize, F.gumbel_softmax})
"""Python functions of torch that report themselves as one operator and are made of several."""

CONVERSIONS = dict.fromkeys(("to", "type", "half", "bfloat16", "long", "int", "short"), "to")
"""Methods by which user code changes a format: no operators of a policy, but they round."""


class Sink:
    """What a tracer hands calls to. The methods of this class run each call and do nothing else.

    Attributes:
        tracer: the tracer that hands calls to this sink; it is set while the tracer is open.
    """

    tracer: Tracer

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch as the program calls it, and return its result."""
        return func(*args, **kwargs)

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an overload of torch.ops as the dispatcher calls it, and return its result.

        Args:
            func: the overload.
            types: tensor subclasses among the arguments.
            args: its arguments.
            kwargs: its named arguments.
        """
        return func(*args, **kwargs)

    def entering(self, module: nn.Module) -> None:
        """Note that the forward pass of `module` begins; `Tracer.running` ends with the module that calls it."""

    def left(self, module: nn.Module) -> None:
        """Note that the forward pass of `module` has ended, or has raised; it is no longer in `running`."""


class Tracer:
    """Hands what a block calls in this thread to a sink. It can be opened again after it was closed.

    Args:
        sink: receives the calls.
        model: gives modules their names; None: all have the name "".
        above: whether functions are handed on as the program calls them; False: as the rules of the regions that are
            opened inside call them, with arguments that the rules have cast.

    A module that occurs at several places of the model has the first of its names. A module outside the model has the
    name of the module that calls it.

    Attributes:
        names: id of a module -> its dotted name.
        running: (id, name, how often it was entered) of the modules whose forward pass runs, outermost first.
        below: the mode that was above all regions when this tracer was opened, None if there was none.

    Examples:
        >>> class Names(hs.lens.OperatorSink):
        ...     def operator(self, call, func, args, kwargs):
        ...         print(call.module, call.op)
        ...         return func(*args, **kwargs)
        >>> with hs.lens.Tracer(Names(), model):
        ...     out = model(x)
        0 linear
        1 relu
        2 linear
    """

    def __init__(self, sink: Sink, model: nn.Module | None = None, *, above: bool = True) -> None:
        given: Any = model
        if not isinstance(given, nn.Module | None):
            check("Tracer", AuditError, model=(model, MODEL))
        self.sink, self.above = sink, above
        self.running: list[tuple[int, str, int]] = []
        self._entered = Counter[int]()
        self.follow(model or nn.Module())
        self.below: Any = None
        self._functions = FunctionMode(sink)
        self._exits = ExitStack()

    def __enter__(self) -> Tracer:
        """Begin to hand on calls."""
        kind, exits = type(self.sink), self._exits
        self.sink.tracer = self
        exits.callback(register_module_forward_pre_hook(self._enter).remove)
        exits.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        if kind.kernel is not Sink.kernel:
            exits.enter_context(KernelMode(self.sink))
        if kind.function is not Sink.function:
            if self.above:
                self.below = STATE.above
                exits.callback(setattr, STATE, "above", self.below)
            exits.enter_context(self._functions)
            STATE.above = self._functions if self.above else STATE.above
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop, and leave everything as it was."""
        self._exits.close()
        del self.sink.tracer  # which would keep each alive by the other
        self.running.clear()

    def follow(self, model: nn.Module) -> None:
        """Take the names of the modules of `model` in place of all others."""
        self._model = model  # kept alive, so that no id is used twice
        self.names = {id(module): name for name, module in model.named_modules()}

    @property
    def module(self) -> str:
        """The name of the module that runs; "" outside of all modules."""
        return self.running[-1][1] if self.running else ""

    @property
    def entry(self) -> int:
        """How often the module that runs has been entered; 0 outside of all modules."""
        return self.running[-1][2] if self.running else 0

    def parts(self) -> AbstractContextManager[Any]:
        """Return a context in which a sink that runs a function receives the functions that it calls in turn."""
        return self._functions

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.sink.entering(module)
        self._entered[id(module)] += 1
        self.running.append((id(module), self.names.get(id(module), self.module), self._entered[id(module)]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running and self.running[-1][0] == id(module):  # not of a module that ran before the tracer began
            self.running.pop()
        self.sink.left(module)


class FunctionMode(TorchFunctionMode):
    """Hands the functions that are called to a sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.sink = sink

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.sink.function(func, args, kwargs or {})


class KernelMode(TorchDispatchMode):
    """Hands the kernels that the dispatcher runs to a sink; for a block without modules it does without a `Tracer`."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its type out
        self.sink = sink

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.sink.kernel(func, types, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        module: dotted name of the innermost module that runs.
        op: public short name of the operator.
        nth: which call of this operator in this module it is, from 0.
        line: "file.py:12 source text" of the innermost frame that is neither torch's nor halfstep's.
        in_place: whether it writes into its first argument.
    """

    module: str
    op: str
    nth: int
    line: str
    in_place: bool = False


class OperatorSink(Sink):
    """Receives the operators that a program calls, before any rule, and other functions apart from them.

    Composites such as multi_head_attention_forward are opened, so that their parts arrive. Functions that run inside a
    transform of torch.func, or inside an operator, do not arrive.

    Args:
        closed: names of composites that arrive whole.

    Examples:
        >>> class Count(hs.lens.OperatorSink):
        ...     calls = 0
        ...     def operator(self, call, func, args, kwargs):
        ...         self.calls += 1
        ...         return func(*args, **kwargs)
        >>> with hs.lens.Tracer(count := Count(), model):
        ...     out = model(x)
        >>> count.calls
        3
    """

    def __init__(self, closed: Collection[str] = frozenset()) -> None:
        self.closed = closed
        self.begin()

    def begin(self) -> None:
        """Count calls from zero again."""
        self._counts = Counter[tuple[str, str]]()
        self._inside = False  # an operator

    def operator(self, call: OperatorCall, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and return its result."""
        return func(*args, **kwargs)

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is no operator (a view, a factory, a query), and return its result."""
        return func(*args, **kwargs)

    def line(self) -> str:
        """Return the user's line that calls an operator, for `OperatorCall.line`."""
        return user_line()

    def nth(self, module: str, op: str) -> int:
        """Return how many calls of `op` there were in `module`, and count one more."""
        key = module, op
        self._counts[key] += 1
        return self._counts[key] - 1

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand a function on to `operator` or `other`."""
        if self._inside or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        op, in_place = named(func)
        if not op:
            return self.other(func, args, kwargs)
        if func in OPENED and op not in self.closed:
            with self.tracer.parts():
                return unreported(func)(*args, **kwargs)
        module = self.tracer.module
        call = OperatorCall(module, op, self.nth(module, op), self.line(), in_place)
        self._inside = True
        try:
            return self.operator(call, func, args, kwargs)
        finally:
            self._inside = False


@lru_cache(maxsize=4096)
def named(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return the operator that `func` is a spelling of, "" for none, and whether it works in place."""
    op, name = operator_name(func), getattr(func, "__name__", "")
    if op is not None or name in CONVERSIONS:
        return op or CONVERSIONS[name], False
    stem = name.removeprefix("__i").removesuffix("__") if name.startswith("__i") else name.removesuffix("_")
    stem = {"truediv": "div"}.get(stem, stem)
    return (stem, True) if stem != name and not stem.endswith("_") and stem in known() else ("", False)


def user_frame(start: FrameType | None = None, outside: tuple[str, ...] = ()) -> FrameType | None:
    """Return the innermost frame of the user's program, None if there is none.

    Args:
        start: where to begin; None: at the caller.
        outside: where the names of files begin that are not the user's; (): those of torch and halfstep.

    Examples:
        >>> frame = hs.lens.user_frame()
    """
    frame: FrameType | None = start or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith(outside) if outside else ours(name)):
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType | None) -> str:
    """Return where a frame is, "file.py:12 source text"; "" for None."""
    if frame is None:
        return ""
    filename, number = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(filename)}:{number} {linecache.getline(filename, number).strip()}".rstrip()


def user_line(outside: tuple[str, ...] = ()) -> str:
    """Return the line of the user's program that led to this call: "file.py:12 source text", "" if there is none.

    Args:
        outside: where the names of files begin that are not the user's; (): those of torch and halfstep.

    Examples:
        >>> where = hs.lens.user_line()  # such as "train.py:12 loss.backward()"
    """
    return line_of(user_frame(sys._getframe(1), outside))


def raised_at(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost line outside torch and halfstep that an exception has passed, None if there is none.

    Examples:
        >>> try:
        ...     model(x.T)
        ... except RuntimeError as error:
        ...     line = hs.lens.raised_at(error)
    """
    passed = reversed(traceback.extract_tb(error.__traceback__))
    return next((line for line in passed if not (ours(line.filename) or line.filename.startswith("<"))), None)


def file_of(line: str) -> str:
    """Return the path of the file that a result of `line_of` is in; "" if that is not known."""
    place, _, text = line.partition(" ")
    name, _, number = place.rpartition(":")
    for path in list(linecache.cache):
        if os.path.basename(path) == name and linecache.getline(path, int(number)).strip() == text:
            return path
    return ""
