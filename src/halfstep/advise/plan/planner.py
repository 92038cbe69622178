"""`plan`: the memory of a training step under a policy, before training and without that memory.

Two steps of the model are trained on fake tensors: the first makes the optimizer's state, the second is like all later
ones. A `MemoryPlan` is made of what they leave.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.elsewhere import attempt, elsewhere
from halfstep.advise.plan.ledger import PARTS, WORDS, Block, Ddp, Ledger, PlanError, fake_ranks, sent
from halfstep.advise.plan.memory import Gpu, MemoryPlan, Moment, Row, fit_of, gpu_named, largest_batch
from halfstep.advise.plan.trace import LARGEST, MemorySink, local
from halfstep.arguments import CALLABLE, COUNT, FLAG, NONE, TEXT, Kind, a, check, one_of
from halfstep.formats import DTYPE_NAMES
from halfstep.lens import Tracer, raised_at
from halfstep.tasks import Task, load_task
from halfstep.testing import FakeCudaError, fake_cuda
from halfstep.torch_private.autograd import profiler_enabled
from halfstep.torch_private.fake import FakeTensor, FakeTensorMode, unset_fake_temporarily
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NOTES = WORDS["notes"]


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
    replicas: int = 1,
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
        replicas: under "fsdp2", how many groups of devices hold the whole model each (hybrid sharding, HSDP).
        units: patterns of the modules that are gathered one after the other, as `hs.shard` takes them.
        gpu: name of a GPU ("h200", "a100-80", "t4", ... or a size as "96GiB"): `fit` of the plan says whether it fits.
        batch_size: a size for the batch in the place of its own; each device has one.
        largest: whether to look for the largest batch that fits `gpu`, by planning others too: `largest` of the plan.
        **options: arguments of hs.TrainStep that change its memory: `accumulate`, `clip_norm`, `clip_value`, `retry`,
            `update_in_backward`, `state`; and `compile`, which a plan takes for eager code.

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
    what, batch, loss_fn, optimizer, policy, device, devices, shard, replicas, units, gpu, size, largest, options = (
        given.values()
    )
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise PlanError(
            f"hs.plan: optimizer must be a function of the planned model, and is the {name} of another one; write "
            f"def optimizer(model): return {name}(model.parameters(), ...)"
        )
    check(
        "hs.plan",
        PlanError,
        shard=(shard, one_of("none", "ddp", "fsdp2")),
        devices=(devices, COUNT),
        replicas=(replicas, COUNT),
        batch=(batch, a(tuple, list, Mapping, words="a tuple of arguments or a dict of named ones") | NONE),
        loss_fn=(loss_fn, CALLABLE | NONE),
        optimizer=(optimizer, Kind("a function that returns an optimizer", callable) | NONE),
        device=(device, one_of("cpu", "cuda")),
        gpu=(gpu, TEXT),
        batch_size=(size, COUNT | NONE),
        largest=(largest, FLAG),
    )
    if devices == 1 and shard != "none":
        raise PlanError(f"shard={shard!r} needs devices=2 or more, and devices is 1")
    if devices > 1 and shard == "none":
        raise PlanError(f"devices={devices} need a way to share the work: shard='ddp' or shard='fsdp2'")
    if replicas > 1 and (shard != "fsdp2" or devices % replicas or replicas == devices):
        raise PlanError(
            f"replicas={replicas} with devices={devices} and shard={shard!r}: groups of devices that shard a model "
            "among them need shard='fsdp2' and as many devices each, 2 or more"
        )
    if units is not None and shard != "fsdp2":
        raise PlanError("units= name what hs.shard gathers together; they need shard='fsdp2'")
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
    replicas: int, units: Sequence[str] | None, gpu: Gpu | None, batch_size: int | None, largest: bool,
    options: dict[str, Any],
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
    notes += (NOTES["a_gpu"],) * (device != "cpu") + (NOTES["compiled"],) * bool(options.pop("compile", None))
    notes += (NOTES["on_host"],) * (device == "cpu" and options.get("state") == "host")

    def plan_of(size: int | None) -> MemoryPlan:
        inputs = whole if size is None else _with_size(whole, size)
        with fake_ranks(devices, device, replicas) if shard == "fsdp2" else nullcontext() as mesh, _tracing(device):
            made = plan_step(
                make, optimizer, loss_fn, *inputs, device=device, policy=on_card, options=options, devices=devices,
                shard=shard, replicas=replicas, units=units, mesh=mesh, name=name, batch_size=_size(inputs),
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
        return policy, (NOTES["other_kernels"],)
    as_fp16 = {"master": "master"} if policy.params == "low" and policy.master == "auto" else {}  # else it is "split"
    return hs.Policy.of(policy, dtype="bf16", **as_fp16), (NOTES["other_kernels"], NOTES["same_size"])


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


GRANULE = {"cpu": 1, "cuda": 512}  # bytes to whose multiples the device's allocator rounds
STRETCHES = 400  # of a timeline, at most


def plan_step(
    make: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], Optimizer], loss_fn: Callable[..., Any],
    batch: tuple[Any, ...], named: dict[str, Any], *, device: str, policy: hs.Policy, options: dict[str, Any],
    devices: int, shard: str, replicas: int, units: Sequence[str] | None, mesh: DeviceMesh | None, **about: Any,
) -> MemoryPlan:  # fmt: skip
    """Trace two updates in a fake mode; arguments as of `plan`, the `mesh` of fsdp2, and further fields of the plan."""
    ledger = Ledger(GRANULE[device])
    windows = int(options.get("accumulate", 1))
    if device != "cpu":
        batch, named = tree_map_only(Tensor, _packed, (batch, named))
    sink = MemorySink(ledger, device)
    with torch.autograd.set_multithreading_enabled(False), Tracer(sink):
        # under fsdp2 no device ever holds the whole model: it is made before what counts as preparation
        ledger.mark(-2 if mesh is not None else -1, "setup")
        inputs = tree_map_only(Tensor, lambda t: _input(sink, t, device), (batch, named))
        with torch.device(device):
            model = make()
        if not isinstance(model, nn.Module):
            raise PlanError(f"the function of the model must return a torch.nn.Module and returned {model!r}")
        refuse_sharded(model)
        own = len(ledger.blocks)
        if mesh is not None:
            model = hs.shard(model, policy, units=units, mesh=mesh)
        ledger.mark(-1, "setup")
        sink.watch(model)
        originals = {
            id(ledger.of(local(parameter))): name
            for name, module in model.named_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        optimizer = make_optimizer(model)
        if shard == "ddp":
            hs.prepare(model, optimizer, policy=policy)

        def traced(*args: Any, **kwargs: Any) -> Any:
            with sink.forward():
                return loss_fn(*args, **kwargs)

        step = hs.TrainStep(model, optimizer, traced, policy=policy, blackbox=False, **options)
        sink.watch(model)
        if (ddp := Ddp(model, step.policy) if shard == "ddp" else None) is not None:
            ddp.allocate(ledger, device)
            sink.after_backward = partial(ddp.average, ledger)
        with _as_real():
            for number in range(2):
                sink.step = number
                sink.begin("forward")
                for _ in range(windows):
                    step(*inputs[0], **inputs[1])
        ledger.mark(2, "setup")
        _name_parts(ledger, model, step.optimizer, originals, own)
        persistent = _rows(ledger.live())
        count = sum(p.numel() for p in model.parameters())
        seen = [*sink.seen.get(1, ()), *(ddp.seen if ddp is not None else ())]
        notes: list[str] = [f"the update is that of the optimizer's own step: {step.generic}"] if step.generic else []
        if device == "cpu" and profiler_enabled():
            notes.append("a profiler is open, so what kernels allocate beyond their results is not counted")
    return MemoryPlan(
        policy=step.policy, device=device, parameters=count, persistent=persistent, notes=tuple(notes), devices=devices,
        shard=shard, replicas=replicas, sent=sent(seen, devices, replicas), **_peaks(ledger), **about,
    )  # fmt: skip


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose parameters are DTensors: parts of them, in a layout that only their own ranks know."""
    if found := next((name for name, p in model.named_parameters() if local(p) is not p), ""):
        raise PlanError(
            f"parameter {found!r} is a DTensor: tensor parallelism, fully_shard and HSDP of your own are not planned; "
            "give the plain model with devices= and shard='ddp' or shard='fsdp2'"
        )


