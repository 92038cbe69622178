"""Rules on weights and optimizer, and on the step as a whole: its loss, its reproducibility, where the host waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.tracing.trace import Trace, Weight, place_of
from halfstep.errors import BindError
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, format_of
from halfstep.lens import raised_at

LOST = 0.25
"""Share of weights that have a gradient and do not move, from which it is reported."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


@check_of("HS101")
def _made_low(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if w.made in LOW_DTYPES and w.trained]
    if found:
        formats = " and ".join(sorted({DTYPE_NAMES[w.made] for w in found}))
        what = f"the model makes {len(found)} parameters in {formats}: {listed([w.name for w in found])}"
        yield place_of(trace.task.model, what)


@check_of("HS102")
def _outside(trace: Trace) -> Iterator[Hit]:
    found = [w.name for w in trace.weights if w.trained and not w.stepped]
    if found:
        what = f"the optimizer does not have {len(found)} parameters that require gradients: {listed(found)}"
        yield place_of(trace.task.optimizer, what)


@check_of("HS103")
def _foreign(trace: Trace) -> Iterator[Hit]:
    if trace.foreign:
        what = f"{trace.optimizer} has {len(trace.foreign)} tensors that are no parameters of the model: "
        yield place_of(trace.task.optimizer, what + "; ".join(trace.foreign[:2]))


@check_of("HS104")
def _dead(trace: Trace) -> Iterator[Hit]:
    found = [w.name for w in trace.weights if w.trained and w.stepped and not w.gradient]
    if found and trace.problem is None:
        yield place_of(trace.task.model, f"no gradient arrived at {len(found)} parameters: {listed(found)}")


@check_of("HS105")
def _unmoved(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if w.stepped and not w.precise and w.unmoved >= LOST]
    if found:
        worst = max(found, key=lambda w: w.unmoved)
        what = (
            f"the step left {worst.unmoved:.0%} of the {DTYPE_NAMES[worst.stored]} weights {worst.name!r} with a "
            f"gradient as they were, and {LOST:.0%} or more of {len(found)} tensors"
        )
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
            yield place_of(
                trace.task.optimizer,
                f"lr * weight_decay = {decay * rate:.2g} is below half an ulp of every {form.name} number "
                f"({form.eps / 4:.2g}, relative) in {len(lost)} parameters: {listed([w.name for w, _ in lost])}",
            )


@check_of("HS107")
def _eps(trace: Trace) -> Iterator[Hit]:
    for group in trace.groups:
        eps = group.get("eps")
        if not trace.generic or group.get("fused") or not isinstance(eps, float) or eps <= 0.0:
            continue
        lost = [w for w in _stepped(trace, group) if not w.precise]
        lost = [w for w in lost if eps <= format_of(w.stored).smallest_subnormal / 2]
        if lost:
            form = format_of(lost[0].stored)
            yield place_of(
                trace.task.optimizer,
                f"eps={eps:g} of {trace.optimizer} is 0 in {form.name}, the format of its {len(lost)} parameters and "
                f"states (smallest number {form.smallest_subnormal:.2g})",
            )


@check_of("HS108")
def _low_averages(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if not (w.trained or w.stepped or w.precise) and w.moved]
    if found:
        formats = " and ".join(sorted({DTYPE_NAMES[w.stored] for w in found}))
        what = f"the forward pass updates {len(found)} tensors that are stored in {formats}: "
        yield place_of(trace.task.model, what + listed([w.name for w in found]))


@check_of("HS131")
def _low_loss(trace: Trace) -> Iterator[Hit]:
    if trace.loss in LOW_DTYPES:
        what = f"loss_fn returns a loss in {str(trace.loss).removeprefix('torch.')}"
        last = trace.calls[-1] if trace.calls else None
        yield Hit(last.line, what, last.file) if last is not None and last.file else place_of(trace.task.loss_fn, what)


@check_of("HS132")
def _differs(trace: Trace) -> Iterator[Hit]:
    if trace.differs:
        yield place_of(trace.task.loss_fn, f"{trace.differs} differs from the first time")


@check_of("HS134")
def _reads(trace: Trace) -> Iterator[Hit]:
    found: dict[tuple[str, int], list[str]] = {}
    for function, file, line in trace.reads:
        found.setdefault((file, line), []).append(function)
    for (file, line), functions in found.items():
        times = f", {len(functions)} times" if len(functions) > 1 else ""
        yield Hit(line, f"the host waits for a value here{times}: {', '.join(dict.fromkeys(functions))}", file)


@check_of("HS133")
def _raises(trace: Trace) -> Iterator[Hit]:
    error = trace.problem
    if error is None or (trace.foreign and isinstance(error, BindError)):  # which HS103 reports
        return
    what = f"the step raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    line = raised_at(error)
    yield Hit(line.lineno or 0, what, line.filename) if line else place_of(trace.task.loss_fn, what)
