"""Rules on weights and optimizer: what is stepped, in which format, and what a step changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.tracing.examples import example
from halfstep.advise.lint.tracing.functions import place_of
from halfstep.advise.lint.tracing.trace import Trace, Weight
from halfstep.errors import BindError
from halfstep.formats import DTYPE_NAMES, LOW_DTYPES, Format, format_of

__all__ = ["WEIGHT_RULES"]

LOST = 0.25
"""Share of weights that have a gradient and do not move, from which it is reported."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


def _format(weight: Weight) -> Format:
    """Return the format of the most precise value that is kept of a weight."""
    return format_of("fp32") if weight.precise else format_of(weight.stored)


def _made_low(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if w.made in LOW_DTYPES and w.trained]
    if found:
        formats = " and ".join(sorted({DTYPE_NAMES[w.made] for w in found}))
        what = f"the model makes {len(found)} parameters in {formats}: {listed([w.name for w in found])}"
        yield place_of(trace.task.model, what)


def _outside(trace: Trace) -> Iterator[Hit]:
    found = [w.name for w in trace.weights if w.trained and not w.stepped]
    if found:
        what = f"the optimizer does not have {len(found)} parameters that require gradients: {listed(found)}"
        yield place_of(trace.task.optimizer, what)


def _foreign(trace: Trace) -> Iterator[Hit]:
    if trace.foreign:
        what = f"{trace.optimizer} has {len(trace.foreign)} tensors that are no parameters of the model: "
        yield place_of(trace.task.optimizer, what + "; ".join(trace.foreign[:2]))


def _dead(trace: Trace) -> Iterator[Hit]:
    found = [w.name for w in trace.weights if w.trained and w.stepped and not w.gradient]
    if found and trace.problem is None:
        yield place_of(trace.task.model, f"no gradient arrived at {len(found)} parameters: {listed(found)}")


def _unmoved(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if w.stepped and not w.precise and w.unmoved >= LOST]
    if found:
        worst = max(found, key=lambda w: w.unmoved)
        what = (
            f"the step left {worst.unmoved:.0%} of the {DTYPE_NAMES[worst.stored]} weights {worst.name!r} with a "
            f"gradient as they were, and {LOST:.0%} or more of {len(found)} tensors"
        )
        yield place_of(trace.task.optimizer, what)


def _stepped(trace: Trace, names: Iterable[str]) -> list[Weight]:
    wanted = set(names)
    return [w for w in trace.weights if w.name in wanted and w.trained]


def _decay(trace: Trace) -> Iterator[Hit]:
    for group in trace.groups:
        decay, rate = group.get("weight_decay", 0.0), group.get("initial_lr", group.get("lr", 0.0))
        if not group.get("decoupled_weight_decay") or not isinstance(decay, float) or not isinstance(rate, float):
            continue
        # below a number in [1, 2) the next one is at least half a spacing away, relative; half of that is rounded off
        lost = [w for w in _stepped(trace, group["names"]) if 0.0 < decay * rate < _format(w).eps / 4]
        if lost:
            form = _format(lost[0])
            yield place_of(
                trace.task.optimizer,
                f"lr * weight_decay = {decay * rate:.2g} is below half an ulp of every {form.name} number "
                f"({form.eps / 4:.2g}, relative) in {len(lost)} parameters: {listed([w.name for w in lost])}",
            )


def _eps(trace: Trace) -> Iterator[Hit]:
    for group in trace.groups:
        eps = group.get("eps")
        if not trace.generic or group.get("fused") or not isinstance(eps, float) or eps <= 0.0:
            continue
        lost = [w for w in _stepped(trace, group["names"]) if not w.precise]
        lost = [w for w in lost if eps <= format_of(w.stored).smallest_subnormal / 2]
        if lost:
            form = format_of(lost[0].stored)
            yield place_of(
                trace.task.optimizer,
                f"eps={eps:g} of {trace.optimizer} is 0 in {form.name}, the format of its {len(lost)} parameters and "
                f"states (smallest number {form.smallest_subnormal:.2g})",
            )


def _low_averages(trace: Trace) -> Iterator[Hit]:
    found = [w for w in trace.weights if not (w.trained or w.stepped or w.precise) and w.moved]
    if found:
        formats = " and ".join(sorted({DTYPE_NAMES[w.stored] for w in found}))
        what = f"the forward pass updates {len(found)} tensors that are stored in {formats}: "
        yield place_of(trace.task.model, what + listed([w.name for w in found]))


