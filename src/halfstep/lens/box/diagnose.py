"""Diagnose: a `Verdict` from a replay with instruments, and advice where no policy helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.formats import LOW_DTYPES
from halfstep.lens.box.origins import Source
from halfstep.lens.box.remarks import NORMALISING, shown
from halfstep.lens.box.replay import Attempt, Replay
from halfstep.lens.box.story import first_extreme, path, story
from halfstep.lens.box.trace import Trace
from halfstep.lens.calls import extremes
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import resolved
from halfstep.step.record import MicroBatch, versions_of
from halfstep.step.signals import Signals
from halfstep.trees import tensors
from halfstep.verdict import Cure, Magnitude, Verdict
from halfstep.weights.store import WeightStore

__all__ = ["CURABLE", "Subject", "advice", "diagnose", "inspect", "low_of", "verdict_of"]

CURABLE = frozenset({"overflow", "invalid", "scale_too_high"})
"""Kinds of verdicts that a change of policy may cure."""

MASKED = "the mask's -inf becomes nan by arithmetic: "

WRITTEN = "a value that is not finite is written here by the program itself"

CAST = "to"
"""The operator that a weight is cast by when an update writes its low copy."""

LARGE = 1e3
"""Larger weights get a note."""

FP32_MAX = float(torch.finfo(torch.float32).max)


@dataclass(eq=False)
class Subject:
    """A step to diagnose.

    Attributes:
        replay: runs it again.
        model: the user's model.
        optimizer: the optimizer that would have updated the model, or None.
        policy: the policy it ran under; None if it is not known.
        under: ``with under(policy):`` replays run under another policy.
        scaling: "none", "static" or "dynamic".
        scale: the loss scale.
        step: its number.
        rank: of this process.
        notes: notes for the verdict that are known before the replay.
        normed: whether an update is skipped when the norm of all gradients is not finite.
        foreign: whether the loss function opens the regions; then trials open others in their places.
        region: the name of what opens them.
        dropped: how many micro-batches of its window came before those of `replay`, and are not kept any more.
        gone: why none can be run again, in words; "" if one can.
        signals: the history of the run; None if there is none, as in a replay from a file.
    """

    replay: Replay
    model: nn.Module
    optimizer: Optimizer | None
    policy: Policy | None
    under: Callable[[Policy], AbstractContextManager[None]]
    scaling: str = "none"
    scale: float = 1.0
    step: int = 0
    rank: int = 0
    notes: tuple[str, ...] = ()
    normed: bool = True
    foreign: bool = False
    region: str = "torch.autocast"
    dropped: int = 0
    gone: str = ""
    signals: Signals | None = None

    @property
    def low(self) -> str:
        """The low format, "" if it is not known."""
        return low_of(self.policy, self.model)

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
    """Replay a step with instruments and name the first cause; without cures.

    Returns:
        The verdict and the replay it was drawn from.
    """
    attempt = subject.replay.run(traced=True)
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
            assert attempt.index is not None
            micro = subject.replay.window[attempt.index]
            verdict = replace(verdict, detail=_of_input(micro, verdict.parameter))
        elif verdict.kind == "bad_state" and (cast := _of_cast(subject, verdict)) is not None:
            verdict = cast
        elif verdict.kind == "bad_state":
            notes += [f"{name} is not finite either" for name in _bad_states(subject)][:3]
        elif verdict.kind in {"overflow", "invalid"} and _only_gradients(attempt):
            verdict, more = _of_scale(subject, attempt, verdict)
            notes += more
        if verdict.kind in {"overflow", "invalid"} and verdict.detail != WRITTEN and verdict.op != CAST:
            notes += _large(subject)
    size = subject.dropped + len(subject.replay.window)
    if size > 1 and attempt.index is not None:
        notes.append(f"micro-batch {subject.dropped + attempt.index + 1} of {size} of its window")
    if _compiled(subject.model):
        notes.append("the model is compiled; the replay ran it eagerly")
    return replace(verdict, step=subject.step, rank=subject.rank, notes=(*verdict.notes, *notes)), attempt


def inspect(subject: Subject, why: str) -> Verdict:
    """Return what the tensors of a step show without a replay; of sharded ones this rank's part.

    Args:
        subject: the step.
        why: the reason why it is not replayed, in words.
    """
    verdict = Verdict(kind="not_reproducible", detail=f"not replayed: {why}")
    window = subject.replay.window
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
    reason = f"not replayed: {why}"
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
    return replace(verdict, step=subject.step, rank=subject.rank, notes=(*verdict.notes, *subject.notes))


def verdict_of(trace: Trace, names: dict[int, str]) -> Verdict:
    """Return the verdict that follows from the trace of a replay that was not finite."""
    source, leaf = first_cause(trace)
    return _verdict_on(source, "" if leaf is None else names.get(id(leaf), ""))


def first_cause(trace: Trace) -> tuple[Source, Tensor | None]:
    """Return where the values that are not finite come from first, and the leaf whose gradient shows it, or None."""
    assert trace.loss is not None
    if not extremes(trace.loss)[1]:
        return trace.origins.accused(trace.loss)[0], None
    found: list[tuple[Source, Tensor]] = []
    for leaf, gradient in trace.gradients.items():
        if not extremes(gradient)[1]:
            found += [(source, leaf) for source in trace.origins.accused(gradient)]
    return min(found, key=lambda pair: pair[0].rank())


def _verdict_on(source: Source, culprit: str) -> Verdict:
    call = source.call
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
        told = story(rows)
        if kind == "overflow" and not source.name and (first := first_extreme(rows)):
            notes = (*notes, first)
    return Verdict(
        kind=kind,
        op=call.site.op,
        module=call.site.module,
        phase="update" if source.kind == "parameter" else call.site.phase,
        line=call.site.line,
        parameter=parameter,
        dtypes=call.dtypes,
        shapes=call.shapes,
        value=call.largest,
        limit=source.limit if kind == "overflow" else 0.0,
        detail=detail,
        notes=notes,
        story=told,
    )


def _of_mask(source: Source) -> str:
    """Return which mask an operator made NaN of."""
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
    """Return how much of an input is not finite, and where."""
    for index, tensor in enumerate(tensors((micro.batch, micro.named))):
        if name == f"input {index}" and tensor.layout is torch.strided and not extremes(tensor)[1]:
            bad = ~torch.isfinite(tensor.detach())
            what = "nan" if bool(torch.isnan(tensor).any()) else "inf"
            if bool(torch.isinf(tensor).any()):
                what = "inf" if what == "inf" else "nan or inf"
            count = int(bad.sum())
            text = f"{count} of {tensor.numel()} values {'is' if count == 1 else 'are'} {what}"
            if not tensor.dim():
                return text
            rows = bad.reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
            return f"{text}, in {shown(rows)}"
    return ""


def _of_cast(subject: Subject, verdict: Verdict) -> Verdict | None:
    """Return the verdict on a low weight that is infinite because its precise value is too large; None if it is not."""
    weight = dict(subject.model.named_parameters()).get(verdict.parameter)
    if weight is None or weight.dtype not in LOW_DTYPES or bool(torch.isnan(weight).any()):
        return None
    bad = torch.isinf(weight.detach())
    for precise in _precise(subject, weight):
        value, finite, _ = extremes(precise[bad])
        if finite and torch.equal(precise.to(weight.dtype), weight.detach()):
            limit, low = torch.finfo(weight.dtype).max, str(weight.dtype).removeprefix("torch.")
            held = f"the {str(precise.dtype).removeprefix('torch.')} value of {verdict.parameter} is {value:.6g}"
            return Verdict(
                kind="overflow", op=CAST, module=verdict.parameter.rpartition(".")[0], phase="update",
                parameter=verdict.parameter, dtypes=(str(precise.dtype).removeprefix("torch."),),
                shapes=(tuple(weight.shape),), value=value, limit=limit,
                detail=f"{held}, and its cast to {low}, which ends at {limit:g}, is infinite",
            )  # fmt: skip
    return None


def _precise(subject: Subject, weight: nn.Parameter) -> Iterator[Tensor]:
    """Yield tensors that may hold the precise value of a low weight: halfstep's, or what the optimizer updates."""
    store = WeightStore.behind(weight)
    if store is not None:
        yield store.read(weight)
    for group in [] if subject.optimizer is None else subject.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.shape == weight.shape and parameter.dtype not in LOW_DTYPES:
                yield parameter.detach()


