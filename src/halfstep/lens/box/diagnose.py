"""Diagnose: a `Verdict` from a replay with instruments."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.origins import CallRecord, Source
from halfstep.lens.box.replay import Attempt, Replay, Trace
from halfstep.lens.calls import NORMALISING, described, extremes
from halfstep.lens.verdict import Magnitude, Verdict, shown
from halfstep.optim import stepped_by
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolved
from halfstep.step.parts.record import MicroBatch, versions_of
from halfstep.step.parts.signals import Signals
from halfstep.torch_private.compiler import is_compiled
from halfstep.trees import tensors
from halfstep.update.updater import ClipNorm
from halfstep.weights.store import WeightStore

CURABLE = frozenset({"overflow", "invalid", "scale_too_high"})  # kinds of verdicts that a change of policy may cure
MASKED = "the mask's -inf becomes nan by arithmetic: "
BY_EXP = "comes from exp at "
CASTING = frozenset({"to", "float", "type", "double", "type_as"})
WRITTEN = "a value that is not finite is written here by the program itself"
INSIDE, AROUND = FOREIGN = "inside", "around"  # of the loss function
CAST = "to"  # the operator that a weight is cast by when an update writes its low copy
LOWEST = 2.0**-14  # the lowest loss scale to try, the smallest normal number of fp16: below it gradients vanish
LARGE = 1e3  # larger weights get a note
ROWS = 8  # rows of a story
NEAREST = 3  # so many rows are the place and what leads to it directly; the others are where magnitudes changed most
EXTREME = 1e3  # activations and gradients above it are out of the normal range: their products pass the end of fp16
TINY = 1e-30  # stands for a magnitude of 0 in ratios
FP32_MAX = float(torch.finfo(torch.float32).max)
FP32_ROOT = math.sqrt(FP32_MAX)  # numbers below it have a square


@dataclass(kw_only=True, eq=False)
class Subject(Replay):
    """A step to diagnose."""

    optimizer: Optimizer | None  # the optimizer that would have updated the model, or None
    policy: Policy | None  # the policy it ran under; None if it is not known
    under: Callable[[Policy], AbstractContextManager[None]]  # ``with under(policy):`` replays run under another policy
    scaling: str = "none"  # "none", "static" or "dynamic"
    scale: float = 1.0  # the loss scale
    floor: float = 0.0  # the lowest scale that its rule allows; 0.0: any
    step: int = 0  # its number
    rank: int = 0  # of this process
    notes: tuple[str, ...] = ()  # notes for the verdict that are known before the replay
    normed: bool = True  # whether an update is skipped when the norm of all gradients is not finite
    foreign: str = ""  # where a loop opens its regions itself, in whose places trials open others: see `FOREIGN`
    region: str = "torch.autocast"  # the name of what opens them
    dropped: int = 0  # how many micro-batches of its window came before those of `replay`, and are not kept any more
    gone: str = ""  # why none can be run again, in words; "" if one can
    more: Mapping[int, MicroBatch] = field(default_factory=dict)  # for trials, by their number in `explain(batches=)`
    clip_norm: ClipNorm = None  # largest norm of the gradients of an update; None: not clipped, or not known
    clip_value: float | None = None  # largest magnitude of an element of them; None likewise
    signals: Signals  # the history of the run

    @property
    def names(self) -> dict[int, str]:
        """Names of parameters by identity."""
        return {id(p): n for n, p in self.model.named_parameters()}


def low_of(policy: Policy | None, model: nn.Module) -> str:
    """Return the low format of `policy` where `model` is, "" without a policy."""
    if policy is None or policy.dtype != "auto":
        return "" if policy is None else policy.dtype
    return resolved(policy, next((p.device.type for p in model.parameters()), "cpu")).dtype


def diagnose(subject: Subject) -> tuple[Verdict, Attempt]:
    """Replay a step with instruments and name the first cause; without cures."""
    attempt = subject.run(traced=True)
    notes = [*subject.notes, *_differences(subject, attempt)]
    if attempt.odd:
        verdict, notes = Verdict(kind="not_reproducible"), [*notes, attempt.odd, *_reasons(subject)]
    elif not attempt.bad:
        verdict = _of_update(subject, attempt)
        if verdict.kind == "not_reproducible":
            notes = [*notes, *_reasons(subject)]
    elif attempt.trace is None:
        verdict, more = _of_scale(subject, attempt, _of_sum(subject, attempt))
        notes += ["the gradients of each micro-batch are finite, and their sum is not", *more]
    else:
        verdict = verdict_of(attempt.trace, subject.names)
        if verdict.kind == "bad_batch":
            assert attempt.micro is not None
            verdict = replace(verdict, detail=_of_input(attempt.micro, verdict.parameter))
        elif verdict.kind == "bad_state" and (cast := _of_cast(subject, verdict)) is not None:
            verdict = cast
        elif verdict.kind == "bad_state":
            notes += [f"{name} is not finite either" for name in _bad_states(subject)][:3]
        elif verdict.kind in {"overflow", "invalid"} and all(extremes(loss)[1] for loss in attempt.losses):
            verdict, more = _of_scale(subject, attempt, verdict)
            notes += more
        if verdict.kind in {"overflow", "invalid"} and verdict.detail != WRITTEN and verdict.op != CAST:
            weights = ((extremes(p)[0], name) for name, p in subject.model.named_parameters() if not is_lazy(p))
            value, name = max(weights, default=(0.0, ""))
            if value > LARGE:
                notes.append(f"{name} holds values as large as {value:.3g}")
    size = subject.dropped + len(subject.window)
    if size > 1 and attempt.index is not None:
        notes.append(f"micro-batch {subject.dropped + attempt.index + 1} of {size} of its window")
    if any(map(is_compiled, subject.model.modules())):
        notes.append("the model is compiled; the replay ran it eagerly")
    return replace(verdict, step=subject.step, rank=subject.rank, notes=(*verdict.notes, *notes)), attempt


def inspect(subject: Subject, why: str) -> tuple[Verdict, Attempt]:
    """Return what the tensors of a step show without a replay, and why there is none; of sharded ones this rank's."""
    reason, window = f"not replayed: {why}", subject.window
    verdict = Verdict(kind="not_reproducible", detail=reason)
    state = (*subject.model.named_parameters(), *subject.model.named_buffers())
    bad_state = [name for name, tensor in state if not is_lazy(tensor) and not extremes(tensor)[1]]
    bad_state += _bad_states(subject)
    inputs = [
        (micro, index)
        for micro in window
        for index, tensor in enumerate(tensors((micro.batch, micro.named)))
        if not extremes(tensor)[1]
    ]
    losses = [i for i, micro in enumerate(window) if micro.loss is not None and not extremes(micro.loss)[1]]
    if inputs:
        micro, index = inputs[0]
        name = f"input {index}"
        verdict = Verdict(kind="bad_batch", parameter=name, detail=_of_input(micro, name), notes=(reason,))
    elif bad_state:
        more = tuple(f"{name} is not finite either" for name in bad_state[1:4])
        verdict = Verdict(kind="bad_state", parameter=bad_state[0], notes=(*more, reason))
    elif losses:
        first, size = subject.dropped + losses[0] + 1, subject.dropped + len(window)
        found = f"the loss of micro-batch {first} of {size} is not finite"
        verdict = replace(verdict, parameter="the loss", detail=f"{found}; {reason}")
    notes = (*verdict.notes, *subject.notes)
    return replace(verdict, step=subject.step, rank=subject.rank, notes=notes), Attempt(odd=reason)