def foreign_error(trace: Trace) -> bool:
    """Return whether the step was refused because of the optimizer's other parameters, which has its own rule."""
    return bool(trace.foreign) and isinstance(trace.problem, BindError)


OTHER = "OTHER = nn.Linear(16, 16)"

WEIGHT_RULES = (
    Rule(
        code="HS101", severity="warning", title="the model is low before it is prepared",
        why="Initial or loaded values are rounded once more than needed: fp32 weights and masters are then copies of "
        "rounded values.",
        fix="Make the model in fp32 and let the policy lower its weights: params=\"low\" keeps what the format lacks.",
        bad=example(model="lambda: Model().bfloat16()"), good=example(), check=_made_low,
    ),
    Rule(
        code="HS102", severity="warning", title="parameters of the model that the optimizer does not have",
        why="They stay at their initial values, and the gradient norm does not include them.",
        fix="Make the optimizer from model.parameters() when the model is complete, or call requires_grad_(False).",
        bad=example("return self.head(self.body(x))", init="self.head = nn.Linear(16, 16)",
                    optimizer="torch.optim.AdamW(model.body.parameters(), lr=1e-3)"),
        good=example("return self.head(self.body(x))", init="self.head = nn.Linear(16, 16)"), check=_outside,
    ),
    Rule(
        code="HS103", severity="error", title="the optimizer has tensors that are no parameters of the model",
        why="The optimizer was made before weights were replaced (by to(), a new head, a wrapper), or for another "
        "model: it steps tensors that no forward pass reads.",
        fix="Make the optimizer from model.parameters() after the last replacement.",
        bad=example(before=OTHER, optimizer="torch.optim.AdamW([*model.parameters(), *OTHER.parameters()], lr=1e-3)"),
        good=example(), check=_foreign,
    ),
    Rule(
        code="HS104", severity="note", title="parameters without a gradient",
        why="They are stepped by nothing; DistributedDataParallel waits for their gradients and raises.",
        fix="Remove them, use them in the loss, or call requires_grad_(False).",
        bad=example(init="self.unused = nn.Linear(16, 16)"), good=example(), check=_dead,
    ),
    Rule(
        code="HS105", severity="warning", title="updates below half an ulp of low weights",
        why="A low weight without a strategy takes only updates of at least half the distance to its neighbour; "
        "smaller ones are rounded off, in every step.",
        fix='Keep what the format lacks: master="split", "master", "kahan" or "stochastic" in the policy, or fp32 '
        'weights.',
        bad=example(optimizer="torch.optim.AdamW(model.parameters(), lr=1e-5)"),
        good=example(optimizer="torch.optim.AdamW(model.parameters(), lr=1e-1)"), check=_unmoved, under="O3",
    ),
    Rule(
        code="HS106", severity="warning", title="weight decay below half an ulp of the weights",
        why="The factor 1 - lr * weight_decay alone changes no weight: the product rounds back, and the run has no "
        "decay.",
        fix="Choose a larger decay or rate, set weight_decay=0, or keep fp32 values of the weights.",
        bad=example(optimizer="torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-4)"),
        good=example(optimizer="torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)"), check=_decay,
    ),
    Rule(
        code="HS107", severity="error", title="the optimizer's eps is 0 in the format of its states",
        why="The optimizer divides by sqrt(v) + eps in the format of the weights; where v underflows it divides by 0.",
        fix='Use eps=1e-4 or a bf16 model, or keep fp32 values: master="master" in the policy.',
        bad=example(optimizer="torch.optim.NAdam(model.parameters(), lr=1e-3)"),
        good=example(optimizer="torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-4)"), check=_eps, under="O3:fp16",
    ),
    Rule(
        code="HS108", severity="warning", title="a running average in a low format",
        why="An average moves by a small share of the difference; below half an ulp the sum is rounded back, and the "
        "average stops.",
        fix="Keep buffers and averages of weights in fp32.",
        bad=example("x = self.body(x)\nself.average.lerp_(x.detach().mean(0).bfloat16(), 0.1)\nreturn x",
                    init='self.register_buffer("average", torch.zeros(16, dtype=torch.bfloat16))'),
        good=example("x = self.body(x)\nself.average.lerp_(x.detach().mean(0).float(), 0.1)\nreturn x",
                     init='self.register_buffer("average", torch.zeros(16))'), check=_low_averages,
    ),
)  # fmt: skip