def _large(subject: Subject) -> Iterator[str]:
    """Yield a note on the largest weight, if it is out of the normal range."""
    found = [(extremes(p)[0], name) for name, p in subject.model.named_parameters() if not is_lazy(p)]
    value, name = max(found, default=(0.0, ""))
    if value > LARGE:
        yield f"{name} holds values as large as {value:.3g}"


def _only_gradients(attempt: Attempt) -> bool:
    return all(extremes(loss)[1] for loss in attempt.losses)


def _of_sum(subject: Subject, attempt: Attempt) -> Verdict:
    """Return the verdict on micro-batches that are finite one by one."""
    leaf = attempt.added
    assert leaf is not None
    total = attempt.gradients[leaf]
    return Verdict(
        kind="overflow", op="add", phase="backward", parameter=subject.names.get(id(leaf), ""),
        dtypes=(str(total.dtype).removeprefix("torch."),), shapes=(tuple(total.shape),),
        value=extremes(total)[0], limit=torch.finfo(total.dtype).max,
    )  # fmt: skip


def _of_scale(subject: Subject, attempt: Attempt, verdict: Verdict) -> tuple[Verdict, list[str]]:
    """Return the verdict and notes after a replay at scale 1: the loss scale alone may be the cause."""
    if subject.scale <= 1.0 or subject.scaling == "none":
        return verdict, []
    without = subject.replay.run(factor=1.0 / subject.scale, only=attempt.only)
    if without.bad:
        return verdict, ["it is no scaling problem: with scale 1 it is the same"]
    detail = f"it was {subject.scale:g}, and it {'adapts by itself' if subject.scaling == 'dynamic' else 'is fixed'}"
    return replace(verdict, kind="scale_too_high", detail=detail), ["at scale 1 the step is finite"]


