"""The page of an audit: findings in words, where the numbers lie as pictures, and all rows as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from halfstep.formats import BF16, E4M3, E5M2, FP16, Format, format_of
from halfstep.lens.audit.rows import AuditRow
from halfstep.lens.audit.table import COLUMNS, Audit, cells, percent, three_digits
from halfstep.lens.finding import KINDS
from halfstep.report import (
    Block,
    Bullets,
    Cell,
    Code,
    Details,
    Document,
    Fact,
    Facts,
    Figure,
    Gallery,
    HeatMap,
    Paragraph,
    Section,
    Strip,
    Table,
)

__all__ = ["audit_page"]

STRIPS = 24
"""Rows of one heat map: what fits on a page beside another one."""

WORST = 30
"""Rows of the table that is open from the start."""

FEW = 0.01
"""Share of a row's numbers whose loss counts."""

PLACES = 6
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


def audit_page(audit: Audit) -> Document:
    """Return the report of an audit."""
    sections = [_findings(audit), _pictures(audit), _updates(audit), _rows(audit), _what_if(audit), _method(audit)]
    name = f"{audit.policy.name} {audit.plan.policy.dtype}".strip()
    line = audit.headline
    return Document(
        title=f"halfstep audit: {audit.plan.model}, {name}",
        lead=f"{line[0].upper()}{line[1:]}.",
        sections=tuple(section for section in sections if section.blocks),
        footer="Made by halfstep. This file is complete: it loads nothing and runs no script.",
    )


# ------------------------------------------------------------------ findings


def _findings(audit: Audit) -> Section:
    facts = []
    for finding, places in audit.groups():
        more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
        cause = f"{finding.cause[0].upper()}{finding.cause[1:]}."
        words = [f"In {', '.join(places[:PLACES])}{more}.", *([f"At {finding.line}"] if finding.line else [])]
        diff = f" Policy: {'; '.join(finding.diff.splitlines())}" if finding.diff else ""
        remedy = f"Remedy: {finding.remedy}.{diff}"
        tone = "bad" if finding.kind in GRAVE else "open"
        facts.append(Fact(heading=finding.kind.replace("_", " "), text=cause, more=(*words, remedy), tone=tone))
    if not facts:
        text = "Nothing underflows, overflows, is swallowed or far off."
        facts = [Fact(heading="Healthy", text=text, tone="good")]
        if audit.bad:
            text = f"{audit.quiet[0].upper()}{audit.quiet[1:]}."
            facts = [Fact(heading="Not finite", text=text, tone="bad")]
    blocks: list[Block] = [Facts(facts=tuple(facts))]
    if audit.notes:
        blocks.append(Bullets(items=audit.notes))
    return Section(heading="Findings", blocks=tuple(blocks))


# ------------------------------------------------------------------ pictures


def _pictures(audit: Audit) -> Section:
    figures = [
        _figure(audit.filter(role="activation"), "Activations", "what operators give"),
        _figure(audit.filter(role="activation gradient"), "Gradients", "what comes back to them, with the loss scale"),
        _figure(audit.filter(role="weight gradient"), "Gradients of weights", "with the loss scale"),
        _figure(audit.filter(role="weight"), "Weights", "as they are stored"),
    ]
    how = Paragraph(
        text="Each strip is one operator of one module: how many of its numbers have which power of two, zeros apart "
        "at the left. Behind it the range of its format: paler where numbers are subnormal, with marks at its smallest "
        "number, its smallest of full precision and its largest (those of bf16 and fp32 lie far outside). The other "
        "colour is what lies below full precision or outside. What loses most comes first."
    )
    return Section(heading="Where the numbers lie", blocks=(how, Gallery(figures=tuple(f for f in figures if f))))


def _figure(those: Audit, heading: str, caption: str) -> Figure | None:
    if not those.rows:
        return None
    names = _names(those)
    shown = those.worst(STRIPS)
    some = f"the {len(shown)} of {len(those)} that lose most" if len(shown) < len(those) else f"all {len(those)}"
    return Figure(
        heading=heading,
        caption=f"{caption[0].upper()}{caption[1:]}; {some}.",
        alt=f"Heat map of {heading.lower()} over powers of two, {some}.",
        chart=HeatMap(x_label="magnitude", strips=tuple(_strip(row, names[id(row)]) for row in shown)),
    )


def _names(rows: Iterable[AuditRow]) -> dict[int, str]:
    """Return id -> name of rows; with the number of the line where one operator is called from several in a module."""
    table = list(rows)
    plain = {id(row): row.parameter or f"{row.module} {row.op}".strip() for row in table}
    many = {name for name, count in Counter((plain[id(row)], row.role) for row in table).items() if count > 1}
    named = {}
    for row in table:
        name = plain[id(row)]
        line = row.line.partition(" ")[0].rpartition(":")[2]
        named[id(row)] = f"{name}, line {line}" if (name, row.role) in many and line else name
    return named


def _strip(row: AuditRow, name: str) -> Strip:
    sketch, form = row.sketch, format_of(row.format)
    total = max(sketch.count, 1)
    return Strip(
        label=name,
        text=f"{form.name}{_trouble(row)}",
        cells=tuple((e, sketch.exponents[e] / total) for e in sorted(sketch.exponents)),
        zeros=sketch.zeros / total,
        limits=(math.log2(form.smallest_subnormal), math.log2(form.smallest_normal), math.log2(form.max)),
    )


