"""Rules on the step as a whole: its loss, its reproducibility, where the host waits, and whether it runs at all."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.tracing.examples import example
from halfstep.advise.lint.tracing.functions import place_of
from halfstep.advise.lint.tracing.trace import Trace
from halfstep.advise.lint.tracing.weight_rules import foreign_error
from halfstep.formats import LOW_DTYPES
from halfstep.lens import raised_at

__all__ = ["STEP_RULES"]


def _low_loss(trace: Trace) -> Iterator[Hit]:
    if trace.loss in LOW_DTYPES:
        what = f"loss_fn returns a loss in {str(trace.loss).removeprefix('torch.')}"
        last = trace.calls[-1] if trace.calls else None
        yield Hit(last.line, what, last.file) if last is not None and last.file else place_of(trace.task.loss_fn, what)


def _differs(trace: Trace) -> Iterator[Hit]:
    if trace.differs:
        yield place_of(trace.task.loss_fn, f"{trace.differs} differs from the first time")


def _reads(trace: Trace) -> Iterator[Hit]:
    found: dict[tuple[str, int], dict[str, int]] = {}
    for read in trace.reads:
        functions = found.setdefault((read.file, read.line), {})
        functions[read.function] = functions.get(read.function, 0) + 1
    for (file, line), functions in found.items():
        times = sum(functions.values())
        named = ", ".join(functions)
        yield Hit(line, f"the host waits for a value here{f', {times} times' if times > 1 else ''}: {named}", file)


def _raises(trace: Trace) -> Iterator[Hit]:
    error = trace.problem
    if error is None or foreign_error(trace):
        return
    what = f"the step raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    line = raised_at(error)
    yield Hit(line.lineno or 0, what, line.filename) if line else place_of(trace.task.loss_fn, what)


STEP_RULES = (
    Rule(
        code="HS131", severity="warning", title="a loss in a low format",
        why="A loss and its mean lose digits, in fp16 they overflow at 65504; the gradients begin with the rounding.",
        fix="Compute the loss in fp32: cast the logits up, or leave the loss to the policy.",
        bad=example(loss="lambda model, x: model(x).square().mean().bfloat16()"), good=example(), check=_low_loss,
    ),
    Rule(
        code="HS132", severity="warning", title="the step is not reproducible",
        why="Model, batches or loss draw from a generator that torch.manual_seed does not set, or depend on state "
        "that a run leaves behind: a run cannot be compared with another, resumed or replayed.",
        fix="Draw from torch's generator, or from one that is seeded with the arguments of batches().",
        bad=example(before="import itertools\n\nCOUNT = itertools.count(1)",
                    loss="lambda model, x: model(x).float().square().mean() * next(COUNT)"),
        good=example(), check=_differs,
    ),
    Rule(
        code="HS133", severity="error", title="the step raises",
        why="The task does not train under this policy; rules about what comes later were not checked.",
        fix="Correct what the message names.",
        bad=example("return self.body(x.T)"), good=example(), check=_raises,
    ),
    Rule(
        code="HS134", severity="note", title="the host waits for the device in the forward pass",
        why="On a GPU the host stops queueing work until the value has arrived; the device is idle meanwhile.",
        fix="Keep the value on the device (torch.where, a masked sum), or read it after the step.",
        bad=example("x = self.body(x)\nif x.abs().max() > 100:\n    x = x / 2\nreturn x"),
        good=example("x = self.body(x)\nreturn torch.where(x.abs().max() > 100, x / 2, x)"), check=_reads,
    ),
)  # fmt: skip
