"""A slow, simple second opinion on the truth of list A: which call, on which line, first made a non-finite number.

It only serves to check the seeded faults themselves. Forward: a function mode around loss_fn looks at every call above
the policy's rules. Backward: a hook on every node of the graph looks at what comes in and what goes out; the line is
the one that made the node, as autograd's anomaly mode notes it. Infinite constants are no fault here, nor is
what is made of infinite inputs unless it is NaN.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import halfstep as hs

__all__ = ["Sight", "Witness"]

HERE = Path(__file__).parent
OURS = {"case.py", "observe.py", "witness.py", "test_faults.py"}
MAKES_CONSTANTS = {"masked_fill", "masked_fill_", "full", "full_like", "tensor", "new_full", "fill_", "pad", "where"}


@dataclass(frozen=True)
class Sight:
    """A call, or a node of the graph, that made a non-finite tensor of finite ones."""

    op: str
    module: str
    file: str
    line: int


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t.detach()).all()) for t in _tensors(value) if t.is_floating_point())


def _nan(value: Any) -> bool:
    return any(bool(torch.isnan(t.detach()).any()) for t in _tensors(value) if t.is_floating_point())


def _constants(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _constants(part)


class Witness(TorchFunctionMode):
    """Watches one loss_fn and its backward pass; `forward` and `backward` are what was seen, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.forward: list[Sight] = []
        self.backward: list[Sight] = []
        self._names = {id(m): n for n, m in model.named_modules()}
        self._stack: list[str] = []
        self._turned = False  # the forward pass is over
        self._behind = Behind(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        constants = list(_constants((args, tuple(kwargs.values()))))
        clean = _finite((args, kwargs)) and all(math.isfinite(c) for c in constants)
        no_nan = not _nan((args, kwargs))
        result = func(*args, **kwargs)
        name = hs.policy.operator_name(func) or str(getattr(func, "__name__", "?"))
        made = (clean and not _finite(result)) or (no_nan and _nan(result))
        if made and name not in MAKES_CONSTANTS and name != "backward":
            self._note(name)
        return result

    def _note(self, name: str) -> None:
        file, line = self._place()
        if not self._turned:
            self.forward.append(Sight(name, self._stack[-1] if self._stack else "", file, line))
        elif file:  # the program's own backward function; the work of the step has no line of the program
            self.backward.append(Sight(name, "", file, line))

    @staticmethod
    def _place() -> tuple[str, int]:
        frame = sys._getframe(3)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if HERE in path.parents and path.name not in OURS:
                return path.name, frame.f_lineno
            if frame.f_back is None:
                break
            frame = frame.f_back
        return "", 0

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._stack:
            self._stack.pop()

    def watching(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `loss_fn` under watch, its graph too."""

        def watched(model: nn.Module, *batch: Any) -> Any:
            with self:
                loss = loss_fn(model, *batch)
            self._turned = True
            self._stack.clear()
            for node in _nodes(loss.grad_fn):
                node.register_hook(self._hook(node))
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    node.register_prehook(self._watch_code)
            return loss

        return watched

    def step(self, step: hs.TrainStep, batch: tuple[Any, ...]) -> None:
        """Run one watched step; its earlier sights are forgotten."""
        self.forward.clear()
        self.backward.clear()
        self._turned = False
        step(*batch)

    def _watch_code(self, grad_outputs: Any) -> None:
        self._behind.__enter__()  # type: ignore[no-untyped-call]

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            if _get_current_function_mode_stack():
                self._behind.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if _finite(grad_outputs) and not _finite(grad_inputs):
                file, line = _origin(node.metadata.get("traceback_", []))
                self.backward.append(Sight(node.name(), "", file, line))

        return hook

    @contextmanager
    def on(self) -> Iterator[Witness]:
        """Note modules and the origin of graph nodes while the block runs."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        try:
            yield self
        finally:
            torch.autograd.set_detect_anomaly(False)
            for handle in handles:
                handle.remove()


class Behind(TorchFunctionMode):
    """Looks at what Python code computes during the backward pass.

    It is entered and left by hooks of one node: a mode around ``loss.backward()`` is off while that call runs.
    """

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self._witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._witness.__torch_function__(func, types, args, kwargs)


def _nodes(root: Any) -> list[Any]:
    seen, found, rest = set(), [], [root]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(node)
        rest.extend(following for following, _ in node.next_functions)
    return found


def _origin(traceback: list[str]) -> tuple[str, int]:
    """Return the innermost line of a fault's program in a printed traceback."""
    for entry in reversed(traceback):
        head = entry.strip().splitlines()[0]
        if not head.startswith('File "'):
            continue
        path = Path(head.split('"')[1])
        if HERE in path.parents and path.name not in OURS:
            return path.name, int(head.split("line ")[1].split(",")[0])
    return "", 0
