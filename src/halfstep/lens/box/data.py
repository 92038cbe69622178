"""Data: what is wrong with the batch of a step that is not finite, in sentences with input, sample, place and value.

Note [outliers]: a value is an outlier if three things hold. It is far out: the magnitudes below the largest gap of the
batch's samples give a distribution of the tail (Pareto, with a Gamma prior on its index, so few values prove little),
under which a gap as large is improbable; heavy tails (counts, log-normal features) have large gaps by nature and
pass. It is new: earlier batches held nothing like it. And it matters: with the outliers clipped to the rest of the
batch the replay is finite.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.lens.box.diagnose import Subject
from halfstep.lens.box.origins import CallRecord, Source, upstream
from halfstep.lens.box.replay import Attempt
from halfstep.lens.calls import MASKED_OUT, NORMALISING, NOTHING, REDUCING, SPREADING, extremes
from halfstep.lens.verdict import shown
from halfstep.step.parts.record import MicroBatch
from halfstep.trees import inputs, map_tensors, place, tensors

Given: TypeAlias = list[tuple[int, str, Tensor]]  # index, name and tensor of inputs
RATIO = 100.0  # an outlier is so many times as large as the rest of its batch, or more
RARE = 1e-6  # probability of a gap as large among the values of a batch
RARE_SAMPLE = 0.02  # the same among the largest values of its samples, of which there are few
RARE_BATCH = 1e-4  # the same among the largest values of earlier batches
TAIL = 1000  # most values that the tail is estimated from: the largest tenth, ten at least
MARKERS = 3  # a far value that occurs so often, bit by bit the same, marks what is missing (-9999, 1e20)
EARLIER = 5  # so many earlier batches have to be known before a whole batch is called unusual
SHARE = 4  # outliers are in one of so many samples, or in one sample
ALONE = "the batch holds one sample"
TARGET = ", the target of "
SELECTING = frozenset({"getitem", "masked_select", "index_select", "index"})
# losses of a prediction and a target, both of floating numbers
COMPARING = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss".split()
)
# what may lie between a batch and the loss
CASTS = frozenset({"to", "float", "type", "half", "bfloat16", "double", "type_as", "view", "reshape", "unsqueeze"})


def suspects(subject: Subject, attempt: Attempt) -> tuple[str, ...]:
    """Return what is wrong with the batch of a step and its replay with instruments, strongest first."""
    micro, source = attempt.micro, attempt.source
    if micro is None:
        return ()
    known = _inputs(micro)
    if found := [*_not_finite(known, source)]:
        return tuple(found)
    if source is not None and source.call is not None:
        reached = {name for call in upstream([source.call]) for kind, name in call.outside if kind == "batch"}
        known = [(i, name, t) for i, name, t in known if f"input {i}" in reached]
    found += _constant(subject, attempt, known)
    found += _of_call(known, source, *_earlier(subject, micro))
    found += _outliers(subject, attempt, micro, known)
    return tuple(filter(None, (*found, wrong_target(attempt))))


def without(subject: Subject, attempt: Attempt) -> Subject | None:
    """Return the step with another sample in the place of each at fault; None if that is not known, or it stays bad."""
    if attempt.micro is None or attempt.source is None:
        return None
    given, bad = _inputs(attempt.micro), attempt.source.samples
    size = _samples(given)
    good = next((index for index in range(size) if index not in bad), -1)
    if not bad or good < 0 or bad[-1] >= size:
        return None
    rows = [good if index in bad else index for index in range(size)]

    def other(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == size else tensor

    changes = {index: other for index, _, _ in given}
    return _changed(subject, attempt, changes) if _finite(subject, attempt, changes) else None


def wrong_target(attempt: Attempt) -> str:
    """Return which target is no probability where a loss takes it for one: training on it runs away; "" for none."""
    if attempt.trace is None or attempt.micro is None:
        return ""
    known = {f"input {i}": (name, tensor) for i, name, tensor in _inputs(attempt.micro)}
    for call in attempt.trace.origins.calls():
        if call.site.op != "binary_cross_entropy_with_logits" or call.site.phase != "forward":
            continue
        casts = (parent for parent in call.parents if parent.site.op in CASTS)
        roots = {name for one in (call, *casts) for kind, name in one.outside if kind == "batch"}
        if len(roots) != 1 or known[min(roots)][1].layout is not torch.strided:  # a weight for each element besides
            continue
        name, tensor = known[roots.pop()]
        bad = (tensor < 0) | (tensor > 1)
        if tensor.numel() == math.prod(call.shapes[0]) and bool(bad.any()):
            flat = int(bad.flatten().nonzero()[0])
            value, count = tensor.flatten()[flat].item(), int(bad.sum())
            counted = f" ({count} of {tensor.numel()} such values)" if count > 1 else ""
            return (
                f"{name}, the target of {call.site.op}, holds {value:g} in {place(tensor, flat)}{counted}; outside "
                "of 0 to 1 the loss has no minimum"
            )
    return ""


def _inputs(micro: MicroBatch) -> Given:
    return [(index, name, tensor) for index, (name, tensor) in enumerate(inputs(micro.batch, micro.named))]


def _samples(given: Given) -> int:
    return next((len(tensor) for _, _, tensor in given if tensor.dim()), 0)


def _not_finite(given: Given, source: Source | None) -> Iterator[str]:
    if source is None or source.kind != "batch":
        return
    for index, name, tensor in given:
        if f"input {index}" != source.name or tensor.layout is not torch.strided:
            continue
        bad = ~torch.isfinite(tensor.detach())
        if not bool(bad.any()):  # written to since
            continue
        flat = int(bad.flatten().nonzero()[0])
        value = float(tensor.detach().flatten()[flat].real)
        count, size = int(bad.sum()), tensor.numel()
        call = source.call
        is_target = call is not None and call.site.op in COMPARING and call.shapes[1:] == (tuple(tensor.shape),)
        if call is not None and call.site.op in {"sub", "rsub"} and call.parents:  # an error computed by hand
            is_target = set(call.shapes) == {tuple(tensor.shape)}
        what = f"{name}{TARGET}{call.site.op}," if is_target and call is not None else name
        yield f"{what} holds {value} in {place(tensor, flat)}: {count} of {size} values are not finite"


def _earlier(subject: Subject, micro: MicroBatch) -> tuple[bool, bool]:
    """Return whether a batch before this one trained, and whether the one right before it failed like it."""
    seen = subject.signals.read()
    rows = [row for row in zip(seen.steps, seen.losses, seen.applied, strict=True) if row[0] < subject.step]
    own = micro.loss is None or extremes(micro.loss)[1]
    failed = bool(rows) and not rows[-1][2] and math.isfinite(rows[-1][1]) == own
    return any(applied for _, _, applied in rows), failed


def _of_call(given: Given, source: Source | None, trained: bool, failed: bool) -> Iterator[str]:
    """Yield what the inputs that led to an invalid operation show.

    `trained`: a batch before this one did; `failed`: the one right before it failed like it, so no sample is at fault.
    """
    if source is None or source.call is None or not source.invalid or source.written or failed:
        return
    if source.over and source.call.site.op not in NORMALISING:  # a mask that arithmetic has spoilt
        return
    empty = [f"{name} is empty, its shape is {list(tensor.shape)}" for _, name, tensor in given if not tensor.numel()]
    yield from empty
    if empty:
        return
    size = _samples(given)
    known = bool(source.samples) and source.samples[-1] < size
    op, roots = source.call.site.op, source.roots()
    kinds = {kind for kind, _ in roots}
    if not source.remark or source.call.site.phase != "forward" or "batch" not in kinds:
        return
    if op in SPREADING and size == 1:
        yield f"{ALONE}: {source.remark}"
    elif not kinds & {"parameter", "buffer"}:
        if op in SPREADING:  # of one value in each group, whatever the batch holds
            return
        if len(source.features) == 1:
            yield from _constant_feature(given, source.features[0])
        names = " and ".join(name for index, name, _ in given if ("batch", f"input {index}") in roots)
        where = f" in {shown(source.samples)}" if known else ""
        yield f"{names}{where} leads to it without any weight: {source.remark}"
    elif op in {"cross_entropy", "nll_loss", "ctc_loss"}:
        yield source.remark
    elif op in REDUCING and NOTHING in source.remark and (trained or _selected_by_batch(source.call)):
        yield source.remark
    elif op in NORMALISING and MASKED_OUT in source.remark and any(not t.is_floating_point() for _, _, t in given):
        yield source.remark


def _selected_by_batch(call: CallRecord) -> bool:
    """Return whether the batch alone decided which elements were left for a call, and no weight."""
    for above in upstream([call]):
        if above.site.op in SELECTING:
            indices = [parent for parent in above.parents if parent.dtype is None]
            calls = upstream(indices) if indices else [above]
            return {kind for each in calls for kind, _ in each.outside} == {"batch"}
    return False


def _constant_feature(given: Given, feature: int) -> Iterator[str]:
    for _, name, tensor in given:
        if tensor.dim() > 1 and tensor.layout is torch.strided and feature < tensor.shape[-1] and len(tensor) > 1:
            column = tensor.detach()[..., feature]
            if bool((column == column.flatten()[0]).all()):
                yield f"{name} is {column.flatten()[0].item()} in every sample at feature {feature}"


def _constant(subject: Subject, attempt: Attempt, given: Given) -> list[str]:
    """Return which inputs hold one value everywhere in the samples at fault, in no other, and are the reason for it.

    They are if the replay is finite with the values of another sample in their place.
    """
    size, source = _samples(given), attempt.source
    if source is None or not source.invalid or source.written or not source.samples:
        return []
    samples = list(source.samples)
    mask = source.over and source.call is not None and source.call.site.op not in NORMALISING
    if mask or samples[-1] >= size or 2 * len(samples) > size:
        return []
    other = next(index for index in range(size) if index not in samples)
    found = []
    for index, name, tensor in given:
        if tensor.dim() < 1 or len(tensor) != size or tensor.layout is not torch.strided or not tensor.numel():
            continue
        rows = tensor.detach().reshape(size, -1)
        value = rows[samples[0], 0]
        if rows.shape[1] == 1 and bool(value):  # a length of 0 is odd, any other is not
            continue
        if (rows == value).all(1).nonzero().flatten().tolist() == samples and _finite(
            subject,
            attempt,
            {index: lambda t: t.index_copy(0, torch.tensor(samples, device=t.device), t[[other] * len(samples)])},
        ):
            everywhere = "" if rows.shape[1] == 1 else " everywhere"
            found.append(f"{name} is {value.item()}{everywhere} in {shown(samples)}, and in no other sample")
    return found


def _outliers(subject: Subject, attempt: Attempt, micro: MicroBatch, given: Given) -> list[str]:
    first = subject.step - subject.dropped - len(subject.window)
    earlier = [maxima for number, maxima in subject.signals.read().inputs if number <= first]
    found: dict[int, tuple[float, str]] = {}
    floating = [t for t in tensors((micro.batch, micro.named)) if t.is_floating_point()]
    for index, name, tensor in given:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.numel() < 2:
            continue
        order = next((i for i, t in enumerate(floating) if t is tensor), -1)
        past = [m[order] for m in earlier if 0 <= order < len(m) and math.isfinite(m[order])]
        if (far := outlier(name, tensor.detach(), past)) is not None:
            found[index] = far
    clipped = {index: partial(torch.clamp, min=-rest, max=rest) for index, (rest, _) in found.items()}
    if not found or not _finite(subject, attempt, clipped):
        return []
    return [f"{text}; clipped to that, the step is finite" for _, text in found.values()]


def outlier(name: str, tensor: Tensor, past: list[float]) -> tuple[float, str] | None:
    """Return the largest magnitude of all but the outliers of an input, and these in words; None if it has none.

    `past`: its largest magnitudes in earlier batches.
    """
    values = tensor.float() if tensor.element_size() < 4 else tensor
    sizes = values.abs()
    if not bool(torch.isfinite(sizes).all()):
        sizes = sizes.nan_to_num(0.0, 0.0, 0.0)
    largest = float(sizes.max())
    usual = max(past, default=0.0)
    flat = int(sizes.flatten().argmax())
    text = f"{name} holds {float(values.flatten()[flat]):.6g} in {place(tensor, flat)}"
    rest = _rest_by_samples(sizes) or _rest_by_markers(values, sizes)
    if rest:
        if past and largest < RATIO * usual:  # batches that trained held as much
            return None
        far = sizes > math.sqrt(RATIO) * rest  # in samples with an outlier, their other values are not
        number = int(far.sum())
        rows = far.reshape(len(far), -1).any(1).nonzero().flatten().tolist()
        others = tensor.numel() - number
        if number > 1:
            text += f" ({number} such values, in {shown(rows)})"
        rest = float(sizes[~far].max())
        return rest, f"{text}; the other {others} values are at most {rest:.4g}"
    if len(past) >= EARLIER and _rare([math.log(m) for m in past if m > 0.0], largest, RARE_BATCH):
        return usual, f"{text}; in {len(past)} earlier batches the largest was {usual:.4g}"
    return None


def _rest_by_samples(sizes: Tensor) -> float:
    """Return the largest magnitude of the rest if a few samples hold outliers, else 0.0."""
    samples = sizes.reshape(len(sizes), -1).amax(1) if sizes.dim() and len(sizes) > 1 else sizes.flatten()
    maxima = samples[samples > 0].sort(descending=True).values
    most = max(1, len(samples) // SHARE)
    if len(maxima) < 2:
        return 0.0
    ratios = maxima[:-1] / maxima[1:]
    group = int(ratios[:most].argmax()) + 1
    if float(ratios[group - 1]) < RATIO:
        return 0.0
    rest = float(maxima[group])
    if samples.numel() < sizes.numel() and not _rare(
        maxima[group:].log().tolist(), float(maxima[group - 1]), RARE_SAMPLE
    ):
        return 0.0
    tail = sizes[(sizes > 0) & (sizes <= rest)]
    count = min(TAIL, max(10, tail.numel() // 10), tail.numel())
    return rest if _rare(tail.topk(count).values.log().tolist(), float(maxima[group - 1])) else 0.0


def _rest_by_markers(values: Tensor, sizes: Tensor) -> float:
    """Return the largest magnitude of the rest if the same far value stands in many places, else 0.0."""
    largest = sizes.max()
    far = sizes * RATIO > largest
    marked, others = values[far], sizes[~far]
    if marked.numel() < MARKERS or 2 * marked.numel() > values.numel() or not bool((marked == marked[0]).all()):
        return 0.0
    if values.dim() > 1 and bool(far.flatten(0, -2).all(0).any()):  # a column of another unit
        return 0.0
    return float(others.max()) if others.unique().numel() > 10 else 0.0  # a mask has two or three values


def _rare(logs: list[float], largest: float, limit: float = RARE) -> bool:
    """Return whether `largest` is improbably far above a tail, given as logarithms; note [outliers].

    The logarithms of a Pareto tail exceed its base by exponential amounts. With a Gamma(1, 1) prior on their rate, n of
    them with the sum s leave a probability of ((1 + s) / (1 + s + gap)) ** (1 + n) for a gap as large.
    """
    if not logs or largest <= 0.0:
        return False
    base, top = min(logs), max(logs)
    spread, gap = 1.0 + sum(value - base for value in logs), math.log(largest) - top
    return gap >= math.log(RATIO) and len(logs) * math.log(spread / (spread + gap)) < math.log(limit)


def _finite(subject: Subject, attempt: Attempt, changes: Mapping[int, Callable[[Tensor], Tensor]]) -> bool:
    """Return whether the replay of the micro-batch at fault is finite with some of its inputs changed."""
    try:
        replay = _changed(subject, attempt, changes)
        again = replay.run(only=attempt.index)
        if again.bad and subject.scale > 1.0 and all(extremes(loss)[1] for loss in again.losses):
            # scaled gradients may overflow still; but if scale 1 alone helps, the inputs are not the reason
            low = 1.0 / subject.scale
            again = replay.run(only=attempt.index, factor=low)
            return not again.bad and subject.run(only=attempt.index, factor=low).bad
    except Exception:  # code that cannot run on it
        return False
    return not again.bad and not again.odd


def _changed(subject: Subject, attempt: Attempt, changes: Mapping[int, Callable[[Tensor], Tensor]]) -> Subject:
    assert attempt.micro is not None and attempt.index is not None
    micro, window, order = attempt.micro, list(subject.window), count()

    def changed(tensor: Tensor) -> Tensor:
        change = changes.get(next(order))
        return tensor if change is None else change(tensor.detach())

    batch, named = map_tensors((micro.batch, micro.named), changed)
    window[attempt.index] = dataclasses.replace(micro, batch=batch, named=named)
    return dataclasses.replace(subject, window=window)
