"""`plan`: the memory of a training step under a policy, before training and without that memory."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.elsewhere import attempt, elsewhere
from halfstep.advise.plan.fit import Gpu, fit_of, gpu_named, largest_batch
from halfstep.advise.plan.ledger import PlanError
from halfstep.advise.plan.memory import MemoryPlan
from halfstep.advise.plan.ranks import fake_ranks
from halfstep.advise.plan.run import plan_step, refuse_sharded
from halfstep.advise.plan.trace import LARGEST
from halfstep.arguments import CALLABLE, COUNT, FLAG, NONE, TEXT, Kind, a, check, one_of
from halfstep.lens import raised_at
from halfstep.tasks import Task, load_task
from halfstep.testing import FakeCudaError, fake_cuda
from halfstep.torch_private.fake import FakeTensorMode
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

OTHER_KERNELS = (
    "planned with the operators of a CPU: a GPU's attention, dropout and batch norm may keep other tensors for the "
    "backward pass, and its kernels take workspaces of their own"
)
SAME_SIZE = "planned in bf16, which has the size of fp16: a CPU emulates fp16 with fp32 temporaries"
"""Notes of a plan for a GPU with the operators of a CPU."""

A_GPU = (
    "planned on a fake GPU of compute capability 9.0 with Triton; not counted are workspaces of cuDNN and cuBLAS, "
    "buffers of NCCL, and holes between blocks of torch's allocator"
)
COMPILED = (
    "planned as eager code: what torch.compile fuses keeps fewer tensors for the backward pass, and the first step, "
    "in which it compiles, takes more"
)
ON_HOST = "state='host' moves nothing on a CPU, and device='cuda' plans what it saves"
"""Assumptions of a plan, which its notes name."""


def plan(
    what: Task | str | nn.Module | Callable[[], nn.Module],
    batch: tuple[Any, ...] | Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]] | None = None,
    *,
    policy: hs.Policy | str | Path = "mixed",
    device: str = "cpu",
    devices: int = 1,
    shard: str = "none",
    units: Sequence[str] | None = None,
    gpu: str = "",
    batch_size: int | None = None,
    largest: bool = False,
    **options: Any,
) -> MemoryPlan:
    """Return the memory of a training step of `what` under `policy`; nothing of it is allocated or computed.

    Two updates are traced on fake tensors, block by block. A CPU is planned as it runs here; a GPU in a process of its
    own, on a fake one of compute capability 9.0, with the operators and formats of a GPU, blocks in multiples of 512
    bytes as torch's allocator hands them out, and without cuDNN's and cuBLAS's workspaces.

    Args:
        what: an hs.Task, its name or ``path.py:function``; a function that returns a model; or a model, which is not
            changed.
        batch: positional arguments of `loss_fn` after the model, or named ones, with tensors on the CPU: masks and
            other small integers are read by some models. A task has its own.
        loss_fn: ``loss_fn(model, *batch, **batch)`` returns a 0-dim loss; a task has its own.
        optimizer: returns a torch optimizer over the parameters of the model it is given, or several as hs.TrainStep
            takes them; a task has its own.
        policy: preset name, TOML path or Policy.
        device: "cpu" or "cuda".
        devices: how many train together; bytes are those of the first, which has the largest part.
        shard: how: "ddp" (`DistributedDataParallel`, torch's defaults) or "fsdp2" (`hs.shard`); "none" for one device.
        units: patterns of the modules that are gathered one after the other, as `hs.shard` takes them.
        gpu: name of a GPU ("h200", "a100-80", "t4", ... or a size as "96GiB"): `fit` of the plan says whether it fits.
        batch_size: a size for the batch in the place of its own; each device has one.
        largest: whether to look for the largest batch that fits `gpu`, by planning others too: `largest` of the plan.
        **options: arguments of hs.TrainStep that change its memory: `accumulate`, `clip_norm`, `clip_value`, `retry`,
            `update_in_backward`; and `compile`, which a plan takes for eager code.

    Raises:
        PlanError: the step needs values that depend on weights, parameters are DTensors already, arguments do not fit,
            unknown GPU, devices without `shard` or the other way round, or a process group where ``shard="fsdp2"``
            needs its own.
        TaskError, PolicyError, StepError, BindError, UnbuiltError: as the task, the policy and hs.TrainStep raise.

    Examples:
        >>> plan = hs.plan(model, (x, y), loss_fn, lambda model: torch.optim.AdamW(model.parameters()), policy="O2")
        >>> plan.peak_bytes > plan.persistent_bytes
        True
    """
    request = locals()
    (found,) = plan_each([{**request.pop("options"), **request}])
    if isinstance(found, Exception):
        raise found
    return found


def plan_each(requests: list[dict[str, Any]]) -> list[MemoryPlan | Exception]:
    """Return the plan of each request, arguments of `plan`, or its error; one process makes all those for a GPU."""
    checked = [attempt(_checked, request=request) for request in requests]
    there = [one for one in checked if isinstance(one, dict) and one["device"] == "cuda"]
    answers = iter(elsewhere(_planned, there) if there and not _has_fake_gpu() else ())
    found: list[MemoryPlan | Exception] = []
    for one in checked:
        if isinstance(one, dict):
            answer = next(answers, None) if one["device"] == "cuda" else None
            one = attempt(_planned, **one) if answer is None else answer
        found.append(one)
    return found


def _has_fake_gpu() -> bool:
    with suppress(FakeCudaError), fake_cuda():
        return True
    return False


def _checked(request: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(plan).bind(**request)
    bound.apply_defaults()
    given = bound.arguments
    what, batch, loss_fn, optimizer, policy, device, devices, shard, units, gpu, size, largest, options = given.values()
    check("hs.plan", PlanError, shard=(shard, one_of("none", "ddp", "fsdp2")), devices=(devices, COUNT))
    if devices == 1 and shard != "none":
        raise PlanError(f"shard={shard!r} needs devices=2 or more, and devices is 1")
    if devices > 1 and shard == "none":
        raise PlanError(f"devices={devices} need a way to share the work: shard='ddp' or shard='fsdp2'")
    if units is not None and shard != "fsdp2":
        raise PlanError("units= name what hs.shard gathers together; they need shard='fsdp2'")
    check(
        "hs.plan",
        PlanError,
        batch=(batch, a(tuple, list, Mapping, words="a tuple of arguments or a dict of named ones") | NONE),
        loss_fn=(loss_fn, CALLABLE | NONE),
        optimizer=(optimizer, Kind("a function that returns an optimizer", callable) | NONE),
        device=(device, one_of("cpu", "cuda")),
        gpu=(gpu, TEXT),
        batch_size=(size, COUNT | NONE),
        largest=(largest, FLAG),
    )
    if shard == "fsdp2" and device != "cpu":
        raise PlanError("fully_shard needs streams, which the fake GPU does not have; leave device= out")
    if largest and not gpu:
        raise PlanError("the largest batch that fits needs a GPU; name one: gpu='h200'")
    for name in ("cuda_graph", "blackbox", "scheduler", "scaler"):  # a graph keeps memory of its own
        if options.pop(name, None):
            raise PlanError(f"a plan does not take {name}=; a step without it is planned")
    if not isinstance(what, (str, Task, nn.Module)) and not callable(what):
        raise PlanError(f"expected an hs.Task, its name, a model or a function that returns one, and got {what!r}")
    missing = [name for name in ("batch", "loss_fn", "optimizer") if given[name] is None]
    if isinstance(what, (str, Task)):
        if len(missing) < 3:
            raise PlanError("a task has its own batch, loss_fn and optimizer; leave them out, or plan its model")
        if isinstance(what, str):
            load_task(what)
    elif missing:
        raise PlanError(f"a plan of a model also needs {', '.join(f'{name}=' for name in missing)}")
    if isinstance(what, nn.Module):
        refuse_sharded(what)
        if hs.prepared_policy(what) is not None:
            raise PlanError("this model is prepared already; plan a new one, which the plan prepares")
        what = _copied(what, partial(torch.empty_like, device="meta"))
    elif not isinstance(what, (str, Task)) and isinstance(what, type) and not issubclass(what, nn.Module):
        raise PlanError(f"expected a function that returns a model, and got the class {what.__name__}")
    card = gpu_named(gpu) if gpu else None
    return {**given, "what": what, "policy": hs.Policy.of(policy), "gpu": card}


def _planned(
    what: Any, batch: Any, loss_fn: Any, optimizer: Any, policy: hs.Policy, device: str, devices: int, shard: str,
    units: Sequence[str] | None, gpu: Gpu | None, batch_size: int | None, largest: bool, options: dict[str, Any],
) -> MemoryPlan:  # fmt: skip
    task = load_task(what) if isinstance(what, str) else what
    if isinstance(task, Task):
        name, make, batch, loss_fn, optimizer = task.name, task.model, task.batches(0, 0), task.loss_fn, task.optimizer
        options = {"clip_norm": task.clip_norm, **options}
    elif isinstance(task, nn.Module):
        name, make = type(task).__name__, partial(_copied, task, partial(torch.empty_like, device=device))
    else:
        name, make = getattr(task, "__name__", type(task).__name__), task
    whole = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    on_card, notes = (policy, ()) if gpu is None else _on_card(policy, device)
    notes += (A_GPU,) * (device != "cpu") + (COMPILED,) * bool(options.pop("compile", None))
    notes += (ON_HOST,) * (device == "cpu" and options.get("state") == "host")

    def plan_of(size: int | None) -> MemoryPlan:
        inputs = whole if size is None else _with_size(whole, size)
        with fake_ranks(devices, device) if shard == "fsdp2" else nullcontext() as mesh, _tracing(device):
            made = plan_step(
                make, optimizer, loss_fn, *inputs, device=device, policy=on_card, options=options, devices=devices,
                shard=shard, units=units, mesh=mesh, name=name, batch_size=_size(inputs),
            )  # fmt: skip
        made = replace(made, policy=made.policy if on_card is policy else policy, notes=(*made.notes, *notes))
        return made if gpu is None else replace(made, fit=fit_of(made, gpu))

    found = plan_of(batch_size)
    if gpu is None or not largest or not found.batch_size:
        return found
    return replace(found, largest=largest_batch(plan_of, found, found.batch_size, gpu))


def _size(batch: Any) -> int:
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.dim()), 0)


def _with_size(batch: Any, size: int) -> Any:
    """Return `batch` with `size` rows instead of its own: they are repeated, of a large tensor on the meta device."""
    old = _size(batch)
    if not old:
        why = "none of its tensors has a dimension; give a batch of it"
        raise PlanError(f"the batch cannot be given size {size}: {why}")

    def sized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        shape = (size, *tensor.shape[1:])
        if tensor.is_meta or math.prod(shape) > LARGEST:
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(size) % old]

    return tree_map_only(Tensor, sized, batch)


def _on_card(policy: hs.Policy, device: str) -> tuple[hs.Policy, tuple[str, ...]]:
    """Return the policy to trace for a GPU with the operators of `device`, and what that leaves out."""
    if device != "cpu":
        return policy, ()
    if policy.dtype != "fp16":
        return policy, (OTHER_KERNELS,)
    as_fp16 = {"master": "master"} if policy.params == "low" and policy.master == "auto" else {}  # else it is "split"
    return hs.Policy.of(policy, dtype="bf16", **as_fp16), (OTHER_KERNELS, SAME_SIZE)


@contextmanager
def _tracing(device: str) -> Iterator[None]:
    log = logging.getLogger(fake_tensor.__name__)
    quiet, log.disabled = log.disabled, True  # torch logs the traceback of an error that is raised too
    try:
        with fake_cuda() if device == "cuda" else FakeTensorMode(allow_non_fake_inputs=True), catch_warnings():
            filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)  # of copy.deepcopy(layer)
            yield
    except hs.HalfstepError:
        raise
    except Exception as error:  # of the task's own functions, of torch, or a wrong argument of hs.TrainStep
        line = raised_at(error)
        place = f" ({Path(line.filename).name}:{line.lineno} {line.line})" if line else ""
        raise PlanError(f"the planned step raises {type(error).__name__}: {error}{place}") from error
    finally:
        log.disabled = quiet


def _copied(model: nn.Module, empty: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = empty(tensor.detach())
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(model, memo)