def verdict_of(trace: Trace, names: dict[int, str]) -> Verdict:
    """Return the verdict that follows from the trace of a replay that was not finite."""
    source, leaf = trace.cause
    culprit, call = "" if leaf is None else names.get(id(leaf), ""), source.call
    kind = {"batch": "bad_batch", "parameter": "bad_state", "buffer": "bad_state", "constant": "bad_state"}.get(
        source.kind
    ) or ("invalid" if source.invalid or source.kind == "unwritten" else "overflow")
    notes: tuple[str, ...] = ()
    parameter, detail = source.name, ""
    if source.written or source.kind == "deliberate":
        detail = WRITTEN
    elif kind == "overflow" and call is not None and source.name:
        detail = f"{source.name} holds {call.largest:.6g}, and the format ends at {source.limit:.6g}"
    elif source.over:
        detail = _of_mask(source)
    elif kind == "invalid" and source.remark:
        detail = source.remark
    elif kind in {"overflow", "invalid"} and call is not None and not call.finite_in:
        detail = "some of its inputs were inf or nan before, and it makes more of them"
    elif kind == "overflow" and call is not None and call.largest > source.limit > 0.0:
        detail = _of_maker(call, source.limit)
    if source.kind == "constant":
        parameter = "a tensor that is neither batch nor state"
    elif source.kind == "deliberate":
        kind = "invalid"
    elif source.kind == "unwritten":
        notes = ("memory is read to which nothing was written",)
    if call is None:
        return Verdict(kind=kind, parameter=parameter or culprit, detail=detail, notes=notes)
    if call.site.call > 1:
        notes = (*notes, f"in call {call.site.call} of this module")
    told: tuple[Magnitude, ...] = ()
    if kind in {"overflow", "invalid"}:
        if call.site.phase == "backward" and culprit:
            notes = (*notes, f"reaches the gradient of {culprit}")
        rows = path(call, small=kind == "invalid" and not source.over)
        told = _told(rows)
        if kind == "overflow" and not source.name and (first := _first_extreme(rows)):
            notes = (*notes, first)
    place = _place(call) | ({"phase": "update"} if source.kind == "parameter" else {})
    limit = source.limit if kind == "overflow" else 0.0
    return Verdict(
        **place, kind=kind, parameter=parameter, dtypes=call.dtypes, shapes=call.shapes, value=call.largest,
        limit=limit, detail=detail, notes=notes, story=told,
    )  # fmt: skip