def _trouble(row: AuditRow) -> str:
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


# ------------------------------------------------------------------ tables


def _table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = tuple(tuple(Cell(text=word) for word in row) for row in rows)
    return Table(caption=caption, headers=tuple(headers), rows=made)


HEADERS = ("operator", "role", "format", "underflow", "subnormal", "error", "accumulated", "headroom", "amax", "zero",
           "inf, nan", "time", "casts", "kB", "rule")  # fmt: skip


def _words(row: AuditRow, where: str) -> tuple[str, ...]:
    """Return a row, named `where`, for a table that is as wide as a page: what matters most stands first."""
    by_name = dict(zip(COLUMNS, cells(row), strict=True))
    middle = (by_name[name] for name in HEADERS[1:-3])
    casts = str(row.casts) if row.casts else ""
    return (where, *middle, casts, f"{row.bytes / 1e3:.3g}", row.rule)


def _rows(audit: Audit) -> Section:
    rest = audit.filter(lambda row: row.role not in {"update", "state"})
    names = _names(rest)
    worst = _table("What loses most", HEADERS, (_words(row, names[id(row)]) for row in rest.worst(WORST)))
    every = _table("In the order in which operators ran", HEADERS, (_words(row, names[id(row)]) for row in rest))
    reasons = dict.fromkeys((row.op, row.rule, row.reason) for row in rest if row.reason and row.role == "activation")
    why = _table("Why each operator has its format", ("operator", "rule", "reason"), reasons)
    blocks: tuple[Block, ...] = (
        worst,
        Details(summary=f"All {len(rest)} rows", blocks=(every,)),
        Details(summary="Why each operator has its format", blocks=(why,)),
    )
    return Section(heading="Operators", blocks=blocks)


def _updates(audit: Audit) -> Section:
    rows = audit.filter(lambda row: row.role == "update" or (row.role == "state" and not math.isnan(row.swallowed)))
    if not rows.rows:
        return Section(heading="Updates", blocks=())
    shown = rows.sorted("swallowed_mass").rows[:WORST]
    table = _table(
        "Updates and low states: what their format swallows",
        (
            "parameter",
            "what",
            "format",
            "largest change",
            "swallowed",
            "of their size",
            "error",
        ),
        (
            (
                row.parameter,
                row.op.partition(".")[2] or row.role,
                f"{row.format}, stochastic" if row.reason else row.format,
                three_digits(row.amax),
                percent(row.swallowed) or "0 %",
                percent(row.swallowed_mass) or "0 %",
                percent(row.error),
            )
            for row in shown
        ),
    )
    return Section(heading="Updates", blocks=(table,))


def _what_if(audit: Audit) -> Section:
    gradients = audit.filter(role="* gradient")
    rows: list[tuple[str, ...]] = []
    for form in QUESTIONED:
        best = _best_scale(gradients, form)
        questions = [
            ("activations", audit.filter(role="activation"), 1.0),
            ("weights", audit.filter(role="weight"), 1.0),
        ]
        questions += [(f"gradients, scale {scale:g}", gradients, scale) for scale in sorted({1.0, best})]
        rows += [_answer(form, what, those, scale) for what, those, scale in questions if those.rows]
    table = _table(
        "What other formats would do to these numbers",
        ("format", "numbers", "rows hit", "would underflow", "would overflow", "worst row"),
        rows,
    )
    text = (
        "From the sketches, without another run. Hit: a hundredth of its numbers would become zero, or any would be "
        "too large. The scale is the largest power of two that lets no gradient overflow."
    )
    return Section(heading="What if", blocks=(Paragraph(text=text), table) if rows else ())


def _answer(form: Format, what: str, those: Audit, scale: float) -> tuple[str, ...]:
    """Return one row of the table: how many rows `form` would hit, and the one it would hit hardest."""
    answers = those.what_if(form, scale)
    hit = sum(answer.underflow[1] >= FEW or answer.overflow[1] > 0 for answer in answers)
    worst = max(answers, key=lambda answer: (answer.overflow[1], answer.underflow[1]))
    name = worst.parameter or f"{worst.module} {worst.op}".strip()
    shares = percent(worst.underflow[1]), percent(worst.overflow[1])
    return form.name, what, f"{hit} of {len(answers)}", *shares, name if any(shares) else ""


def _best_scale(gradients: Audit, form: Format) -> float:
    """Return the largest power of two under which no gradient overflows in `form`; 1 where none is needed."""
    if not form.is_narrow:
        return 1.0
    room = min((answer.headroom for answer in gradients.what_if(form)), default=0.0)
    return 2.0 ** math.floor(room) if math.isfinite(room) else 1.0


def _method(audit: Audit) -> Section:
    kinds = _table("Kinds of findings", ("kind", "meaning"), KINDS.items())
    blocks: tuple[Block, ...] = (
        Bullets(items=METHOD),
        Details(summary="Kinds of findings", blocks=(kinds,)),
        Details(summary="The policy", blocks=(Code(text=audit.policy.to_toml().strip()),)),
        Details(summary="What it means for this model", blocks=(Code(text=str(audit.plan)),)),
    )
    return Section(heading="How to read it", blocks=blocks)
