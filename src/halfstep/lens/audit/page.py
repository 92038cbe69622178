"""The page of an audit: findings in words, where the numbers lie as pictures, and all rows as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from halfstep import report as doc
from halfstep.errors import few
from halfstep.formats import BF16, E4M3, E5M2, FP16, Format
from halfstep.lens.audit.rows import COLUMNS, AuditRow, cells, percent, three_digits
from halfstep.lens.finding import KINDS

if TYPE_CHECKING:
    from halfstep.lens.audit.table import Audit

STRIPS = 24
"""Rows of one heat map: what fits on a page beside another one."""

WORST = 30
"""Rows of the table that is open from the start."""

FEW = 0.01
"""Share of a row's numbers whose loss counts."""

PLACES = 6
"""Places named of each group of findings."""

QUESTIONED = (FP16, BF16, E5M2, E4M3)
GRAVE = frozenset({"overflow", "underflow", "swallowed_update", "low_state"})

METHOD = (
    "Each batch ran twice on a copy of the model: in fp32, and under the policy, with the same random numbers.",
    "Error: every operator that touches a low format was run again by itself in the shadow format on the same inputs, "
    "forward and backward. The norm of the difference over the norm of what should be there: what this operator alone "
    "loses. For gradients: of the gradients that its backward pass makes.",
    "Accumulated: the same against the fp32 run of the whole model.",
    "Underflow: elements that are zero and are not in the shadow. Subnormal: elements with less than full precision.",
    "Headroom: bits between the largest number and the end of the format. Gradients carry the loss scale.",
    "Swallowed: changes smaller than half an ulp of what they change; a float64 copy of the optimizer computes the "
    "intended ones.",
    "Time: share of all operators' time, measured with instruments on: an indication.",
)


def audit_page(audit: Audit) -> doc.Document:
    """Return the report of an audit."""
    kinds = doc.table("Kinds of findings", ("kind", "meaning"), KINDS.items())
    policy = doc.hidden("The policy", audit.policy.to_toml())
    plan = doc.hidden("What it means for this model", str(audit.plan))
    method = doc.Section("How to read it", (doc.Bullets(METHOD), doc.Details(kinds.caption, (kinds,)), policy, plan))
    return doc.page(
        f"halfstep audit: {audit.plan.model}, {f'{audit.policy.name} {audit.plan.policy.dtype}'.strip()}",
        doc.sentence(audit.headline),
        (_findings(audit), _pictures(audit), _updates(audit), _rows(audit), _what_if(audit), method),
    )


def _findings(audit: Audit) -> doc.Section:
    facts = []
    for finding, places in audit.groups():
        words = [f"In {few(places, PLACES)}."]
        if finding.line:
            words.append(f"At {finding.line}")
        diff = f" Policy: {'; '.join(finding.diff.splitlines())}" if finding.diff else ""
        words.append(f"Remedy: {finding.remedy}.{diff}")
        tone = "bad" if finding.kind in GRAVE else "open"
        facts.append(doc.Fact(finding.kind.replace("_", " "), doc.sentence(finding.cause), tuple(words), tone))
    if not facts and audit.bad:
        facts = [doc.Fact("Not finite", doc.sentence(audit.quiet), tone="bad")]
    elif not facts:
        facts = [doc.Fact("Healthy", "Nothing underflows, overflows, is swallowed or far off.", tone="good")]
    notes = [doc.Bullets(audit.notes)] if audit.notes else []
    return doc.Section("Findings", (doc.Facts(tuple(facts)), *notes))


def _pictures(audit: Audit) -> doc.Section:
    kinds = (
        ("activation", "Activations", "What operators give"),
        ("activation gradient", "Gradients", "What comes back to them, with the loss scale"),
        ("weight gradient", "Gradients of weights", "With the loss scale"),
        ("weight", "Weights", "As they are stored"),
    )
    figures = tuple(_figure(audit.filter(role=role), *words) for role, *words in kinds if audit.filter(role=role).rows)
    how = doc.Paragraph(
        "Each strip is one operator of one module: how many of its numbers have which power of two, zeros apart "
        "at the left. Behind it the range of its format: paler where numbers are subnormal, with marks at its smallest "
        "number, its smallest of full precision and its largest (those of bf16 and fp32 lie far outside). The other "
        "colour is what lies below full precision or outside. What loses most comes first."
    )
    return doc.Section("Where the numbers lie", (how, doc.Gallery(figures)))


def _figure(those: Audit, heading: str, caption: str) -> doc.Figure:
    names, shown = _names(those), those.worst(STRIPS)
    some = f"the {len(shown)} of {len(those)} that lose most" if len(shown) < len(those) else f"all {len(those)}"
    chart = doc.HeatMap("magnitude", tuple(_strip(row, names[id(row)]) for row in shown))
    alt = f"Heat map of {heading.lower()} over powers of two, {some}."
    return doc.Figure(heading, f"{caption}; {some}.", alt, chart)


def _names(rows: Iterable[AuditRow]) -> dict[int, str]:
    """Return id -> name of rows; with the number of the line where one operator is called from several in a module."""
    table = list(rows)
    plain = {id(row): row.parameter or f"{row.module} {row.op}".strip() for row in table}
    counts = Counter((plain[id(row)], row.role) for row in table)
    named = {}
    for row in table:
        name = plain[id(row)]
        line = row.line.partition(" ")[0].rpartition(":")[2]
        named[id(row)] = f"{name}, line {line}" if counts[name, row.role] > 1 and line else name
    return named


