"""Criteria: which rows of an audit are findings, and what would remedy each.

A count alone is no fault: the tails of gradients underflow in every fp16 run, and fp32 weights lose updates of elements
that hardly move. Most rules therefore ask two things: how many elements are hit, and what share of the total they hold.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from halfstep.errors import few
from halfstep.formats import FP32, Format, format_of
from halfstep.lens.audit.rows import AuditRow
from halfstep.lens.finding import KINDS, ROOM, Finding
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import RULE_KINDS
from halfstep.policy.scale_rule import ScaleRule

GRADIENTS = ("activation gradient", "weight gradient")

SHOWN = 3  # places named of what follows from a finding

LOST = 0.05
"""Share of a weight's gradient whose loss is a fault: Adam gives each element its own pace, however small it is."""

FEW = 0.01  # a smaller share of elements is no finding
ROUNDINGS = 16  # roundings to the format that one operator may err by: a product or a norm errs by about one

DRIFT = 0.1
"""Accumulated error of an activation: a tenth of it is noise. Healthy bf16 models stay below a twentieth."""

AMPLIFIED = 16.0  # an operator whose result is this many times worse than its inputs has lost their digits

OTHERWISE = 0.02
"""Share of integers that are not those of fp32: rounding at the edge of a bin moves a few, of numbers of any size."""

MOSTLY = 0.25  # share of elements that is much
SWALLOWED = 0.1  # share of the size of an update, or of a change of state, that must not be lost
SUMMED = 0.02  # error of a sum of gradients over micro-batches: in bf16 64 of them make 0.008

HALF = 0.5
"""A term counts as lost if half of it, in elements and in size, vanishes in the addition. New models with weights of
0.02 lose up to a third of a branch in a bf16 stream, and learn."""

RUNNING = 64  # times that one line adds in a step, from which on its sum is one of as many terms, whose losses add up


class Examination:
    """The rows of an audit, and the findings and remedies that follow from them; arguments as of `findings_of`."""

    def __init__(self, rows: tuple[AuditRow, ...], policy: Policy, plan: Plan, headroom: float) -> None:
        self.rows, self.policy, self.plan, self.headroom = rows, policy, plan, headroom

    def of(self, *roles: str) -> Iterator[AuditRow]:
        """Iterate over the rows of some roles."""
        return (row for row in self.rows if row.role in roles)

    @property
    def overflows(self) -> bool:
        """Whether an operator overflows: what follows is then far off the fp32 run of the whole model because of it."""
        return any(row.overflow > 0 for row in self.of("activation"))

    def finding(
        self, kind: str, row: AuditRow, severity: float, cause: str, remedy: str, policy: Policy | None = None
    ) -> Finding:
        """Return a finding in the place of `row`."""
        diff = "" if policy is None else self.policy.diff(policy)
        if not diff:
            policy = None
        place = {name: getattr(row, name) for name in ("module", "op", "role", "parameter", "line")}
        severity = min(max(severity, 0.0), 1.0)
        return Finding(kind=kind, severity=severity, cause=cause, remedy=remedy, policy=policy, diff=diff, **place)

    def wider(self, row: AuditRow) -> tuple[str, Policy | None]:
        """Return how to keep an operator out of the low format."""
        cast = row.op == "to"
        if cast and not row.module and self.plan.policy.inputs == "low":
            return "let the inputs come as they are", self.policy.replace(inputs="keep")
        ruled = not cast and bool(row.rule) and RULE_KINDS[row.rule].may_be_low
        if not ruled and row.form.bits >= FP32.bits:
            return "its inputs are fp32 already; compute it in float64, or write it in another way", None
        if not cast and row.module:
            everywhere = f", or the operator everywhere: policy.with_ops(fp32=[{row.op!r}])" if ruled else ""
            return f"keep module {row.module!r} in fp32{everywhere}", self.policy.with_modules({row.module: "fp32"})
        if cast or (not ruled and "::" in row.op):
            return "your code asks for the low format here: leave the cast out, and let the policy decide", None
        return f"give {row.op} fp32", _with_fp32(self.policy, row.op)

    def scaled(self, row: AuditRow) -> tuple[str, Policy | None]:
        """Return how to lift gradients into the format."""
        if not isinstance(self.plan.policy.scale, ScaleRule):
            narrow = row.form.is_narrow or format_of(self.plan.policy.dtype).is_narrow
            low = self.policy.dtype != "fp32" and narrow
            words = "scale the loss: the rule 'halfstep' starts high and adapts" if low else "scale the loss"
            return words, self.policy.replace(scale="halfstep")
        return (
            "the range of these gradients is wider than the format's: use bf16, whose exponents are fp32's, or keep "
            f"{row.module or row.op!r} in fp32",
            self.policy.replace(dtype="bf16", scale="auto"),
        )


