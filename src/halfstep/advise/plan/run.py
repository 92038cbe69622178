"""Run: train two steps of a model on fake tensors under a policy, and make a `MemoryPlan` of what they leave.

The first step makes the optimizer's state and the low copies; the second is like all later ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.advise.plan.ledger import Block, Ledger
from halfstep.advise.plan.memory import PARTS, MemoryPlan, Moment, PlanError, Row
from halfstep.advise.plan.trace import MemorySink, local
from halfstep.advise.plan.ways import Way
from halfstep.formats import format_of
from halfstep.torch_private.fake import FakeTensor, unset_fake_temporarily
from halfstep.torch_private.trees import tree_leaves, tree_map_only

__all__ = ["plan_step"]

GRANULE = {"cpu": 1, "cuda": 512}
"""Bytes to whose multiples the device's allocator rounds."""

STRETCHES = 400  # of a timeline, at most


def plan_step(
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss_fn: Callable[..., Any],
    batch: tuple[Any, ...],
    named: dict[str, Any],
    *,
    name: str,
    device: str,
    policy: hs.Policy,
    options: dict[str, Any],
    way: Way,
) -> MemoryPlan:
    """Trace two updates where a fake mode is on and `device` is there; the arguments are those of `plan`, checked."""
    ledger = Ledger(GRANULE[device])
    windows = int(options.get("accumulate", 1))
    if device != "cpu":
        batch, named = tree_map_only(Tensor, _packed, (batch, named))
    with MemorySink(ledger, device).on() as sink:
        ledger.mark(-2 if way.in_parts else -1, "setup")
        inputs = tree_map_only(Tensor, lambda t: _input(sink, t, device), (batch, named))
        with torch.device(device):
            model = make()
        if not isinstance(model, nn.Module):
            raise PlanError(f"the function of the model must return a torch.nn.Module and returned {model!r}")
        own = len(ledger.blocks)
        model = way.model(model, policy)
        ledger.mark(-1, "setup")
        sink.watch(model)
        originals = {
            id(ledger.of(local(parameter))): name
            for name, module in model.named_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        optimizer = make_optimizer(model)
        way.prepare(model, optimizer, policy)

        def traced(*args: Any, **kwargs: Any) -> Any:
            with sink.forward():
                return loss_fn(*args, **kwargs)

        step = hs.TrainStep(model, optimizer, traced, policy=policy, blackbox=False, **options)
        sink.watch(model)
        way.ready(model, step.policy, ledger, device)
        sink.after_backward = partial(way.sums, ledger)
        with _as_real():
            for number in range(2):
                sink.step = number
                sink.begin("forward")
                for _ in range(windows):
                    step(*inputs[0], **inputs[1])
        ledger.mark(2, "setup")
        _name_parts(ledger, model, optimizer, originals, own)
        live = list(ledger.live())
        count = sum(p.numel() for p in model.parameters())
        resolved, sent = step.policy, way.sent(sink.gathered.seen.get(1, ()))
        notes = (f"the update is that of the optimizer's own step: {step.generic}",) if step.generic else ()
        ledger.close()
    made = _made(ledger, live, name=name, device=device, policy=resolved, parameters=count, notes=notes)
    return replace(made, sent=sent)


def _as_real() -> AbstractContextManager[Any]:
    """Return a context in which transformers takes fake tensors for real ones.

    It asks whether a mask is a fake tensor, and then keeps masks that it drops after a look at real ones. The values
    it looks at are known here (`values.py`).
    """
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
    """Return a fake tensor like one of the batch, whose value is known."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if (block := sink.ledger.of(made)) is not None:
        block.part = "batch"
    if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
        sink.values.give(made, tensor)
    return made


def _name_parts(ledger: Ledger, model: nn.Module, optimizer: Optimizer, originals: dict[int, str], own: int) -> None:
    """Say of every block what it was for.

    Args:
        ledger: whose blocks.
        model: prepared.
        optimizer: of it.
        originals: id of the block of a parameter before the model was prepared -> its module.
        own: number of blocks that were there before the model was prepared.
    """
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for tensors, part in ((module._parameters, "parameters"), (module._buffers, "buffers")):
            for tensor in tensors.values():
                if tensor is not None and (block := ledger.of(local(tensor))) is not None:
                    block.part, block.module = part, module_name
                if isinstance(tensor, nn.Parameter):
                    names[id(tensor)] = module_name
    for parameter, state in optimizer.state.items():
        for tensor in _tensors(state):
            if (block := ledger.of(local(tensor))) is not None and block.part not in ("parameters", "buffers"):
                block.part, block.module = "optimizer state", names.get(id(parameter), "")
    for number, block in enumerate(ledger.blocks):
        if block.part == "saved for backward" and block.alive:
            block.part = "temporaries"  # the loss, and what the model keeps
        if block.part:
            continue
        kept = block.alive and block.phase == "setup"
        if kept and id(block) in originals:  # the fp32 values, behind low ones in other memory
            block.part, block.module = "precise values", originals[id(block)]
        elif kept:
            block.part = "buffers" if number < own else "precise values"
        else:
            block.part = "temporaries"


def _tensors(state: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _rows(blocks: Iterable[Block]) -> tuple[Row, ...]:
    """Return blocks summed by part, module and format: parts in their order, largest first."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for block in blocks:
        entry = sums.setdefault((block.part, block.module, _format(block.dtype)), [0, 0])
        entry[0] += block.bytes
        entry[1] += 1
    rows = [
        Row(part=part, module=module, format=form, bytes=amount, tensors=count)
        for (part, module, form), (amount, count) in sums.items()
        if amount
    ]
    return tuple(sorted(rows, key=lambda row: (PARTS.index(row.part), -row.bytes, row.module, row.format)))


def _format(dtype: torch.dtype) -> str:
    return format_of(dtype).name if dtype.is_floating_point else str(dtype).removeprefix("torch.")


def _made(
    ledger: Ledger,
    live: list[Block],
    *,
    name: str,
    device: str,
    policy: hs.Policy,
    parameters: int,
    notes: tuple[str, ...],
) -> MemoryPlan:
    """Walk the events once for the peaks and the timeline, and once more to the peak."""
    blocks, parts = ledger.blocks, {part: n for n, part in enumerate(PARTS)}
    starts = {step: next(m for m in ledger.marks if m.step == step) for step in (0, 1, 2)}
    places = [parts[block.part] for block in blocks]
    begin, end = starts[1].operators, starts[2].operators
    stretch = max(1, -(-(end - begin) // STRETCHES))
    highest: dict[tuple[str, int], tuple[int, int, tuple[int, ...]]] = {}  # phase, stretch -> total, event, parts
    peaks = {-2: (0, 0), -1: (0, 0), 0: (0, 0), 1: (0, 0)}  # step -> total, event
    sums, total = [0] * len(PARTS), 0
    marks, mark = iter(ledger.marks), ledger.marks[0]
    following = next(marks)
    for number, event in enumerate(ledger.events):
        while following is not None and following.event <= number:
            mark, following = following, next(marks, None)  # type: ignore[assignment]
        if mark.step == 1:
            key = mark.phase, (ledger.times[number] - begin) // stretch
            highest.setdefault(key, (total, max(number - 1, 0), tuple(sums)))
        block = event if event >= 0 else ~event
        amount = blocks[block].bytes if event >= 0 else -blocks[block].bytes
        total += amount
        sums[places[block]] += amount
        if mark.step > 1:
            break
        if total > peaks[mark.step][0]:
            peaks[mark.step] = total, number
        if mark.step == 1 and total > highest[key][0]:
            highest[key] = total, number, tuple(sums)
    step = 0 if peaks[0][0] > peaks[1][0] else 1
    at = peaks[step][1]
    alive: dict[int, Block] = {}
    for event in ledger.events[: at + 1]:
        if event >= 0:
            alive[event] = blocks[event]
        else:
            alive.pop(~event, None)
    timeline = [_moment(ledger, event, begin, sums_) for _, event, sums_ in highest.values()]
    peak = [0] * len(PARTS)
    for block_ in alive.values():
        peak[parts[block_.part]] += block_.bytes
    return MemoryPlan(
        name=name, policy=policy, device=device, parameters=parameters, operators=end - begin,
        persistent=_rows(live), peak=_rows(alive.values()),
        peak_at=_moment(ledger, at, starts[step].operators, tuple(peak)),
        first_peak=peaks[0][0], setup_peak=peaks[-1][0], timeline=tuple(timeline), notes=notes,
    )  # fmt: skip


def _moment(ledger: Ledger, event: int, begin: int, sums: tuple[int, ...]) -> Moment:
    """Return the point after an event; `begin` is the number of operators before its step."""
    phase = next(mark.phase for mark in reversed(ledger.marks) if mark.event <= event)
    made = event
    while made > 0 and ledger.events[made] < 0:
        made -= 1
    block = ledger.blocks[max(ledger.events[made], 0)]
    return Moment(
        phase=phase, operator=ledger.times[event] - begin, name=block.operator, module=block.module, bytes=sums
    )