def _of_update(subject: Subject, attempt: Attempt) -> Verdict:
    """Return the verdict on a step whose forward and backward passes are finite."""
    bad = _bad_states(subject)
    if bad:
        return Verdict(kind="bad_state", phase="update", parameter=bad[0])
    gradients = list(attempt.gradients.values())
    if gradients and subject.normed:
        norms = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g, dtype=torch.float32)
                 for g in gradients if g.is_floating_point()]  # fmt: skip
        norm = torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms])) if norms else torch.zeros(())
        if not bool(torch.isfinite(norm)):
            largest = max(extremes(g)[0] for g in gradients)
            return Verdict(
                kind="overflow", op="linalg.vector_norm", phase="update", dtypes=("float32",), shapes=((),),
                value=largest, limit=FP32_MAX, notes=("every gradient is finite; the sum of their squares is not",),
            )  # fmt: skip
    return Verdict(kind="not_reproducible")


def _bad_states(subject: Subject) -> list[str]:
    """Return names of optimizer states that are not finite."""
    found = []
    if subject.optimizer is not None:
        names = subject.names
        kind = type(subject.optimizer).__name__
        for parameter, state in subject.optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and not extremes(value)[1]:
                    found.append(f"{key} of {names.get(id(parameter), '?')} in {kind}")
    return found


def _differences(subject: Subject, attempt: Attempt) -> Iterator[str]:
    """Yield in words where the replay differs from the step."""
    dropped = subject.dropped
    for index, (micro, loss) in enumerate(zip(subject.replay.window, attempt.losses, strict=False), dropped):
        if micro.loss is not None and not torch.equal(micro.loss.cpu(), loss.float().cpu().to(micro.loss.dtype)):
            if micro.loss.numel() != 1 or loss.numel() != 1:  # reduced outside of the loss function
                if not torch.equal(micro.loss.cpu().nan_to_num(), loss.float().cpu().to(micro.loss.dtype).nan_to_num()):
                    yield f"the losses of micro-batch {index + 1} were others than in the replay"
                continue
            first, second = float(micro.loss), float(loss)
            if first == first or second == second:
                yield f"the loss of micro-batch {index + 1} was {first!r} and is {second!r} in the replay"
    for index, micro in enumerate(subject.replay.window, dropped):
        if versions_of((micro.batch, micro.named)) != micro.versions:
            yield f"micro-batch {index + 1} has been written to since its forward pass began"


