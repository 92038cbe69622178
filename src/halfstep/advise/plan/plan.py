"""`plan`: the memory of a training step under a policy, before training and without that memory.

Input: a task, or a model with batch, loss function and optimizer; output: a `MemoryPlan`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.batches import batch_size as size_of
from halfstep.advise.plan.batches import with_size
from halfstep.advise.plan.fit import fit_of
from halfstep.advise.plan.gpus import gpu_named
from halfstep.advise.plan.memory import MemoryPlan, PlanError
from halfstep.advise.plan.run import plan_step
from halfstep.advise.plan.ways import way_of
from halfstep.tasks import Task, load_task

__all__ = ["plan"]

OTHER_KERNELS = (
    "planned with the operators of a CPU: a GPU's attention, dropout and batch norm may keep other tensors for the "
    "backward pass, and its kernels take workspaces of their own"
)
SAME_SIZE = "planned in bf16, which has the size of fp16: a CPU emulates fp16 with fp32 temporaries"
"""Notes of a plan for a GPU."""


def plan(
    what: Task | str | nn.Module | Callable[[], nn.Module],
    batch: tuple[Any, ...] | Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    *,
    policy: hs.Policy | str | Path = "mixed",
    device: str = "",
    devices: int = 1,
    shard: str = "none",
    units: Iterable[str | nn.Module] | None = None,
    gpu: str = "",
    batch_size: int | None = None,
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
        devices: how many train together; bytes are those of the first, which has the largest part.
        shard: how: "ddp" (`DistributedDataParallel`, torch's defaults) or "fsdp2" (`hs.shard`); "none" for one device.
        units: as `hs.shard` takes them: the modules that are gathered one after the other.
        gpu: name of a GPU ("h200", "a100-80", "t4", ... or a size as "96GiB"): the plan's `fit` says whether it fits.
        batch_size: a size for the batch in the place of its own; each device has one.
        **options: arguments of hs.TrainStep that change its memory: `accumulate`, `clip_norm`, `clip_value`,
            `update_in_backward`, ...

    Raises:
        PlanError: the step needs values, an unknown GPU, devices without `shard` or the other way round, a process
            group where `shard="fsdp2"` needs its own, or arguments that do not fit.
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
    args, named = (args, named) if batch_size is None else with_size((args, named), batch_size)
    chosen = hs.Policy.of(policy)
    card = gpu_named(gpu) if gpu else None
    traced, notes = _on_card(chosen, device or "cpu") if card is not None else (chosen, ())
    with way_of(shard, devices, device or "cpu", units) as way:
        made = plan_step(
            make, optimizer, loss_fn, args, named, mode=mode, name=name, device=device or "cpu", policy=traced,
            options=options, way=way,
        )  # fmt: skip
    made = replace(
        made, policy=made.policy if traced is chosen else chosen, devices=devices, shard=shard,
        batch_size=size_of((args, named)), notes=(*made.notes, *notes),
    )  # fmt: skip
    return made if card is None else replace(made, fit=fit_of(made, card))


def _on_card(policy: hs.Policy, device: str) -> tuple[hs.Policy, tuple[str, ...]]:
    """Return the policy to trace for a GPU with the operators of `device`, and what that leaves out."""
    if device != "cpu":
        return policy, ()
    if policy.dtype != "fp16":
        return policy, (OTHER_KERNELS,)
    master = "master" if policy.master == "auto" else policy.master  # "auto" is "split" in bf16
    return hs.Policy.of(policy, dtype="bf16", master=master), (OTHER_KERNELS, SAME_SIZE)


def _on_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        fake: Tensor = tensor.new_empty(tensor.shape)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)
