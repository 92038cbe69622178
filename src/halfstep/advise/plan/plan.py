"""`plan`: the memory of a training step under a policy, before training and without that memory.

Input: a task, or a model with batch, loss function and optimizer; output: a `MemoryPlan`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.memory import MemoryPlan, PlanError
from halfstep.advise.plan.run import plan_step
from halfstep.tasks import Task, load_task

__all__ = ["plan"]


def plan(
    what: Task | str | nn.Module | Callable[[], nn.Module],
    batch: tuple[Any, ...] | Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    *,
    policy: hs.Policy | str | Path = "mixed",
    device: str = "",
    **options: Any,
) -> MemoryPlan:
    """Return the memory of a training step of `what` under `policy`; nothing of it is allocated or computed.

    Args:
        what: an hs.Task, its name or ``path.py:function``; a function that returns a model; or a model, which is not
            changed.
        batch: positional arguments of `loss_fn` after the model, or named ones; a task has its own.
        loss_fn: ``loss_fn(model, *batch, **batch)`` returns a 0-dim loss; a task has its own.
        optimizer: returns a torch optimizer over the parameters of the model it is given; a task has its own.
        policy: preset name, TOML path or Policy.
        device: "cpu" or "cuda", whose operators are planned; default: "cpu".
        **options: arguments of hs.TrainStep that change its memory: `accumulate`, `clip_norm`, `clip_value`,
            `update_in_backward`, ...

    Raises:
        PlanError: the step needs values, or arguments that do not fit.
        TaskError, PolicyError, StepError, BindError, UnbuiltError: as the task, the policy and hs.TrainStep raise.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    name = getattr(what, "__name__", type(what).__name__)
    if isinstance(what, str):
        what = load_task(what)
    if isinstance(what, Task):
        name, make = what.name, what.model
        batch, loss_fn, optimizer = batch or what.batches(0, 0), loss_fn or what.loss_fn, optimizer or what.optimizer
        options = {"clip_norm": what.clip_norm, **options}
    elif isinstance(what, nn.Module):
        model, make = what, lambda: _on_fake_tensors(model, mode)
    else:
        make = what
    if batch is None or loss_fn is None or optimizer is None:
        raise PlanError("a plan of a model needs batch=, loss_fn= and optimizer=, a function of the model")
    args, named = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    chosen = hs.Policy.of(policy)
    return plan_step(
        make, optimizer, loss_fn, args, named, mode=mode, name=name, device=device or "cpu", policy=chosen,
        options=options,
    )  # fmt: skip


def _on_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake: Tensor = tensor.new_empty(tensor.shape)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)
