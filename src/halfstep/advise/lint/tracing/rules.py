"""Rules on a traced step: its weights, optimizer, loss and waits; formats, values and formulas of its operators."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfstep.advise.lint.rule import RULES, WORDS, Check, Hit, LintFinding, check_of
from halfstep.advise.lint.tracing import trace as traced
from halfstep.advise.lint.tracing.trace import Trace, TracedCall, Weight, hit_at, place_of, trace_step
from halfstep.errors import BindError, LintError
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, format_of
from halfstep.lens import raised_at
from halfstep.policy import Policy
from halfstep.tasks import Task, load_task, task_names

LOST = 0.25  # share of weights that have a gradient and do not move, from which it is reported


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _formats(found: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in set(found)))


def _of_weights(trace: Trace, place: str, wrong: Callable[[Trace, Weight], bool], text: str) -> Iterator[Hit]:
    if found := [w for w in trace.weights if wrong(trace, w)]:
        made, stored = _formats(w.made for w in found), _formats(w.stored for w in found)
        what = text.format(number=len(found), made=made, stored=stored)
        yield place_of(getattr(trace.task, place), f"{what}: {listed([w.name for w in found])}")


OF_WEIGHTS: Sequence[tuple[str, str, Callable[[Trace, Weight], bool], str]] = (
    ("HS101", "model", lambda t, w: w.made in LOW_DTYPES and w.trained,
     "the model makes {number} parameters in {made}"),
    ("HS102", "optimizer", lambda t, w: w.trained and not w.stepped,
     "the optimizer does not have {number} parameters that require gradients"),
    ("HS104", "model", lambda t, w: w.trained and w.stepped and not w.gradient and t.problem is None,
     "no gradient arrived at {number} parameters"),
    ("HS108", "model", lambda t, w: not (w.trained or w.stepped or w.precise) and w.moved,
     "the forward pass updates {number} tensors that are stored in {stored}"),
)  # fmt: skip
"""Code -> the function of the task that makes such a weight, what is wrong with the weight, and the same in words."""

for code, place, wrong, text in OF_WEIGHTS:
    check_of(code)(partial(_of_weights, place=place, wrong=wrong, text=text))


@check_of("HS103")
def _foreign(trace: Trace) -> Iterator[Hit]:
    if trace.foreign:
        has = f"{type(trace.optimizer).__name__} has {len(trace.foreign)} tensors that are no parameters of the model"
        yield place_of(trace.task.optimizer, f"{has}: {'; '.join(trace.foreign[:2])}")


@check_of("HS105")
def _unmoved(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if w.stepped and not w.precise and w.unmoved >= LOST]
    if found:
        worst = max(found, key=lambda w: w.unmoved)
        what = f"the step left {worst.unmoved:.0%} of the {DTYPE_NAMES[worst.stored]} weights {worst.name!r} with a "
        what += f"gradient as they were, and {LOST:.0%} or more of {len(found)} tensors"
        yield place_of(trace.task.optimizer, what)


def _stepped(trace: Trace, group: Mapping[str, Any]) -> list[Weight]:
    return [w for w in trace.weights if w.name in group["names"] and w.trained]


@check_of("HS106")
def _decay(trace: Trace) -> Iterator[Hit]:
    for group in trace.groups:
        decay, rate = group.get("weight_decay", 0.0), group.get("initial_lr", group.get("lr", 0.0))
        if not group.get("decoupled_weight_decay") or not isinstance(decay, float) or not isinstance(rate, float):
            continue
        # below a number in [1, 2) the next one is at least half a spacing away, relative; half of that is rounded off
        kept = [(w, format_of("fp32" if w.precise else w.stored)) for w in _stepped(trace, group)]
        lost = [(w, form) for w, form in kept if 0.0 < decay * rate < form.eps / 4]
        if lost:
            form = lost[0][1]
            what = f"lr * weight_decay = {decay * rate:.2g} is below half an ulp of every {form.name} number "
            what += f"({form.eps / 4:.2g}, relative) in {len(lost)} parameters: {listed([w.name for w, _ in lost])}"
            yield place_of(trace.task.optimizer, what)


@check_of("HS107")
def _eps(trace: Trace) -> Iterator[Hit]:
    for group in trace.groups:
        eps = group.get("eps")
        if not trace.generic or group.get("fused") or not isinstance(eps, float) or eps <= 0.0:
            continue
        low = [w for w in _stepped(trace, group) if not w.precise]
        lost = [w for w in low if eps <= format_of(w.stored).smallest_subnormal / 2]
        if lost:
            form = format_of(lost[0].stored)
            what = f"eps={eps:g} of {type(trace.optimizer).__name__} is 0 in {form.name}, the format of its "
            what += f"{len(lost)} parameters and states (smallest number {form.smallest_subnormal:.2g})"
            yield place_of(trace.task.optimizer, what)


@check_of("HS131")
def _low_loss(trace: Trace) -> Iterator[Hit]:
    if trace.loss is not None and trace.loss.dtype in LOW_DTYPES:
        what = f"loss_fn returns a loss in {str(trace.loss.dtype).removeprefix('torch.')}"
        line = trace.calls[-1].line if trace.calls else ""
        yield hit_at(line, what) if line.partition(":")[0] else place_of(trace.task.loss_fn, what)


@check_of("HS132")
def _differs(trace: Trace) -> Iterator[Hit]:
    if trace.differs:
        yield place_of(trace.task.loss_fn, f"{trace.differs} differs from the first time")


@check_of("HS134")
def _reads(trace: Trace) -> Iterator[Hit]:
    found: dict[str, list[str]] = {}
    for function, line in trace.reads:
        found.setdefault(line, []).append(function)
    for line, functions in found.items():
        times = f", {len(functions)} times" if len(functions) > 1 else ""
        yield hit_at(line, f"the host waits for a value here{times}: {', '.join(dict.fromkeys(functions))}")


@check_of("HS133")
def _raises(trace: Trace) -> Iterator[Hit]:
    error = trace.problem
    if error is None or (trace.foreign and isinstance(error, BindError)):  # which HS103 reports
        return
    what = f"the step raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    line = raised_at(error)
    yield Hit(line.lineno or 0, what, line.filename) if line else place_of(trace.task.loss_fn, what)


Found = Iterator[tuple[TracedCall, str]]
LAYERS, GUARDS = frozenset[str](WORDS["LAYERS"]), frozenset[str](WORDS["GUARDS"])
SMALL = 8  # sizes below this belong to data (channels, coordinates); padding them is not for the model to decide


def by_line(code: str) -> Callable[[Callable[[Trace], Found]], Check]:
    """Make the decorated function the check of the rule `code`.

    The check has a hit for each line, with what its first call shows and how many more there are.
    """

    def register(rule: Callable[[Trace], Found]) -> Check:
        @check_of(code)
        def check(trace: Trace) -> Iterator[Hit]:
            found: dict[tuple[str, str], list[str]] = {}
            for call, what in rule(trace):
                found.setdefault((call.line, call.op), []).append(what)
            for (line, _), (first, *more) in found.items():
                yield hit_at(line, first + (f" ({len(more) + 1} calls on this line)" if more else ""))

        return check

    return register


def _form(call: TracedCall) -> str:
    return DTYPE_NAMES.get(call.outputs[0].dtype, str(call.outputs[0].dtype)) if call.outputs else ""


def _in(call: TracedCall) -> str:
    return f" in module {call.module!r}" if call.module else ""


def _is_low(call: TracedCall) -> bool:
    return bool(call.outputs) and call.outputs[0].dtype in LOW_DTYPES


@check_of("HS111")
def _sizes(trace: Trace) -> Iterator[Hit]:
    narrow = trace.policy.dtype != "auto" and format_of(trace.policy.dtype).bits <= 8
    unit = 16 if narrow else 8
    found: dict[tuple[str, tuple[int, int]], dict[str, None]] = {}
    for call in trace.calls:
        if call.op not in LAYERS or trace.rules.get(call.op) != "low" or not (_is_low(call) or narrow and call.outputs):
            continue
        for tensor in call.inputs[1:2]:
            out, into = tensor.shape[:2] if tensor.dim() > 1 else (0, 0)  # else the weight of one output
            if any(size >= SMALL and size % unit for size in (out, into)):
                names = found.setdefault((call.line, (into, out)), {})
                names[trace.names.get(id(tensor), call.module)] = None
    for (line, (into, out)), names in found.items():
        yield hit_at(line, f"{listed(list(names))} with {into} inputs and {out} outputs: no multiples of {unit}")


@check_of("HS112")
def _functions(trace: Trace) -> Iterator[Hit]:
    inside = {c.function for c in trace.calls if any(t.dtype in LOW_DTYPES for t in (*c.inputs, *c.outputs))}
    for name, (place, low) in trace.functions.items():
        if low or name in inside:
            what = f"autograd.Function {name} runs with low tensors and has no rule for formats"
            yield Hit(place.line, what, place.file)


@by_line("HS113")
def _in_place_wide(trace: Trace) -> Found:
    for call in trace.calls:
        wide = call.in_place and [t.dtype for t in call.inputs[:1]] == [torch.float32]
        if wide and trace.rules.get(call.op) == "low":
            yield call, f"{call.op}_ writes into a fp32 tensor: the operator is not cast to the low format"


@by_line("HS114")
def _in_place_low(trace: Trace) -> Found:
    for call in trace.calls:
        if call.in_place and call.inputs and call.inputs[0].dtype in LOW_DTYPES:
            if any(t.dtype is torch.float32 and t.dim() for t in call.inputs[1:]):
                yield call, f"{call.op}_ rounds fp32 values into a {DTYPE_NAMES[call.inputs[0].dtype]} tensor"


@by_line("HS115")
def _widened(trace: Trace) -> Found:
    for call in trace.calls:
        if call.in_place or trace.rules.get(call.op) or not call.outputs or call.outputs[0].dtype is not torch.float32:
            continue
        low = [t for t in call.inputs if t.dtype in LOW_DTYPES and t.requires_grad and t.dim()]
        wide = [t for t in call.inputs if t.dtype is torch.float32 and t.dim()]
        if low and wide and not any(t.requires_grad for t in wide):
            named = [trace.names[id(t)] for t in wide if id(t) in trace.names]
            what = f"buffer {named[0]!r}" if named else "a tensor without gradient"
            yield call, f"{call.op} widens {DTYPE_NAMES[low[0].dtype]} values to fp32, because {what} is fp32"


@by_line("HS116")
def _float64(trace: Trace) -> Found:
    for call in trace.calls:
        if any(t.dtype is torch.float64 for t in call.outputs):
            yield call, f"{call.op} computes in float64{_in(call)}"


@by_line("HS117")
def _softmax_by_hand(trace: Trace) -> Found:
    powers: dict[int, TracedCall] = {}
    sums: dict[int, TracedCall] = {}
    shifted = {id(t) for c in trace.calls if c.op == "sub" for t in c.outputs}
    for call in trace.calls:
        origins = [trace.origin(t) for t in call.inputs]
        if call.op == "exp" and call.outputs:
            powers[trace.origin(call.outputs[0])] = call
        elif call.op == "sum" and origins and origins[0] in powers:
            sums[id(call.outputs[0])] = powers[origins[0]]
        elif call.op in ("div", "log") and origins and origins[-1] in sums:
            power = sums[origins[-1]]
            if _is_low(power) or not any(id(t) in shifted for t in power.inputs):
                name = "softmax" if call.op == "div" else "logsumexp"
                how = f"in {_form(power)}" if _is_low(power) else "without subtracting the largest value"
                yield call, f"{name} written as exp, sum and {call.op}, {how}"


@by_line("HS118")
def _norm_by_hand(trace: Trace) -> Found:
    squares: dict[int, TracedCall] = {}
    means: dict[int, TracedCall] = {}
    for call in trace.calls:
        origins = [trace.origin(t) for t in call.inputs]
        squared = call.op in ("pow", "square") or (call.op == "mul" and len(set(origins)) == 1 < len(origins))
        # a fp32 square that comes out low is the policy's choice, not the model's
        if squared and _is_low(call) and call.inputs[0].dtype in LOW_DTYPES:
            squares[trace.origin(call.outputs[0])] = call
        elif call.op in ("mean", "sum") and origins and origins[0] in squares:
            means[id(call.outputs[0])] = squares[origins[0]]
        elif call.op in ("rsqrt", "sqrt") and origins and origins[0] in means:
            form = _form(means[origins[0]])
            yield call, f"a norm written as squares, {call.op} and their mean or sum, in {form}"


@check_of("HS119")
def _first_without_gradients(trace: Trace) -> Iterator[Hit]:
    first: dict[str, str] = {}  # where each is used without
    used: set[str] = set()  # with gradients
    for call in trace.calls:
        for tensor in call.inputs if trace.rules.get(call.op) == "low" else ():
            name = trace.names.get(id(tensor))
            if name is None or name in used or not tensor.requires_grad or not tensor.is_leaf:
                continue
            if not call.gradients:
                first.setdefault(name, call.line)
                continue
            if name in first:
                what = f"{name!r} is used under no_grad first and with gradients later"
                yield hit_at(first[name], what)
            used.add(name)


def _shows(trace: Trace, word: str, text: str) -> Found:
    hidden = trace.loss is not None and bool(torch.isfinite(trace.loss).all())
    for call in trace.calls if hidden or word != traced.NOT_FINITE else ():
        if word in call.shows:
            yield call, text.format(op=call.op, form=_form(call), place=_in(call))


@by_line("HS126")
def _lost_guards(trace: Trace) -> Found:
    for call in trace.calls:
        for number in call.numbers if call.op in GUARDS and _is_low(call) else ():
            if 0.0 < abs(number) <= format_of(call.outputs[0].dtype).smallest_subnormal / 2:
                yield call, f"{number:g} in {call.op}{_in(call)} is 0 in {_form(call)}"


for code, word, text in (
    ("HS121", traced.MASKED_ROW, "{op}{place} gets a row in which everything is masked with -inf"),
    ("HS122", traced.INFINITE_DERIVATIVE, "{op}{place} has an infinite derivative at one of its arguments"),
    ("HS123", traced.NOT_FINITE, "{op}{place} makes inf or nan of finite numbers, and the loss does not show it"),
    ("HS124", traced.CAST_OVERFLOW, "a cast{place} to {form} makes inf of finite numbers"),
    ("HS125", traced.ROUNDED_INTEGERS, "{op}{place} makes different whole numbers equal in {form}"),
):
    by_line(code)(partial(_shows, word=word, text=text))


def task_of(target: str | Path | Task) -> Task:
    """Return a task, the one of this name, or the one that ``path/to/file.py:function`` returns."""
    if isinstance(target, Task):
        return target
    if ".py:" not in str(target) and str(target) not in task_names():
        raise LintError(
            f"target {str(target)!r} does not exist; expected a .py file, a folder, path/to/file.py:function "
            f"or one of {', '.join(task_names())}"
        )
    return load_task(str(target))


def check_task(task: Task, policy: Policy) -> list[LintFinding]:
    """Return what the traced rules find in one step of `task` under `policy`; an error of the task is a finding."""
    trace = trace_step(task, policy)
    return [rule.finding(hit) for rule in RULES.values() if rule.traced for hit in rule.check(trace)]