def _reasons(subject: Subject) -> Iterator[str]:
    """Yield in words what a replay cannot restore."""
    for micro in subject.replay.window:
        for value in (*micro.batch, *micro.named.values()):
            if isinstance(value, Iterator):
                yield f"the batch holds a {type(value).__name__}, which can be read once"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield "gradients of ranks are added, and their sum may overflow where each is finite; a replay adds none"
    yield (
        "torch's generators, buffers and batch were as in the step; Python's and NumPy's generators and a model's "
        "own attributes were not"
    )


def _compiled(model: nn.Module) -> bool:
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


OURS = "look at the line: it puts nan or inf there itself; take it out, or mask what comes of it before the loss"

MASK = "mask last, after this operator: its gradient multiplies -inf by 0; or mask with a large finite negative number"

ENDS = "clamp the argument inside (-1, 1): the gradient at the ends is infinite"
ROOT = "add an eps under the root: its gradient at 0 is infinite"
SPREAD = "it needs two values at least, or correction=0; and an eps before a division by it"
NO_LABELS = (
    "no label counts, and the mean over none is 0/0: skip such a batch, or use reduction='sum' and divide by the "
    "count, at least 1"
)

ADVICE = {
    "bad_batch": "check what loads it: torch.isfinite(x).all() in the data loader names the sample",
    "bad_state": "load the last checkpoint whose weights and optimizer state are finite; then look for what wrote "
    "them: an update with too high a learning rate, an eps that is 0 in the state's format, an edit by hand",
    "not_reproducible": "make what the loss function draws depend on torch's generators alone, and look again",
}

OVERFLOW = {
    "": "it is not finite with every rule in fp32 either: the values themselves are too large, or the code asks for a "
    "low format by name (.half(), dtype=); scale them down, or take the cast out",
    "else": "none of the rules that were tried makes it finite; look at the value: scale it down where it is made",
    "exp": "subtract the maximum first (logsumexp, softmax and log_softmax do), or clamp the argument",
}

INVALID = {
    "": "keep the argument away from the point where the function has no value, by an eps that the format can hold",
    "div": "add an eps to the divisor that the format can hold (fp16: at least 6e-8, better 1e-4)",
    "log": "clamp the argument from below, or use log_softmax, logsigmoid or log1p",
    "sqrt": ROOT,
    "softmax": "a row is masked out entirely; leave one entry, or use a large negative number instead of -inf",
    "scaled_dot_product_attention": "a row is masked out entirely, or its logits are far too large; let it attend to "
    "something, scale queries and keys down, or normalise them",
    "acos": ENDS,
    "asin": ENDS,
    "pow": "keep the base away from 0 by an eps: a negative power, and the gradient of a root, are infinite there",
    "ctc_loss": "a target is longer than its input lets it be (twice as long, if letters repeat): drop that sample, or "
    "pass zero_infinity=True",
    "normalize": "give it an eps that the format can hold (fp16: at least 6e-8, better 1e-4), or fp32",
    "std": SPREAD,
    "var": SPREAD,
    "cross_entropy": NO_LABELS,
    "nll_loss": NO_LABELS,
    "linalg.vector_norm": ROOT,
    "norm": ROOT,
}


def advice(verdict: Verdict, *, everywhere: bool = False) -> tuple[Cure, ...]:
    """Return what to do where no policy helps; `everywhere`: the step is not finite in fp32 either."""
    text = ADVICE.get(verdict.kind, "") if verdict.kind != "not_reproducible" or not verdict.detail else ""
    if verdict.kind == "overflow":
        text = OVERFLOW.get(verdict.op, OVERFLOW["" if everywhere else "else"])
    if verdict.kind == "invalid":
        text = OURS if verdict.detail == WRITTEN else INVALID.get(verdict.op, INVALID[""])
        text = MASK if verdict.detail.startswith(MASKED) else text
    return (Cure(policy=None, text=text, verified=False),) if text else ()