def _strip(row: AuditRow, name: str) -> doc.Strip:
    sketch, form = row.sketch, row.form
    total = max(sketch.count, 1)
    cells = tuple((e, count / total) for e, count in sorted(sketch.exponents.items()))
    return doc.Strip(name, f"{form.name}{_largest_loss(row)}", cells, sketch.zeros / total, doc.limits_of(form))


def _largest_loss(row: AuditRow) -> str:
    """Return the worst number of a row, for beside its strip."""
    if row.nonfinite and not row.sketch.nonzero and not row.sketch.zeros:
        return ", all nan" if row.sketch.nans and not row.sketch.infs else ", all inf or nan"
    if row.overflow > 0:
        return f", {percent(row.overflow)} beyond"
    lost = max(row.underflow, 0.0 if row.cancels else row.missing)
    if lost >= 0.001:
        return f", {percent(lost)} lost"
    if row.subnormal >= 0.001:
        return f", {percent(row.subnormal)} subnormal"
    return f", error {percent(row.error)}" if percent(row.error) else ""


HEADERS = ("operator", "role", "format", "underflow", "subnormal", "error", "accumulated", "headroom", "amax", "zero",
           "inf, nan", "time", "casts", "kB", "rule")  # fmt: skip


def _cells(row: AuditRow, where: str) -> tuple[str, ...]:
    """Return a row, named `where`, for a table that is as wide as a page: what matters most stands first."""
    by_name = dict(zip(COLUMNS, cells(row), strict=True))
    middle = (by_name[name] for name in HEADERS[1:-3])
    return (where, *middle, str(row.casts or ""), f"{row.bytes / 1e3:.3g}", row.rule)


def _rows(audit: Audit) -> doc.Section:
    rest = audit.filter(lambda row: row.role not in {"update", "state"})
    names = _names(rest)
    worst = doc.table("What loses most", HEADERS, (_cells(row, names[id(row)]) for row in rest.worst(WORST)))
    every = doc.table("In the order in which operators ran", HEADERS, (_cells(row, names[id(row)]) for row in rest))
    reasons = dict.fromkeys((row.op, row.rule, row.reason) for row in rest if row.reason and row.role == "activation")
    why = doc.table("Why each operator has its format", ("operator", "rule", "reason"), reasons)
    return doc.Section(
        "Operators", (worst, doc.Details(f"All {len(rest)} rows", (every,)), doc.Details(why.caption, (why,)))
    )


def _updates(audit: Audit) -> doc.Section:
    rows = audit.filter(lambda row: row.role == "update" or (row.role == "state" and not math.isnan(row.swallowed)))
    headers = ("parameter", "what", "format", "largest change", "swallowed", "of their size", "error")
    texts = (
        (
            row.parameter,
            row.op.partition(".")[2] or row.role,
            f"{row.format}, stochastic" if row.reason else row.format,
            three_digits(row.amax),
            percent(row.swallowed) or "0 %",
            percent(row.swallowed_mass) or "0 %",
            percent(row.error),
        )
        for row in rows.sorted("swallowed_mass").rows[:WORST]
    )
    table = doc.table("Updates and low states: what their format swallows", headers, texts)
    return doc.Section("Updates", (table,) if rows.rows else ())


def _what_if(audit: Audit) -> doc.Section:
    gradients, activations, weights = (audit.filter(role=role) for role in ("* gradient", "activation", "weight"))
    rows: list[tuple[str, ...]] = []
    for form in QUESTIONED:
        questions = [("activations", activations, 1.0), ("weights", weights, 1.0)]
        room = min((answer.headroom for answer in gradients.what_if(form)), default=0.0) if form.is_narrow else 0.0
        scales = sorted({1.0, 2.0 ** math.floor(room) if math.isfinite(room) else 1.0})
        questions += [(f"gradients, scale {scale:g}", gradients, scale) for scale in scales]
        rows += [_answer(form, what, those, scale) for what, those, scale in questions if those.rows]
    headers = ("format", "numbers", "rows hit", "would underflow", "would overflow", "worst row")
    table = doc.table("What other formats would do to these numbers", headers, rows)
    text = (
        "From the sketches, without another run. Hit: a hundredth of its numbers would become zero, or any would be "
        "too large. The scale is the largest power of two that lets no gradient overflow."
    )
    return doc.Section("What if", (doc.Paragraph(text), table) if rows else ())


def _answer(form: Format, what: str, those: Audit, scale: float) -> tuple[str, ...]:
    answers = those.what_if(form, scale)
    hit = sum(answer.underflow[1] >= FEW or answer.overflow[1] > 0 for answer in answers)
    worst = max(answers, key=lambda answer: (answer.overflow[1], answer.underflow[1]))
    name = worst.parameter or f"{worst.module} {worst.op}".strip()
    shares = percent(worst.underflow[1]), percent(worst.overflow[1])
    return form.name, what, f"{hit} of {len(answers)}", *shares, name if any(shares) else ""
