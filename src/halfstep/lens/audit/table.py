"""The audit as a table: rows to sort and filter, what-ifs from their sketches, findings; as text and as a page."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from halfstep import report as doc
from halfstep.arguments import NONE, POSITIVE, a, check, whole
from halfstep.errors import AuditError, did_you_mean, few
from halfstep.formats import BF16, E4M3, E5M2, FP16, Format, format_of
from halfstep.lens.audit.criteria import findings_of
from halfstep.lens.audit.rows import COLUMNS, ROLES, AuditRow, cells, percent, three_digits
from halfstep.lens.finding import KINDS, ROOM, Finding
from halfstep.policy.plan import Plan
from halfstep.policy.policy import Policy
from halfstep.report import strict_json, write_page

PATTERN = a(str, words="a pattern such as 'blocks.*'")
SHOWN = 16  # rows of a printed audit: what loses most
PLACES = 4  # places named of each group of findings


def _columns(table: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; columns of numbers flush right, without an empty one of what is not finite."""
    columns = [column for column in zip(*table, strict=True) if column[0] != "inf, nan" or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        words = [word.ljust(width) for word, width in zip(line[:4], widths, strict=False)]
        numbers = [word.rjust(width) for word, width in zip(line[4:], widths[4:], strict=True)]
        yield "  ".join((*words, *numbers)).rstrip()


SORTABLE = tuple(f.name for f in dataclasses.fields(AuditRow) if f.type in {"int", "float"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What a format would do to one row; shares, of numbers that are not zero, as (lower, upper) bounds."""

    module: str
    op: str
    role: str
    parameter: str
    underflow: tuple[float, float]  # share that would become zero
    subnormal: tuple[float, float]  # share that would have less than full precision
    overflow: tuple[float, float]  # share beyond the format's largest number
    headroom: float  # bits below it; negative beyond
    best_scale: float  # the power of two that suits these numbers best in this format

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What an audit found: a table with a row for each module, operator and role.

    Attributes:
        rows: in the order in which operators ran first.
        policy: what was audited.
        plan: what the policy means for this model.
        steps: how many steps were measured.
        skipped: how many more were skipped because gradients overflowed; they are not in the rows.
        bad: how many of the steps were not finite, for another reason than a falling loss scale.
        bad_in_fp32: how many of these are not finite in fp32 either.
        scale: the loss scale of the last step.
        notes: what the reader should know besides.

    Examples:
        >>> found = hs.audit(model, batches, loss_fn, "mixed", steps=1)
        >>> found.steps, len(found.rows) > 0
        (1, True)
    """

    rows: tuple[AuditRow, ...]
    policy: Policy
    plan: Plan
    steps: int
    skipped: int = 0
    bad: int = 0
    bad_in_fp32: int = 0
    scale: float = 1.0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[AuditRow]:
        return iter(self.rows)

    def filter(
        self,
        where: Callable[[AuditRow], bool] | None = None,
        *,
        module: str = "*",
        op: str = "*",
        role: str = "*",
        parameter: str = "*",
    ) -> Audit:
        """Return the audit with the rows that match all patterns (fnmatch) and for which `where` is true.

        Raises:
            AuditError: a role that does not exist, or a pattern that is no text.
        """
        wanted = {"module": module, "op": op, "role": role, "parameter": parameter}
        check("Audit.filter", AuditError, **{name: (glob, PATTERN) for name, glob in wanted.items()})
        if role not in ROLES and not any(c in role for c in "*?["):
            raise AuditError(f"no role {role!r}{did_you_mean(role, ROLES)}; there are {', '.join(ROLES)}")
        rows = [r for r in self.rows if all(fnmatchcase(getattr(r, name), glob) for name, glob in wanted.items())]
        return dataclasses.replace(self, rows=tuple(rows if where is None else filter(where, rows)))

    def sorted(self, by: str = "error", *, descending: bool = True) -> Audit:
        """Return the audit with its rows sorted by a number, unknown ones (nan) last.

        Args:
            by: "error", "accumulated", "underflow", "headroom", "time", "bytes", "swallowed": any number of a row.
            descending: the largest first.

        Raises:
            AuditError: rows have no such number.
        """
        if by not in SORTABLE:
            hint = did_you_mean(by, SORTABLE)
            raise AuditError(f"rows cannot be sorted by {by!r}{hint}; numbers of a row are {', '.join(SORTABLE)}")
        sign = -1 if descending else 1
        rows = sorted(self.rows, key=lambda row: (math.isnan(getattr(row, by)), sign * getattr(row, by)))
        return dataclasses.replace(self, rows=tuple(rows))

    def worst(self, count: int = 20) -> Audit:
        """Return the audit with the `count` rows that lose most, the worst first.

        Raises:
            AuditError: `count` is no whole number from 0.
        """
        check("Audit.worst", AuditError, count=(count, whole(of="rows")))
        return dataclasses.replace(self, rows=tuple(sorted(self.rows, key=badness, reverse=True)[:count]))

    def findings(self, *, headroom: float = ROOM) -> tuple[Finding, ...]:
        """Return what is wrong, the worst first; () for a healthy run.

        Args:
            headroom: bits below the largest number of a format that are a risk.
        """
        return findings_of(self.rows, self.policy, self.plan, headroom=headroom)

    def what_if(self, format: str | Format, scale: float | None = None) -> tuple[WhatIf, ...]:
        """Return what `format` would do to every row, from the sketches: nothing runs again.

        Args:
            format: a format or its name, such as "fp16", "fp8_e4m3" or "e3m4".
            scale: loss scale that gradients would carry; activations and weights carry none. Default: 1.

        Raises:
            FormatError: no such format.
            AuditError: a scale that is not positive and finite.
        """
        check("Audit.what_if", AuditError, scale=(scale, POSITIVE | NONE))
        form, factor = format_of(format), 1.0 if scale is None else scale
        # The gradient of the loss with respect to itself is the loss scale.
        rows = [r for r in self.rows if r.role in ROLES[:4] and not (r.role == "activation gradient" and r.numel == 1)]
        return tuple(_if(row, form, factor) for row in rows)

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dicts of plain values: ``pandas.DataFrame(audit.records())``."""
        return [row.record() for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with the sketches: what `to_json` writes."""
        plain = ("steps", "skipped", "bad", "bad_in_fp32", "scale")
        return {
            "policy": self.policy.to_toml(),
            "device": self.plan.device,
            "model": self.plan.model,
            **{name: getattr(self, name) for name in plain},
            "notes": list(self.notes),
            "findings": [finding.record() for finding in self.findings()],
            "rows": [{**row.record(), "sketch": row.sketch.to_dict()} for row in self.rows],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return everything as JSON, nan and inf as null; also write it to `path`, if given."""
        return strict_json(self.to_dict(), path)

    @property
    def headline(self) -> str:
        """What was audited, in one line."""
        name = f"{self.policy.name} {self.plan.policy.dtype}".strip()
        scale = f", loss scale {self.scale:g}" if self.scale != 1.0 else ""
        skipped = f", {self.skipped} skipped on the way" if self.skipped else ""
        made = f"{doc.counted(self.steps, 'step')}{scale}{skipped}, {len(self)} rows"
        return f"audit of {self.plan.model} under {name} on {self.plan.device}: {made}"

    @property
    def quiet(self) -> str:
        """One line for an audit without findings; steps may still not be finite."""
        if self.bad:
            too = ", in fp32 too" if self.bad_in_fp32 == self.bad else ""
            return f"no findings of precision, but {self.bad} of {self.steps} steps were not finite{too}"
        return "no findings: nothing underflows, overflows, is swallowed or far off"

    def groups(self) -> list[tuple[Finding, list[str]]]:
        """Return the findings with one kind and one remedy together: the gravest of them, and all their places."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings():
            groups.setdefault((finding.kind, finding.diff or finding.remedy), []).append(finding)
        return [(members[0], [finding.place for finding in members]) for members in groups.values()]

    def table(self) -> list[tuple[str, ...]]:
        """Return the rows as text for people, the names of the columns first; "" is none or unknown."""
        return [COLUMNS, *(tuple(map(cells(row).__getitem__, COLUMNS)) for row in self.rows)]

    def save_html(self, path: str | Path) -> None:
        """Write the audit as one HTML file with pictures that needs nothing else."""
        write_page(audit_page(self), path)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield headline, notes and findings by line, each with its style: "title", "note", "good", "bad" or ""."""
        yield self.headline, "title"
        for note in self.notes:
            yield f"note: {note}", "note"
        groups = self.groups()
        if not groups:
            yield self.quiet, "bad" if self.bad else "good"
        for finding, places in groups:
            yield "", ""
            mild = finding.kind in {"overflow_risk", "rounding", "saturation"}
            yield f"{finding.kind}: {few(places, PLACES)}", "note" if mild else "bad"
            texts = [f"  at {finding.line}"] if finding.line else []
            texts += [f"  {finding.cause}", f"  remedy: {finding.remedy}"]
            yield from ((text, "") for text in (*texts, *(f"    {line}" for line in finding.diff.splitlines())))

    def __str__(self) -> str:
        """Return the findings and the rows that lose most, as text."""
        return "\n".join([*(line for line, _ in self.lines()), *_columns(self.worst(SHOWN).table())])


def badness(row: AuditRow) -> float:
    """Return how much a row loses, or is about to lose, from 0 on: what tables and pictures are sorted by."""
    error = 0.0 if math.isnan(row.error) else min(row.error, 1.0)
    swallowed = 0.0 if math.isnan(row.swallowed_mass) or row.reason else row.swallowed_mass
    risk = max(0.0, 4.0 - row.headroom) / 8.0
    missing = 0.0 if row.cancels else row.missing
    summed = 0.0 if math.isnan(row.summed) else min(row.summed, 1.0)
    return max(row.overflow, row.underflow, missing, row.subnormal / 2, error, summed, swallowed, risk)


def _if(row: AuditRow, form: Format, scale: float) -> WhatIf:
    sketch, carried = (row.sketch, row.scale) if row.wide is None else (row.wide, 1.0)
    factor = (scale if row.role.endswith("gradient") else 1.0) / carried
    return WhatIf(
        **{name: getattr(row, name) for name in ("module", "op", "role", "parameter")},
        underflow=sketch.underflow(form, factor),
        subnormal=sketch.subnormal(form, factor),
        overflow=sketch.overflow(form, factor),
        headroom=sketch.headroom(form, factor),
        best_scale=sketch.best_scale(form) * carried,
    )


STRIPS = 24  # rows of one heat map: what fits on a page beside another one
WORST = 30  # rows of the table that is open from the start
FEW = 0.01  # share of a row's numbers whose loss counts
PAGE_PLACES = 6  # places named of each group of findings on a page

QUESTIONED = (FP16, BF16, E5M2, E4M3)
GRAVE = frozenset({"overflow", "underflow", "swallowed_update", "low_state"})


def audit_page(audit: Audit) -> doc.Document:
    """Return the report of an audit."""
    kinds = doc.table("Kinds of findings", ("kind", "meaning"), KINDS.items())
    policy = doc.hidden("The policy", audit.policy.to_toml())
    plan = doc.hidden("What it means for this model", str(audit.plan))
    method = doc.Section("How to read it", (doc.method("audit"), doc.Details(kinds.caption, (kinds,)), policy, plan))
    return doc.page(
        f"halfstep audit: {audit.plan.model}, {f'{audit.policy.name} {audit.plan.policy.dtype}'.strip()}",
        doc.sentence(audit.headline),
        (_findings(audit), _pictures(audit), _updates(audit), _rows(audit), _what_if(audit), method),
    )


def _findings(audit: Audit) -> doc.Section:
    facts = []
    for finding, places in audit.groups():
        words = [f"In {few(places, PAGE_PLACES)}."]
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
    figures = []
    for role, heading, caption in kinds:
        those = audit.filter(role=role)
        names, shown = _names(those), those.worst(STRIPS)
        some = f"the {len(shown)} of {len(those)} that lose most" if len(shown) < len(those) else f"all {len(those)}"
        chart = doc.HeatMap("magnitude", tuple(_strip(row, names[id(row)]) for row in shown))
        alt = f"Heat map of {heading.lower()} over powers of two, {some}."
        figures += [doc.Figure(heading, f"{caption}; {some}.", alt, chart)] if those.rows else []
    how = doc.Paragraph(
        "Each strip is one operator of one module: how many of its numbers have which power of two, zeros apart "
        "at the left. Behind it the range of its format: paler where numbers are subnormal, with marks at its smallest "
        "number, its smallest of full precision and its largest (those of bf16 and fp32 lie far outside). The other "
        "colour is what lies below full precision or outside. What loses most comes first."
    )
    return doc.Section("Where the numbers lie", (how, doc.Gallery(tuple(figures))))


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


def _rows(audit: Audit) -> doc.Section:
    rest = audit.filter(lambda row: row.role not in {"update", "state"})
    names = _names(rest)
    texts = {id(row): (names[id(row)], *map(cells(row).__getitem__, HEADERS[1:])) for row in rest}
    worst = doc.table("What loses most", HEADERS, (texts[id(row)] for row in rest.worst(WORST)))
    every = doc.table("In the order in which operators ran", HEADERS, texts.values())
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