def _as_real() -> AbstractContextManager[Any]:
    # transformers asks whether a mask is a fake tensor, and then keeps masks that it drops after a look at real ones;
    # the values it looks at are known here (note [values] in `trace.py`)
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return mock.patch.object(module, "is_fake_tensor", lambda tensor: False)


def _packed(tensor: Tensor) -> Tensor:
    """Return a tensor of the batch with the strides that ``tensor.to(device)`` gives it."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return tensor
    with unset_fake_temporarily():
        return torch.empty_like(tensor).copy_(tensor)


def _input(sink: MemorySink, tensor: Tensor, device: str) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if (block := sink.ledger.of(made)) is not None:
        block.part = "batch"
    if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
        sink.values.give(made, tensor)
    return made


def _name_parts(ledger: Ledger, model: nn.Module, optimizer: Optimizer, originals: dict[int, str], own: int) -> None:
    # the first `own` blocks were made before `model` was prepared; `originals`: id of one of a parameter -> its module
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for held, part in ((module._parameters, "parameters"), (module._buffers, "buffers")):
            for tensor in held.values():
                if tensor is not None and (block := ledger.of(local(tensor))) is not None:
                    block.part, block.module = part, module_name
                if isinstance(tensor, nn.Parameter):
                    names[id(tensor)] = module_name
    for parameter, state in optimizer.state.items():
        for tensor in tensors(state):
            if (block := ledger.of(local(tensor))) is not None and block.part not in ("parameters", "buffers"):
                block.part, block.module = "optimizer state", names.get(id(parameter), "")
    for number, block in enumerate(ledger.blocks):
        kept = block.alive and block.phase == "setup" and not block.part
        if kept and id(block) in originals:  # the fp32 values, behind low ones in other memory
            block.part, block.module = "precise values", originals[id(block)]
        elif kept:
            block.part = "buffers" if number < own else "precise values"
        elif not block.part or (block.part == "saved for backward" and block.alive):
            block.part = "temporaries"  # also the loss, and what the model keeps


def _rows(blocks: Iterable[Block]) -> tuple[Row, ...]:
    sums: dict[tuple[str, str, str], list[int]] = {}
    for block in blocks:
        form = DTYPE_NAMES.get(block.dtype, str(block.dtype).removeprefix("torch."))
        sums.setdefault((block.part, block.module, form), []).append(block.bytes)
    rows = [
        Row(part=part, module=module, format=form, bytes=sum(sizes), tensors=len(sizes))
        for (part, module, form), sizes in sums.items()
        if any(sizes)
    ]
    return tuple(sorted(rows, key=lambda row: (PARTS.index(row.part), -row.bytes, row.module, row.format)))


def _peaks(ledger: Ledger) -> dict[str, Any]:
    blocks, parts = ledger.blocks, {part: n for n, part in enumerate(PARTS)}
    begins = {step: next(mark.operators for mark in ledger.marks if mark.step == step) for step in (0, 1, 2)}
    stretch = max(1, -(-(begins[2] - begins[1]) // STRETCHES))
    sums = (0,) * len(PARTS)
    highest: dict[tuple[str, int], tuple[int, int, tuple[int, ...]]] = {}  # phase, stretch -> total, event, parts
    peaks = dict.fromkeys((-2, -1, 0, 1), (0, 0, sums))  # step -> total, event, parts
    for mark, following in pairwise(ledger.marks):  # the last one is the end
        for number in range(mark.event, following.event):
            event = ledger.events[number]
            before = sum(sums), max(number - 1, 0), sums
            block = blocks[event if event >= 0 else ~event]
            place, amount = parts[block.part], block.bytes if event >= 0 else -block.bytes
            sums = (*sums[:place], sums[place] + amount, *sums[place + 1 :])
            now = sum(sums), number, sums
            peaks[mark.step] = max(peaks[mark.step], now, key=itemgetter(0))
            if mark.step == 1:
                key = mark.phase, (ledger.times[number] - begins[1]) // stretch
                highest[key] = max(highest.get(key, before), now, key=itemgetter(0))
    step = 0 if peaks[0][0] > peaks[1][0] else 1
    _, at, alive = peaks[step]
    until = ledger.events[: at + 1]
    freed = {~event for event in until if event < 0}
    return {
        "operators": begins[2] - begins[1],
        "peak": _rows(blocks[event] for event in until if event >= 0 and event not in freed),
        "peak_at": _moment(ledger, at, begins[step], alive),
        "first_peak": peaks[0][0],
        "setup_peak": peaks[-1][0],
        "timeline": tuple(_moment(ledger, event, begins[1], found) for _, event, found in highest.values()),
    }


def _moment(ledger: Ledger, event: int, begin: int, sums: tuple[int, ...]) -> Moment:
    """Return the point after an event; `begin` is the number of operators before its step."""
    phase = next(mark.phase for mark in reversed(ledger.marks) if mark.event <= event)
    made = event
    while made > 0 and ledger.events[made] < 0:
        made -= 1
    block = ledger.blocks[max(ledger.events[made], 0)]
    operator = ledger.times[event] - begin
    return Moment(phase=phase, operator=operator, name=block.operator, module=block.module, bytes=sums)
