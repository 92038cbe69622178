"""Used: the operators that a task's model and loss call under a policy, how often, and the format of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES
from halfstep.lens import Sink, Tracer
from halfstep.tasks.machine import generators_kept
from halfstep.tasks.task import Task
from halfstep.torch_private.trees import tree_leaves

__all__ = ["Used", "used_operators"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """One operator in one forward pass."""

    calls: int  # how often it was called
    # (format of its result, how often), the most frequent first: "low", "fp32", or a dtype rules never touch
    gives: tuple[tuple[str, int], ...]


class _OperatorCounter(Sink):
    """Counts operators while it is `on`, as the rules of a region call them: cast, and with composites taken apart."""

    def __init__(self) -> None:
        self.on = False
        self.results: dict[str, Counter[str]] = {}

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and count it, if it is an operator, under the format of its result."""
        result = func(*args, **kwargs)
        name = hs.policy.operator_name(func) if self.on else None
        if name is not None:
            self.results.setdefault(name, Counter())[_format(result)] += 1
        return result


def _format(result: Any) -> str:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            low = leaf.dtype in LOW_DTYPES
            return "low" if low else DTYPE_NAMES.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
    return "none"


def used_operators(task: Task, policy: hs.Policy, device: str) -> dict[str, Used]:
    """Train a new model of `task` for one step under `policy` and return what forward pass and loss called.

    fp16 runs as bf16 here: the rules are the same, and emulation would show its own operators.
    """
    if policy.dtype == "fp16":
        policy = hs.Policy.of(policy, dtype="bf16")
    with generators_kept():
        torch.manual_seed(0)
        return _count(task, policy, device)


def _count(task: Task, policy: hs.Policy, device: str) -> dict[str, Used]:
    model, batch = task.model().to(device), task.batch_on(device, 0, 0)
    counter = _OperatorCounter()

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        counter.on = True
        try:
            return task.loss_fn(model, *batch)
        finally:
            counter.on = False

    step = hs.TrainStep(model, task.optimizer(model), loss_fn, policy=hs.Policy.of(policy, emulate="never"))
    with Tracer(counter, above=False):
        step(*batch)
    return {
        name: Used(calls=found.total(), gives=tuple(found.most_common())) for name, found in counter.results.items()
    }
