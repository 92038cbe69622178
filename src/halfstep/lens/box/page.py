"""The page of a verdict: what happened, where and what to do; magnitudes up to the place and losses before it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from halfstep.errors import FormatError
from halfstep.formats import FP32, Format, format_of
from halfstep.lens.verdict import CAUSES, Magnitude, Verdict
from halfstep.report import (
    Block,
    Bullets,
    Cell,
    Code,
    Document,
    Fact,
    Facts,
    Figure,
    Gallery,
    HeatMap,
    LineChart,
    Paragraph,
    Section,
    Series,
    Strip,
    Table,
)

__all__ = ["verdict_page"]


def verdict_page(verdict: Verdict) -> Document:
    """Return the page of a verdict."""
    sections = (_summary(verdict), _story(verdict), _history(verdict), _cures(verdict), _place(verdict))
    rank = f" on rank {verdict.rank}" if verdict.rank or verdict.ranks else ""
    return Document(
        title=f"halfstep black box: step {verdict.step}{rank}",
        lead=f"{_sentence(verdict.what)}.",
        sections=tuple(section for section in sections if section.blocks),
        footer="Made by halfstep. This file is complete: it loads nothing and runs no script.",
    )


def _summary(verdict: Verdict) -> Section:
    where = verdict.where or "No operator is to blame"
    cause = (
        f"{verdict.cause} ({'shown' if verdict.sure == 'shown' else 'most likely'})" if verdict.cause else "not known"
    )
    why = verdict.because or CAUSES.get(verdict.cause, "The replay shows no cause")
    facts = (
        Fact(heading="Cause", text=f"{cause}.", more=(f"{_sentence(why)}.",), tone="bad"),
        Fact(heading="Where", text=f"{where}.", more=(verdict.line,) if verdict.line else (), tone="open"),
        Fact(heading="Do this", text=f"{_sentence(verdict.remedy or 'see the notes')}.", tone="good"),
    )
    return Section(heading="In short", blocks=(Facts(facts=facts),))


def _story(verdict: Verdict) -> Section:
    if not verdict.story:
        return Section(heading="Magnitudes", blocks=())
    picture = Figure(
        heading="Largest magnitudes up to the place",
        caption="The operators that led to the place, in their order. Behind each lies the range of its format, with "
        "marks at its smallest number, its smallest of full precision and its largest.",
        alt="Largest magnitude of each operator that led to the place, over powers of two.",
        chart=HeatMap(x_label="magnitude", strips=tuple(map(_strip, verdict.story))),
    )
    rows = (
        (
            row.op,
            row.module or "the model",
            row.phase,
            row.dtype,
            _size(row),
            f"{row.limit:.6g}",
            row.line.partition(" ")[0],
        )
        for row in verdict.story
    )
    headers = ("operator", "module", "phase", "format", "largest", "limit", "line")
    return Section(
        heading="Magnitudes",
        blocks=(Gallery(figures=(picture,)), _table("Operators up to the place", headers, rows)),
    )


def _strip(row: Magnitude) -> Strip:
    form = _format(row.dtype)
    size = row.largest if row.finite else 2.0 * row.limit  # what is not finite is drawn beyond the end
    cells = ((math.frexp(size)[1] - 1, 1.0),) if 0.0 < size < math.inf else ()
    return Strip(
        label=f"{row.op} in {row.module or 'the model'}" + (", backward" if row.phase == "backward" else ""),
        text=f"{form.name}, {_size(row)}",
        cells=cells,
        zeros=1.0 if row.finite and not row.largest else 0.0,
        limits=(math.log2(form.smallest_subnormal), math.log2(form.smallest_normal), math.log2(form.max)),
    )


def _format(name: str) -> Format:
    """Return the format of a dtype by its name; fp32 for those that are no format of halfstep."""
    try:
        return format_of(getattr(torch, name))
    except FormatError:
        return FP32


def _size(row: Magnitude) -> str:
    return f"{row.largest:.4g}" if row.finite else "not finite"


def _history(verdict: Verdict) -> Section:
    if len(verdict.history) < 2:
        return Section(heading="The steps before", blocks=())
    steps = tuple(float(step) for step, _, _ in verdict.history)
    losses = tuple(math.nan if loss is None else loss for _, loss, _ in verdict.history)
    norms = tuple(math.nan if norm is None else norm for _, _, norm in verdict.history)
    figures = tuple(
        Figure(
            heading=name,
            caption=f"{name} of the {len(steps)} steps before this one; a gap is a value that is not finite.",
            alt=f"{name} over steps.",
            chart=LineChart(x_label="step", series=(Series(label=name, x=steps, y=values),), log=True),
        )
        for name, values in (("Loss", losses), ("Norm of all gradients", norms))
        if sum(map(math.isfinite, values)) > 1
    )
    return Section(heading="The steps before", blocks=(Gallery(figures=figures),) if figures else ())


def _cures(verdict: Verdict) -> Section:
    blocks: list[Block] = []
    for cure in verdict.cures:
        first, *rest = cure.text.splitlines()
        tried = f" {'Verified' if cure.verified else 'Tried'}: {cure.outcome}." if cure.outcome else ""
        blocks.append(Paragraph(text=f"{_sentence(first)}.{tried}"))
        if rest:
            blocks.append(Code(text="\n".join(rest)))
    return Section(heading="What to change", blocks=tuple(blocks))


def _place(verdict: Verdict) -> Section:
    facts = [("operator", verdict.op), ("module", verdict.module), ("phase", verdict.phase), ("line", verdict.line)]
    inputs = ", ".join(f"{d} {list(s)}" for d, s in zip(verdict.dtypes, verdict.shapes, strict=True))
    facts += [("inputs", inputs), ("largest input", f"{verdict.value:.6g}" if verdict.shapes else "")]
    facts += [("value of", verdict.parameter), ("read", verdict.page)]
    blocks: list[Block] = [_table("The place", ("", ""), ((name, text) for name, text in facts if text))]
    if verdict.notes:
        blocks.append(Bullets(items=verdict.notes))
    return Section(heading="Details", blocks=tuple(blocks))


def _table(caption: str, headers: tuple[str, ...], rows: Iterable[Iterable[str]]) -> Table:
    made = tuple(tuple(Cell(text=word) for word in row) for row in rows)
    return Table(caption=caption, headers=headers, rows=made)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")