def _place(call: CallRecord) -> dict[str, Any]:
    return {name: getattr(call.site, name) for name in ("op", "module", "line", "phase")}


def _of_maker(call: CallRecord, limit: float) -> str:
    """Return which operator of a wider format made the input that the format of a call cannot hold."""
    maker = next((row for row in path(call)[:-1] if row.made > limit and row.site.op not in CASTING), None)
    if maker is None:
        return ""
    return f"its input {call.largest:.6g} comes from {maker.site.op} at {maker.site.line.partition(' ')[0]}"


def _of_mask(source: Source) -> str:
    mask, call = source.over[0], source.call
    assert call is not None
    whose = mask.name or "a tensor that is neither batch nor state"
    if mask.kind == "deliberate" and mask.call is not None:
        whose = f"{mask.call.site.op} at {mask.call.site.line}"
    if call.site.op not in NORMALISING:
        return f"{MASKED}it comes from {whose}; mask after {call.site.op}, or leave those entries out"
    if source.remark:
        return f"{source.remark}; the mask comes from {whose}"
    return f"{MASKED}it comes from {whose}, no row is masked out entirely, and what lies between has changed it"


def _of_input(micro: MicroBatch, name: str) -> str:
    tensor = tensors((micro.batch, micro.named))[int(name.removeprefix("input "))].detach()
    if tensor.layout is not torch.strided or extremes(tensor)[1]:
        return ""
    bad, tests = ~torch.isfinite(tensor), (("nan", torch.isnan), ("inf", torch.isinf))
    what = " or ".join(word for word, test in tests if bool(test(tensor).any()))
    count = int(bad.sum())
    text = f"{count} of {tensor.numel()} values {'is' if count == 1 else 'are'} {what}"
    if not tensor.dim():
        return text
    return f"{text}, in {shown(bad.reshape(len(tensor), -1).any(1).nonzero().flatten().tolist())}"


def _of_cast(subject: Subject, verdict: Verdict) -> Verdict | None:
    """Return the verdict on a low weight that is infinite because its precise value is too large; None if it is not."""
    weight = dict(subject.model.named_parameters()).get(verdict.parameter)
    if weight is None or weight.dtype not in LOW_DTYPES or bool(torch.isnan(weight).any()):
        return None
    bad = torch.isinf(Tensor.detach(weight))
    for precise in _precise(subject, weight):
        value, finite, _ = extremes(precise[bad])
        if finite and torch.equal(precise.to(weight.dtype), Tensor.detach(weight)):
            (wide, low), shapes = described([precise, weight])
            limit, name = torch.finfo(weight.dtype).max, verdict.parameter
            return Verdict(
                kind="overflow", op=CAST, module=name.rpartition(".")[0], phase="update", parameter=name,
                dtypes=(wide,), shapes=shapes[1:], value=value, limit=limit,
                detail=f"the {wide} value of {name} is {value:.6g}, and its cast to {low}, which ends at {limit:g}, is "
                "infinite",
            )  # fmt: skip
    return None