def _with_fp32(policy: Policy, *ops: str) -> Policy | None:
    try:
        return policy.with_ops(fp32=ops)
    except ValueError:  # no operator of torch: a custom one without a name, a conversion
        return None


def findings_of(rows: Iterable[AuditRow], policy: Policy, plan: Plan, *, headroom: float = ROOM) -> tuple[Finding, ...]:
    """Return what is wrong in `rows`, the gravest kind first and the worst of each kind first; as `Audit.findings`."""
    exam = Examination(tuple(rows), policy, plan, headroom)
    order = list(KINDS)
    found = (finding for rule in RULES for finding in rule(exam))
    return tuple(sorted(found, key=lambda finding: (order.index(finding.kind), -finding.severity)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _overflow(exam: Examination) -> Iterator[Finding]:
    follows = _consequences(exam)
    for row in exam.of("activation"):
        if row.overflow > 0:
            form = row.form
            beyond = f"{_percent(row.overflow)} of its result is beyond {form.name}, which ends at {form.max:.6g}"
            cause = f"{beyond}, and {'would be finite in fp32' if form.has_inf else 'is cut off there'}{follows}"
            follows = ""  # it is told once, of the first
            yield exam.finding("overflow" if form.has_inf else "saturation", row, 1.0, cause, *exam.wider(row))


def _consequences(exam: Examination) -> str:
    """Return in words which gradients are zero in a run in which an operator overflows, as those divided by inf are."""
    lost = [row for row in exam.of(*GRADIENTS) if _loses(exam, row) and not _loses(exam, row, alone=True)]
    if not exam.overflows or not lost:
        return ""
    places = list(dict.fromkeys(row.parameter or f"{row.op} in {row.module or 'the model'}" for row in lost))
    return f"; with it gradients are zero that are not in fp32, those of {few(places, SHOWN)}"


def _gradient_underflow(exam: Examination) -> Iterator[Finding]:
    for row in exam.of(*GRADIENTS):
        if _loses(exam, row, alone=exam.overflows):
            form = _narrow(exam, row)
            below = f"{_percent(row.underflow)} of what its backward pass computes becomes zero in {form.name}"
            if row.missing > row.underflow and not exam.overflows:
                below = f"{_percent(row.missing)} of its gradient is zero and is not in fp32"
            cause = f"{below}, {_percent(row.subnormal)} is subnormal (loss scale {row.scale:g})"
            lost = row.underflow if exam.overflows else max(row.underflow, row.missing)
            yield exam.finding("underflow", row, max(lost, row.subnormal), cause, *exam.scaled(row))


def _loses(exam: Examination, row: AuditRow, *, alone: bool = False) -> bool:
    """Return whether a gradient underflows; `alone`: judged by its own inputs, not by the fp32 run of the model."""
    missing, accumulated = (0.0, math.nan) if alone else (row.missing, row.accumulated)
    lost = max(row.underflow, missing)
    form = _narrow(exam, row)
    if not form.is_narrow or max(lost, row.subnormal) < FEW or row.cancels:
        return False
    off = max((error for error in (row.error, accumulated) if not math.isnan(error)), default=0.0)
    drowned = row.subnormal >= 3 * MOSTLY and lost >= FEW and off >= LOST
    imprecise = row.error >= ROUNDINGS * form.eps / 2 and row.error >= 0.02
    if row.role == "weight gradient":
        return drowned or lost >= LOST or (imprecise and row.subnormal >= MOSTLY)
    much = max(row.underflow, row.subnormal / 2) >= MOSTLY
    gone = missing >= MOSTLY and accumulated >= MOSTLY
    return drowned or gone or (row.underflow >= FEW and row.error >= SWALLOWED) or (much and row.error >= LOST)


def _narrow(exam: Examination, row: AuditRow) -> Format:
    """Return the format that a gradient went through: an fp32 one may have been computed in a low format."""
    low = format_of(exam.plan.policy.dtype)
    passed = row.underflow > 0 or row.missing > 0
    return low if passed and low.exponent_bits < row.form.exponent_bits else row.form


def _activation_underflow(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("activation"):
        if row.underflow >= FEW and row.worst >= max(0.02, ROUNDINGS * row.form.eps / 2):
            smallest = row.form.smallest_subnormal
            cause = f"{_percent(row.underflow)} of its result is below {smallest:.3g} and becomes zero"
            yield exam.finding("underflow", row, row.underflow, cause, *exam.wider(row))


def _swallowed(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("update"):
        if row.reason or math.isnan(row.swallowed):  # stochastic rounding is right on average
            continue
        form = row.form
        if (row.swallowed >= MOSTLY and row.swallowed_mass >= SWALLOWED) or row.error >= MOSTLY:
            cause = (
                f"{_percent(row.swallowed)} of the updates, {_percent(row.swallowed_mass)} of their size, is smaller "
                f"than half an ulp of the weight in {form.name}; what is stored differs from what should be by "
                f"{_percent(min(row.error, 9.99))} of the update"
            )
            policy = None
            if form.bits >= FP32.bits:
                remedy = "the learning rate is too small for these weights: raise it"
            elif exam.policy.params == "low":
                remedy = "keep precise weights behind low ones: master='auto'"
                policy = exam.policy.replace(master="auto")
            else:
                remedy = "these parameters stay low: leave out the rule that keeps them, or load the model in fp32"
            severity = max(row.swallowed_mass, min(row.error, 1.0))
            yield exam.finding("swallowed_update", row, severity, cause, remedy, policy)


def _low_state(exam: Examination) -> Iterator[Finding]:
    trained = {name for p in exam.plan.parameters for name in (p.name, *p.aliases)}
    for row in exam.of("state"):
        form = row.form
        if row.reason == "stochastic rounding" or form.bits >= FP32.bits:
            continue
        average = row.op == "buffer"
        slow = 0.0 < row.pace < form.eps / 2
        stuck = row.swallowed >= MOSTLY and row.swallowed_mass >= SWALLOWED
        if row.missing >= FEW:
            why = f"{_percent(row.missing)} of it is zero in {form.name} and would not be in fp32"
        elif stuck:
            why = f"{_percent(row.swallowed)} of its changes are smaller than half an ulp in {form.name}"
        elif slow:
            why = (
                f"it moves by {row.pace:.2g} of itself a step, and half an ulp of {form.name} is "
                f"{form.eps / 4:.2g} to {form.eps / 2:.2g} of a number"
            )
        elif row.error >= MOSTLY:
            why = f"its changes are wrong by {_percent(row.error)}"
        else:
            continue
        policy = None
        if average and row.parameter in trained:  # a teacher's weights
            remedy, policy = exam.wider(row)
        elif average:
            remedy = "keep this buffer in fp32: halfstep never lowers buffers, the model does"
        elif exam.policy.params == "low" and exam.policy.master == "none":
            remedy = "step fp32 values, whose state is fp32: master='auto'"
            policy = exam.policy.replace(master="auto")
        else:
            remedy = "keep it in fp32, or let the policy keep it in bf16 with stochastic rounding: state='low'"
        what = "the running average" if average else f"the state {row.op.rpartition('.')[2]} of"
        share = max(row.missing, row.swallowed_mass if stuck else 0.0, 0.5 if slow else 0.0, 0.3)
        kind = "swallowed_update" if average and stuck else "low_state"
        yield exam.finding(kind, row, share, f"{what} {row.parameter} is {form.name}: {why}", remedy, policy)


def _large_error(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("activation"):
        low = format_of(exam.plan.policy.dtype)  # an fp32 result may have come from low inputs
        unit = min(row.form, low, key=lambda each: each.mantissa_bits).eps / 2
        if not row.error >= max(ROUNDINGS * unit, 1e-3) or row.underflow >= FEW or row.overflow > 0:
            continue
        cause = (
            f"on the same inputs its result is {_percent(min(row.error, 9.99))} off what fp32 gives, the error of "
            f"{row.error / unit:.0f} roundings"
        )
        yield exam.finding("rounding", row, row.error, cause, *exam.wider(row))


def _addends(exam: Examination) -> Iterator[Finding]:
    once = min((row.calls for row in exam.of("activation")), default=1)
    for row in exam.of("activation"):
        much = SWALLOWED if row.calls >= RUNNING * once else HALF
        if min(row.swallowed, row.swallowed_mass) >= much:
            cause = (
                f"{_percent(row.swallowed)} of the elements of one of its terms, {_percent(row.swallowed_mass)} of "
                f"their size, are below half an ulp of the other one in {row.format}: the sum does not contain them"
            )
            remedy, policy = exam.wider(row)
            if exam.plan.policy.residual == "low" and row.rule != "low":
                remedy, policy = "keep the stream that is added to in fp32", exam.policy.replace(residual="fp32")
            yield exam.finding("rounding", row, row.swallowed_mass, cause, remedy, policy)


def _summed(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("weight gradient"):
        if row.summed >= SUMMED:
            cause = (
                f"the sum of its micro-batches' gradients in {row.format} is {_percent(min(row.summed, 9.99))} off "
                "their sum in fp32: late ones are small beside the sum"
            )
            remedy, policy = "sum gradients in fp32: grads='fp32'", exam.policy
            if policy.params == "low" and policy.master == "none":  # whose optimizer reads low gradients alone
                remedy, policy = f"{remedy}, master='stochastic'", policy.replace(master="stochastic")
            yield exam.finding("rounding", row, row.summed, cause, remedy, policy.replace(grads="fp32"))


def _integers(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("activation"):
        if row.otherwise >= OTHERWISE:
            cause = (
                f"{_percent(row.otherwise)} of the integers that are made of its result, and by which other numbers "
                "are chosen, are not those of fp32"
            )
            policy: Policy | None
            if row.module:
                remedy, policy = f"keep module {row.module!r} in fp32", exam.policy.with_modules({row.module: "fp32"})
            else:  # all of the line that the operator stands in
                ops = dict.fromkeys(r.op for r in exam.of("activation") if r.line == row.line and "::" not in r.op)
                remedy = f"give {', '.join(ops)} fp32, or this line a region in fp32"
                policy = _with_fp32(exam.policy, *ops)
            yield exam.finding("rounding", row, row.otherwise, cause, remedy, policy)


def _drift(exam: Examination) -> Iterator[Finding]:
    """Name where errors of the whole model begin: by one operator (cancellation), or by and by."""
    found = False
    for row in () if exam.overflows else exam.of("activation"):
        if row.numel <= 1 or not row.accumulated >= DRIFT:
            continue
        off = _percent(min(row.accumulated, 9.99))
        sudden = row.given < min(DRIFT, row.accumulated / AMPLIFIED) and row.error < row.accumulated / 2
        if sudden and row.decides:
            return  # an index or a mask came out otherwise than in fp32: what follows is another computation
        if sudden:
            cause = (
                f"its inputs are {_percent(row.given)} off the fp32 run and its result is {off} off: the digits that "
                "are left after it were lost before it"
            )
            remedy = "compute what it is given in fp32"
            policy = exam.policy.with_modules({row.module: "fp32"}) if row.module else None
        elif not found and row.error < row.accumulated / 2:
            cause = f"its result is {off} off the fp32 run, by its inputs more than by itself"
            remedy = "look at the rows before it, sorted by error; residual='fp32' keeps the stream precise"
            policy = exam.policy.replace(residual="fp32") if exam.policy.residual == "low" else None
        else:
            continue
        found = True
        yield exam.finding("rounding", row, row.accumulated, cause, remedy, policy)


def _saturation(exam: Examination) -> Iterator[Finding]:
    for row in exam.of("activation"):
        if row.saturated >= MOSTLY:
            what = "rows of this softmax are one-hot" if row.op == "softmax" else f"elements of this {row.op} are 1"
            cause = f"{_percent(row.saturated)} of the {what} in {row.format} and not in fp32: no gradient passes them"
            yield exam.finding("saturation", row, row.saturated, cause, *exam.wider(row))


def _risk(exam: Examination) -> Iterator[Finding]:
    dynamic = isinstance(exam.plan.policy.scale, ScaleRule)
    for row in exam.of("activation", "weight", "activation gradient", "weight gradient"):
        form = row.form
        if row.headroom >= exam.headroom or row.overflow > 0 or (row.role.endswith("gradient") and dynamic):
            continue
        if not form.has_inf or not form.is_narrow or row.amax == form.max:
            continue  # exactly the largest number is a mask
        ends = f"the end of {form.name} at {form.max:.6g}"
        cause = f"its largest number is {row.amax:.6g}, {row.headroom:.2g} bits below {ends}"
        policy: Policy | None
        if row.role.endswith("gradient"):
            remedy, policy = "let the loss scale adapt: scale='auto'", exam.policy.replace(scale="halfstep")
        elif row.role == "weight":
            remedy, policy = "hold it in bf16 or fp32", exam.policy.replace(dtype="bf16")
        else:
            remedy, policy = exam.wider(row)
        yield exam.finding("overflow_risk", row, 1 - row.headroom / max(exam.headroom, 1e-9), cause, remedy, policy)


RULES: tuple[Callable[[Examination], Iterator[Finding]], ...] = (
    _overflow, _gradient_underflow, _activation_underflow, _swallowed, _low_state, _large_error, _addends, _summed,
    _integers, _drift, _saturation, _risk,
)  # fmt: skip
