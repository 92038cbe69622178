"""The page of a verdict: what happened, where and what to do; magnitudes up to the place and losses before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from halfstep import report as doc
from halfstep.errors import FormatError
from halfstep.formats import FP32, Format, format_of

if TYPE_CHECKING:
    from halfstep.lens.verdict import Magnitude, Verdict


def verdict_page(verdict: Verdict) -> doc.Document:
    """Return the page of a verdict."""
    rank = f" on rank {verdict.rank}" if verdict.rank or verdict.ranks else ""
    return doc.page(
        f"halfstep black box: step {verdict.step}{rank}",
        doc.sentence(verdict.what),
        (_summary(verdict), _magnitudes(verdict), _history(verdict), _cures(verdict), _place(verdict)),
    )


def _summary(verdict: Verdict) -> doc.Section:
    sure = "shown" if verdict.sure == "shown" else "most likely"
    cause = f"{verdict.cause} ({sure})." if verdict.cause else "not known."
    why = verdict.why or "The replay shows no cause"
    line = (verdict.line,) if verdict.line else ()
    facts = (
        doc.Fact("Cause", cause, (doc.sentence(why),), "bad"),
        doc.Fact("Where", f"{verdict.where or 'No operator is to blame'}.", line, "open"),
        doc.Fact("Do this", doc.sentence(verdict.remedy or "see the notes"), tone="good"),
    )
    return doc.Section("In short", (doc.Facts(facts),))


def _magnitudes(verdict: Verdict) -> doc.Section:
    if not verdict.story:
        return doc.Section("Magnitudes", ())
    picture = doc.Figure(
        "Largest magnitudes up to the place",
        "The operators that led to the place, in their order. Behind each lies the range of its format, with "
        "marks at its smallest number, its smallest of full precision and its largest.",
        "Largest magnitude of each operator that led to the place, over powers of two.",
        doc.HeatMap("magnitude", tuple(map(_strip, verdict.story))),
    )
    headers = ("operator", "module", "phase", "format", "largest", "limit", "line")
    rows = (
        (r.op, r.module or "the model", r.phase, r.dtype, _size(r), f"{r.limit:.6g}", r.line.partition(" ")[0])
        for r in verdict.story
    )
    table = doc.table("Operators up to the place", headers, rows)
    return doc.Section("Magnitudes", (doc.Gallery((picture,)), table))


def _strip(row: Magnitude) -> doc.Strip:
    form = _format(row.dtype)
    size = row.largest if row.finite else 2.0 * row.limit  # what is not finite is drawn beyond the end
    return doc.Strip(
        f"{row.op} in {row.module or 'the model'}" + (", backward" if row.phase == "backward" else ""),
        f"{form.name}, {_size(row)}",
        ((math.frexp(size)[1] - 1, 1.0),) if 0.0 < size < math.inf else (),
        1.0 if row.finite and not row.largest else 0.0,
        doc.limits_of(form),
    )


def _format(name: str) -> Format:
    """Return the format of a dtype by its name; fp32 for those that are no format of halfstep."""
    try:
        return format_of(getattr(torch, name))
    except FormatError:
        return FP32


def _size(row: Magnitude) -> str:
    return f"{row.largest:.4g}" if row.finite else "not finite"


def _history(verdict: Verdict) -> doc.Section:
    steps = tuple(float(step) for step, _, _ in verdict.history)
    figures = []
    for name, column in (("Loss", 1), ("Norm of all gradients", 2)):
        values = tuple(math.nan if row[column] is None else float(row[column] or 0.0) for row in verdict.history)
        if sum(map(math.isfinite, values)) > 1:
            caption = f"{name} of the {len(steps)} steps before this one; a gap is a value that is not finite."
            chart = doc.LineChart("step", (doc.Series(name, steps, values),), log=True)
            figures.append(doc.Figure(name, caption, f"{name} over steps.", chart))
    return doc.Section("The steps before", (doc.Gallery(tuple(figures)),) if figures else ())


def _cures(verdict: Verdict) -> doc.Section:
    blocks: list[doc.Block] = []
    for cure in verdict.cures:
        first, *rest = cure.text.splitlines()
        tried = f" {'Verified' if cure.verified else 'Tried'}: {cure.outcome}." if cure.outcome else ""
        blocks.append(doc.Paragraph(doc.sentence(first) + tried))
        if rest:
            blocks.append(doc.Code("\n".join(rest)))
    return doc.Section("What to change", blocks)


def _place(verdict: Verdict) -> doc.Section:
    inputs = ", ".join(f"{d} {list(s)}" for d, s in zip(verdict.dtypes, verdict.shapes, strict=True))
    facts = {
        "operator": verdict.op, "module": verdict.module, "phase": verdict.phase, "line": verdict.line,
        "inputs": inputs, "largest input": f"{verdict.value:.6g}" if verdict.shapes else "",
        "value of": verdict.parameter, "read": verdict.page,
    }  # fmt: skip
    table = doc.table("The place", ("", ""), ((name, text) for name, text in facts.items() if text))
    return doc.Section("Details", (table, *([doc.Bullets(verdict.notes)] if verdict.notes else [])))