def _precise(subject: Subject, weight: nn.Parameter) -> Iterator[Tensor]:
    """Yield tensors that may hold the precise value of a low weight: halfstep's, or what the optimizer updates."""
    store = WeightStore.behind(weight)
    if store is not None:
        yield store.read(weight)
    for parameter in [] if subject.optimizer is None else stepped_by(subject.optimizer):
        if parameter.shape == weight.shape and parameter.dtype not in LOW_DTYPES:
            yield parameter.detach()


def _of_sum(subject: Subject, attempt: Attempt) -> Verdict:
    leaf = attempt.added
    assert leaf is not None
    total = attempt.gradients[leaf]
    dtypes, shapes = described([total])
    return Verdict(
        kind="overflow", op="add", phase="backward", parameter=subject.names.get(id(leaf), ""),
        dtypes=dtypes, shapes=shapes, value=extremes(total)[0], limit=torch.finfo(total.dtype).max,
    )  # fmt: skip


def _of_scale(subject: Subject, attempt: Attempt, verdict: Verdict) -> tuple[Verdict, list[str]]:
    """Return the verdict and notes after replays at lower scales: the loss scale alone may be the cause."""
    if subject.scaling == "none" or (subject.scaling == "static" and subject.scale <= 1.0):
        return verdict, []
    helps = helping_scale(subject, attempt.only)
    if not helps:
        lowest = min(LOWEST, subject.scale)
        low = subject.run(traced=True, factor=lowest / subject.scale, only=attempt.only)
        if low.trace is not None:  # what a higher scale has hidden by an overflow of its own
            verdict = verdict_of(low.trace, subject.names)
        return verdict, [f"no loss scale helps: at {lowest:g}, the lowest tried, it is the same"]
    if helps < 1.0 and subject.scaling == "static":  # a scale raises gradients; lower than 1 it hides too large ones
        return verdict, [f"at scale 1 it is the same; at {helps:g} the step is finite"]
    how = "is fixed" if subject.scaling == "static" else "adapts by itself"
    if helps < subject.floor:
        how = f"does not fall below {subject.floor:g}"
    detail = f"it was {subject.scale:g}, and it {how}"
    return replace(verdict, kind="scale_too_high", detail=detail), [f"at scale {helps:g} the step is finite"]


def helping_scale(subject: Subject, only: int | None = None) -> float:
    """Return a lower loss scale at which the step is finite: 1 or the lowest there is; 0.0 if it is finite at none."""
    for scale in (1.0, LOWEST):
        if 0.0 < scale < subject.scale and not subject.run(factor=scale / subject.scale, only=only).bad:
            return scale
    return 0.0


def _of_update(subject: Subject, attempt: Attempt) -> Verdict:
    bad = _bad_states(subject)
    if bad:
        return Verdict(kind="bad_state", phase="update", parameter=bad[0])
    gradients = list(attempt.gradients.values())
    if subject.normed:
        norms = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g, dtype=torch.float32)
                 for g in gradients if g.is_floating_point()]  # fmt: skip
        if norms and not bool(torch.isfinite(torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms])))):
            largest = max(extremes(g)[0] for g in gradients)
            if largest / subject.scale * math.sqrt(sum(g.numel() for g in gradients)) < FP32_ROOT:
                detail = f"it was {subject.scale:g}; every gradient is finite, the sum of their squares is not"
                return Verdict(kind="scale_too_high", phase="update", value=largest, detail=detail)
            return Verdict(
                kind="overflow", op="linalg.vector_norm", phase="update", dtypes=("float32",), shapes=((),),
                value=largest, limit=FP32_MAX, notes=("every gradient is finite; the sum of their squares is not",),
            )  # fmt: skip
    return Verdict(kind="not_reproducible")


