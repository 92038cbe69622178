"""Run: train two steps of a model on fake tensors under a policy, and make a `MemoryPlan` of what they leave.

The first step makes the optimizer's state; the second is like all later ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.ledger import PARTS, Block, Ledger, PlanError
from halfstep.advise.plan.memory import MemoryPlan, Moment, Row
from halfstep.advise.plan.ranks import Ddp, sent
from halfstep.advise.plan.trace import MemorySink, local
from halfstep.formats import DTYPE_NAMES
from halfstep.lens import Tracer
from halfstep.torch_private.autograd import profiler_enabled
from halfstep.torch_private.fake import FakeTensor, unset_fake_temporarily
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GRANULE = {"cpu": 1, "cuda": 512}  # bytes to whose multiples the device's allocator rounds
STRETCHES = 400  # of a timeline, at most


def plan_step(
    make: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], Optimizer], loss_fn: Callable[..., Any],
    batch: tuple[Any, ...], named: dict[str, Any], *, device: str, policy: hs.Policy, options: dict[str, Any],
    devices: int, shard: str, units: Sequence[str] | None, mesh: DeviceMesh | None, **about: Any,
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
        shard=shard, sent=sent(seen, devices), **_peaks(ledger), **about,
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
    marks, mark = iter(ledger.marks), ledger.marks[0]
    following = next(marks, None)
    for number, event in enumerate(ledger.events):
        while following is not None and following.event <= number:
            mark, following = following, next(marks, None)
        if mark.step > 1:
            break
        before = sum(sums), max(number - 1, 0), sums
        block = blocks[event if event >= 0 else ~event]
        place, amount = parts[block.part], block.bytes if event >= 0 else -block.bytes
        sums = (*sums[:place], sums[place] + amount, *sums[place + 1 :])
        now = sum(sums), number, sums
        if now[0] > peaks[mark.step][0]:
            peaks[mark.step] = now
        if mark.step == 1:
            key = mark.phase, (ledger.times[number] - begins[1]) // stretch
            if now[0] > highest.setdefault(key, before)[0]:
                highest[key] = now
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
