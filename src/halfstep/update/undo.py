"""Whether an optimizer that raised had written already: torch counts the writes to each tensor in its `_version`.

Marks tell a step that changed nothing from one after which a checkpoint must be loaded; no tensor is copied.
"""

from __future__ import annotations

from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch_private.modules import WRAPPED
from halfstep.weights import WeightStore

COMPARED_TYPES = (int, float, bool, str, type(None))
ATTRIBUTES = ("grad_scale", "found_inf")  # torch's protocol of scaled steps, see `scale.fused`
COUNTED = ("torch.optim", "halfstep")  # optimizers of these packages write by operators that count their writes


class Marks:
    """How often everything that an optimizer may write to had been written to, before its step."""

    __slots__ = ("_attributes", "_entered", "_handle", "_optimizer", "_parts", "_states")

    def __init__(self, optimizer: Optimizer, store: WeightStore | None) -> None:
        self._optimizer = optimizer
        parts: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        if store is not None:
            pairs = [store.parts(p) if p in store else (p, None) for p in parts]  # type: ignore[arg-type]
            parts = [part for pair in pairs for part in pair if part is not None]
        self._parts = [(part, part._version) for part in parts]
        self._states = [
            (state, dict(state), [v._version if isinstance(v, Tensor) else None for v in state.values()])
            for state in optimizer.state.values()
            if state is not None  # ZeroRedundancyOptimizer: another rank has it
        ]
        own = vars(optimizer)
        self._attributes = {name: own[name] for name in ATTRIBUTES if name in own}
        # the last of its hooks before the step; without hooks its code is entered at once
        replaced = "step" in own and not hasattr(own["step"], WRAPPED)
        self._entered = replaced or not getattr(type(optimizer).step, "hooked", False)
        self._handle = None if self._entered else optimizer.register_step_pre_hook(self._enter)

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._entered = True

    def end(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    def moved(self) -> bool:
        """Return whether the step has changed anything, or may have, but states it made, which `restore` removes."""
        if not self._entered:
            return False
        if not _counts_writes(self._optimizer) or any(part._version != version for part, version in self._parts):
            return True
        return any(
            not _same(state.get(name, self), value) or (version is not None and value._version != version)
            for state, before, versions in self._states
            for (name, value), version in zip(before.items(), versions, strict=True)
        )

    def restore(self) -> None:
        """Remove what a step that has not moved anything has made: states, and attributes for scaled steps."""
        self.end()
        known = {id(state): before for state, before, _ in self._states}
        for parameter, state in list(self._optimizer.state.items()):
            if state is None:
                continue
            if id(state) not in known:
                del self._optimizer.state[parameter]
            elif len(state) != len(known[id(state)]):
                for name in [name for name in state if name not in known[id(state)]]:
                    del state[name]
        for name in ATTRIBUTES:
            vars(self._optimizer).pop(name, None)
        vars(self._optimizer).update(self._attributes)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, COMPARED_TYPES) and now == before)


def _counts_writes(optimizer: Optimizer) -> bool:
    """Return whether torch counts what `optimizer` writes: not through ``.data``, in fused forms (2.13), by kernels."""
    own = vars(optimizer)
    if "step" in own and not hasattr(own["step"], WRAPPED):
        return False  # replaced by a function that may do anything
    if any(group.get("fused") for group in optimizer.param_groups):
        return False
    kinds = type(optimizer).__mro__
    root = kinds[kinds.index(Optimizer) - 1]
    if not root.__module__.startswith(COUNTED):
        return False
    others = [kind for kind in kinds[: kinds.index(root)] if not kind.__module__.startswith(COUNTED)]
    functions = [unwrap(f) for kind in others for f in vars(kind).values() if isinstance(f, FunctionType)]
    return all("data" not in function.__code__.co_names for function in functions)