def _bad_states(subject: Subject) -> list[str]:
    found, names, kind = [], subject.names, type(subject.optimizer).__name__
    for parameter, state in () if subject.optimizer is None else subject.optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and not extremes(value)[1]:
                found.append(f"{key} of {names.get(id(parameter), '?')} in {kind}")
    return found


def _differences(subject: Subject, attempt: Attempt) -> Iterator[str]:
    dropped = subject.dropped
    for index, (micro, loss) in enumerate(zip(subject.window, attempt.losses, strict=False), dropped):
        if micro.loss is not None and not torch.equal(micro.loss.cpu(), loss.float().cpu().to(micro.loss.dtype)):
            if micro.loss.numel() != 1 or loss.numel() != 1:  # reduced outside of the loss function
                if not torch.equal(micro.loss.cpu().nan_to_num(), loss.float().cpu().to(micro.loss.dtype).nan_to_num()):
                    yield f"the losses of micro-batch {index + 1} were others than in the replay"
                continue
            first, second = float(micro.loss), float(loss)
            if first == first or second == second:
                yield f"the loss of micro-batch {index + 1} was {first!r} and is {second!r} in the replay"
    for index, micro in enumerate(subject.window, dropped):
        if versions_of((micro.batch, micro.named)) != micro.versions:
            yield f"micro-batch {index + 1} has been written to since its forward pass began"


def _reasons(subject: Subject) -> Iterator[str]:
    for micro in subject.window:
        for value in (*micro.batch, *micro.named.values()):
            if isinstance(value, Iterator):
                yield f"the batch holds a {type(value).__name__}, which can be read once"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield "gradients of ranks are added, and their sum may overflow where each is finite; a replay adds none"
    yield (
        "torch's generators, buffers and batch were as in the step; Python's and NumPy's generators and a model's "
        "own attributes were not"
    )


def path(place: CallRecord, *, small: bool = False) -> list[CallRecord]:
    """Return the calls from the first to the place, each the argument of the next that matters most.

    That is an argument that is not finite, else the largest or, with `small`, the smallest, as in a division by 0.
    """
    rows, seen = [place], {place}
    while parents := [p for p in rows[-1].parents if p not in seen and p.dtype is not None]:
        spoiled = [p for p in parents if not p.finite_out]
        rows.append((min if small else max)(spoiled or parents, key=lambda p: p.made))
        seen.add(rows[-1])
    rows.reverse()
    # alike are those of one operator of the user's, such as the kernels of its backward pass
    where = [(row.site.op, row.site.module, row.site.line, row.site.phase) for row in rows]
    return [row for row, here, following in zip(rows, where, [*where[1:], None], strict=True) if here != following]


def _told(rows: list[CallRecord]) -> tuple[Magnitude, ...]:
    """Return at most `ROWS` rows of a path: the last ones, and those before that changed the magnitude most."""
    early = range(max(len(rows) - NEAREST, 0))
    changed = sorted(early, key=lambda index: _change(rows, index), reverse=True)[: ROWS - NEAREST]
    kept = [rows[index] for index in (*sorted(changed), *range(len(early), len(rows)))]
    formats = [str(call.dtype).removeprefix("torch.") for call in kept]
    return tuple(
        Magnitude(**_place(call), dtype=dtype, largest=call.made, limit=call.limit, finite=call.finite_out)
        for call, dtype in zip(kept, formats, strict=True)
    )


def _change(rows: list[CallRecord], index: int) -> float:
    before = rows[index - 1].made if index else rows[index].largest
    return abs(math.log(max(rows[index].made, TINY) / max(before, TINY)))


def _first_extreme(rows: list[CallRecord]) -> str:
    """Return where on a path before the place magnitudes left the normal range, "" if only at the place."""
    if rows[0].largest > EXTREME and rows[0].carrier:
        return f"magnitudes are out of the normal range from {rows[0].carrier} on: it holds {rows[0].largest:.6g}"
    for index, row in enumerate(rows[:-1]):
        if row.made > EXTREME and row.site.phase == rows[-1].site.phase:
            before = rows[index - 1].made if index else row.largest
            module = f" in {row.site.module}" if row.site.module else ""
            grew = f"{before:.4g} before it, {row.made:.4g} after"
            return f"magnitudes passed {EXTREME:g} first in {row.site.op}{module} at {row.site.line}: {grew}"
    return ""
