"""A recorder for CPU tensors that keeps the promises of CUDA graphs: what a capture leaves out, and what a replay does.

While it captures, every operator below autograd is put on a tape, with its tensors. When the capture ends, every tensor
that was there before is as it was, random generators too. A replay runs the tape: the same operators on the same
tensors, results written into the tensors that the capture made; no Python of the step runs. Reading a value during a
capture raises, as CUDA does, and so does a kernel that no warm-up has loaded, as old drivers do. So whatever a step
bakes into a graph by mistake (a number, an address, a stale copy) shows as a difference from eager training.

A kernel is an operator with what Triton, or torch, compiles or loads another one for (`variant`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]

VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # a graph's kernels count no versions
UNDECLARED = frozenset({"running_mean", "running_var"})  # torch's batch norms write into them and do not declare it


class CaptureError(RuntimeError):
    """What CUDA says of an operation that waits."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for i, argument in enumerate(schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or argument.name in UNDECLARED:
            found += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def variant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the operator with its arguments: formats of tensors, text, truth, and the types of all others.

    Of tensors that a kernel of halfstep gets directly, also whether they begin at a multiple of 16 bytes.
    """
    triton = func.namespace == "halfstep"

    def form(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return value.dtype, triton and value.data_ptr() % 16 == 0
        if isinstance(value, (list, tuple)):
            return frozenset(v.dtype if isinstance(v, Tensor) else type(v).__name__ for v in value)
        return value if isinstance(value, (str, bool)) else type(value).__name__

    return func, tuple(map(form, args)), tuple((name, form(value)) for name, value in sorted(kwargs.items()))


class _Mode(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs inside; torch would run the loss eagerly in another mode."""
        return True


class _Loading(_Mode):
    """Notes the kernels that are loaded; holds results as the tape does, because autograd copies a gradient so held."""

    def __init__(self, loaded: set[Hashable]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.loaded = loaded
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.loaded.add(variant(func, args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.held.append((args, kwargs, result))
        return result


class _Tape(_Mode):
    def __init__(self, loaded: set[Hashable]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.loaded = loaded
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}  # storages that the capture made, by address; held, so that none comes twice
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what it has written into, and the value that was there

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func in {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}:
            raise CaptureError("operation not permitted when stream is capturing")
        if not func.is_view and (kernel := variant(func, args, kwargs)) not in self.loaded:  # a view launches nothing
            raise CaptureError(f"no warm-up has loaded {kernel}, and no kernel may be loaded when stream is capturing")
        for tensor in _written(schema, args, kwargs):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.made and address not in self.before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.before[address] = (whole, whole.clone())
        result = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in known]
        for tensor in fresh:
            self.made[tensor.untyped_storage().data_ptr()] = tensor
        if fresh or schema.is_mutable:
            self.calls.append((func, args, dict(kwargs), fresh))
        return result


class TapeRecorder:
    """Records on a tape; counts what it was asked for.

    Attributes:
        warmed, captured, replayed: how many calls of each verb there were.
        loaded: the kernels that warm-ups have called.
    """

    def __init__(self, device: torch.device) -> None:
        self.warmed = self.captured = self.replayed = 0
        self.loaded: set[Hashable] = set()

    def warm(self, function: Callable[[], T]) -> T:
        self.warmed += 1
        with _Loading(self.loaded):
            return function()

    def capture(self, function: Callable[[], T], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], T]:
        random = [torch.default_generator, *generators]
        states = [generator.get_state() for generator in random]
        tape = _Tape(self.loaded)
        try:
            with tape:
                result = function()
        finally:
            for tensor, value in tape.before.values():
                tensor.copy_(value)
            for generator, state in zip(random, states, strict=True):
                generator.set_state(state)
        tape.calls = [
            _pytree.tree_map_only(torch.nn.Parameter, Tensor.detach, call) for call in tape.calls
        ]  # not kept alive
        for tensor in tape.made.values():  # nothing has happened yet, so nothing is in there
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with (
                torch.no_grad(),
                torch.autocast("cpu", enabled=False),
                torch._C._AutoDispatchBelowAutograd(),
                torch._C._ExcludeDispatchKeyGuard(VERSIONS),
            ):
                for func, args, kwargs, fresh in tape.calls:
                    again = func(*args, **kwargs)
                    if fresh:
                        for static, new in zip(_fresh_of(_tensors(again), args, kwargs), fresh, strict=True):
                            new.copy_(static)

        return replay, result


def _fresh_of(made: list[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
    return [t for t in made if t.untyped_storage().data_ptr() not in known]
