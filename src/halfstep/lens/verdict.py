"""Verdict: why a step was not finite, from its root cause to the cures that were tried.

`kind` says what happened at the place, `cause` why: a place where fp16 overflows may have a learning rate as its cause.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep import report as doc
from halfstep.errors import FormatError
from halfstep.formats import FORMATS, FP32, format_of
from halfstep.report import plain, sarif_log, strict_json, write_page
from halfstep.schema import packaged_toml

SHOWN = 4  # samples and indices are listed up to this number

_, KINDS, CAUSES = packaged_toml("lens/kinds.toml").values()
"""Kind of a verdict -> what happened at the place; root cause -> what it means."""

WIDTH = 160  # characters of a headline
LEAST = 30  # of its remedy, where what happened needs the room: its numbers matter more
MODULE = 30  # characters of a module's name in a headline: its end

BETWEEN, CUT = " | ", "..."
HEADERS = ("operator", "module", "phase", "format", "largest", "limit")  # of a story

NAMES = {form.max: str(form.torch_dtype).removeprefix("torch.") for form in FORMATS.values() if form.torch_dtype}
"""Largest number of a format -> its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Magnitude:
    """How large the numbers of one operator were; a row of a verdict's story.

    Attributes:
        op: public short name of the operator.
        module: dotted name of the module it was called in.
        line: the user's line that called it: "file.py:12 text".
        phase: "forward" or "backward".
        dtype: format of its result.
        largest: largest finite magnitude of its result; 0.0 if it holds none.
        limit: largest number of that format.
        finite: whether the whole result was finite.
    """

    op: str
    module: str
    line: str
    phase: str
    dtype: str
    largest: float
    limit: float
    finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change of policy for a step that went wrong.

    Attributes:
        policy: the whole policy with the change made, an `hs.Policy`; None where the change is none of a policy.
        text: the change in words and as a line of code.
        verified: whether training went on under it for some steps as it does in fp32, with finite buffers.
        outcome: what trying it showed, in words: "trained 12 steps, ...", "finite once: ..."; "" if it was not tried.
    """

    policy: Any = None
    text: str
    verified: bool = False
    outcome: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a step was not finite; printing it is a report. What is absent is "" or ().

    Attributes:
        kind: what happened at the place, one of `KINDS`.
        cause: why, one of `CAUSES`; "" if that is not known.
        because: what shows the cause, in one sentence with its numbers.
        sure: "shown" if what was tried or read could have refuted the cause, else "likely"; "" without a cause.
        shown: what that was, and what came of it; "" if nothing was.
        op: public short name of the operator that made the first non-finite value, such as "linear".
        module: dotted name of the module it was called in; "" for the root and for what no module calls.
        phase: "forward", "backward" or "update".
        line: the user's line that called it: "file.py:12 text".
        parameter: name of the parameter, buffer, optimizer state or input that was not finite, or that the format of
            the result cannot hold.
        dtypes: formats of the tensors it was given.
        shapes: their shapes.
        value: largest magnitude among them.
        limit: largest number of the format its result has; 0.0 if that does not matter.
        rank: rank of the process it happened on.
        ranks: all ranks on which the step was not finite, of those that make each step together; () if there are no
            others, or if the step was finite on each.
        step: the step of the TrainStep or BlackBox, from 1.
        cures: changes under which the step is finite, smallest first; then unverified advice.
        detail: the part of the headline that follows the place.
        notes: other observations.
        story: magnitudes of the operators that led to the place, in their order; the last row is the place.
        history: (step, loss, norm of all gradients) of the steps before, the oldest first; None: not known.
        file: path of the file that `line` is in.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, lambda model, x: (model(x).sum() * 0).log())
        >>> result = step(x)
        >>> step.explain().kind
        'invalid'
    """

    kind: str
    cause: str = ""
    because: str = ""
    sure: str = ""
    shown: str = ""
    op: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    parameter: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    value: float = 0.0
    limit: float = 0.0
    rank: int = 0
    ranks: tuple[int, ...] = ()
    step: int = 0
    cures: tuple[Cure, ...] = ()
    detail: str = ""
    notes: tuple[str, ...] = ()
    story: tuple[Magnitude, ...] = ()
    history: tuple[tuple[int, float | None, float | None], ...] = ()
    file: str = ""

    @property
    def headline(self) -> str:
        """What happened, where, and what to do about it: one line of at most `WIDTH` characters."""
        rank = f" on rank {self.rank}" if self.rank or self.ranks else ""
        begin = f"step {self.step}{rank}: "
        return begin + _joined([self.what, self.where, self.remedy], WIDTH - len(begin))

    @property
    def what(self) -> str:
        """What happened, in a few words."""
        begins = {"divergence": "training diverged: ", "loop": "", "data": "bad batch: "}
        if self.cause in begins:
            return begins[self.cause] + self.because
        more = f", {self.detail}" if self.detail else ""
        if self.kind == "overflow":
            form = NAMES.get(self.limit, "its format")
            return f"overflow of {form}, {self.detail or f'largest input {self.value:.6g}'}"
        if self.kind == "invalid":
            return f"no finite value in any format{more}"
        if self.kind == "bad_batch":
            return f"bad batch: {self.parameter}: {self.detail or 'not finite'}"
        if self.kind == "bad_state":
            return f"{self.parameter or 'the state'} was not finite before the step"
        if self.kind == "scale_too_high":
            return f"gradients overflow at this loss scale{more}"
        return self.detail or "the replay of this step is finite"

    @property
    def where(self) -> str:
        """Operator, module, phase and line number in one phrase; "" where no operator is to blame."""
        if not self.op:
            return f"in the {self.phase}" if self.phase == "update" else ""
        line = self.line.partition(" ")[0]
        module = self.module or "the model"
        if len(module) > MODULE:
            module = CUT + module[len(CUT) - MODULE :]
        return ", ".join(part for part in (f"{self.op} in {module}", self.phase, line) if part)

    @property
    def remedy(self) -> str:
        """The first cure, or the first advice, in a few words."""
        if not self.cures:
            return ""
        first = self.cures[0]
        words = first.text.splitlines()[0].partition(": ")[0]
        if first.policy is None:
            return words.partition("; ")[0]
        return words.partition(" (")[0] + (" (verified)" if first.verified else "")

    @property
    def why(self) -> str:
        """What shows the cause, or what the cause means; "" if it is not known."""
        return self.because or CAUSES.get(self.cause, "")

    @property
    def page(self) -> str:
        """The command that prints the page on this cause."""
        return f"halfstep explain {self.cause or 'unknown'}"

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the verdict as JSON, and write it to `path` if one is given; numbers that are not finite are null."""
        return strict_json(self.record(), path)

    def to_sarif(self, path: str | Path | None = None) -> str:
        """Return the verdict as a SARIF 2.1.0 log, which editors and code hosts show beside the line.

        Args:
            path: where to write it too.
        """
        number = self.line.partition(" ")[0].rpartition(":")[2]
        level, file = "error" if self.cause else "warning", self.file or self.line.partition(":")[0]
        line = int(number) if number.isdigit() else 0
        result = self.cause or "unknown", level, f"{self.headline}\n\n{self}", file, line
        rules = {**CAUSES, "unknown": "the cause is not known"}
        return strict_json(sarif_log(rules, "halfstep explain {}", [result]), path)

    def save_html(self, path: str | Path) -> None:
        """Write the verdict as one HTML file with pictures that needs nothing else."""
        write_page(_page(self), path)

    def record(self) -> dict[str, Any]:
        """Return plain values: the fields, policies as TOML, and the headline."""
        return {**plain(self), "headline": self.headline, "page": self.page}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the report line by line, each with its style: "title", "good", "bad", "dim" or ""."""
        yield f"halfstep black box, {self.headline}", "title"
        place = f"{self.op} in {self.module or 'the model'}" + (f", {self.phase}" if self.phase else "")
        limit = f", the format ends at {self.limit:.6g}" if self.limit else ""
        facts = (
            ("cause", _cause(self) if self.cause else "", "bad"),
            ("", self.why if self.cause else "", ""),
            ("shown by", self.shown, ""),
            ("place", place if self.op else "", ""),
            ("" if self.op else "place", self.line, ""),
            ("inputs", ", ".join(f"{d} {list(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True)), ""),
            ("", f"largest {self.value:.6g}{limit}" if self.shapes else "", ""),
            ("value of", self.parameter, ""),
            ("ranks", ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else "", ""),
        )
        yield from ((_fact(name, text), style) for name, text, style in facts if text)
        if self.story:
            yield from _table(self.story)
        for cure in self.cures:
            first, *rest = cure.text.splitlines()
            yield _fact("do" if cure.policy is None else "cure", first), "good" if cure.verified else ""
            if cure.outcome:
                yield _fact("", f"{'verified: ' if cure.verified else ''}{cure.outcome}"), ""
            for line in rest:
                yield _fact("", line), "dim"
        for number, note in enumerate(self.notes):
            yield _fact("" if number else "notes", note), ""
        yield _fact("read", self.page), "dim"

    def __str__(self) -> str:
        """Return the report: what happened and why, the numbers that led to it, and what to change."""
        return "\n".join(line for line, _ in self.lines())


def _cause(verdict: Verdict) -> str:
    return f"{verdict.cause} ({'shown' if verdict.sure == 'shown' else 'most likely'})"


def _fact(name: str, text: str) -> str:
    return f"  {name:<8}  {text}"


def _table(story: Sequence[Magnitude]) -> Iterator[tuple[str, str]]:
    rows = [HEADERS, *map(_cells, story)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, cells in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        style = "dim" if not number else "" if story[number - 1].finite else "bad"
        yield _fact("" if number else "story", text), style


def _joined(parts: Sequence[str], width: int) -> str:
    """Join what happened, where, and what to do; the last is cut first, to `LEAST` characters, then what happened."""
    parts = [part for part in parts if part]
    over = sum(map(len, parts)) + len(BETWEEN) * (len(parts) - 1) - width
    for index, least in ((-1, LEAST), (0, 0)):
        if over > 0 and len(parts[index]) > least:
            kept = max(len(parts[index]) - over, least)
            over -= len(parts[index]) - kept
            whole, _, last = parts[index][: kept - len(CUT) + 1].rpartition(" ")  # no number is cut to another one
            parts[index] = (whole or last[:-1]).rstrip(" ,;:") + CUT
    return BETWEEN.join(parts)


def shown(numbers: Sequence[int], what: str = "sample", most: int = SHOWN) -> str:
    """Return "sample 1" or "samples 1, 4 and 7 more"."""
    text = ", ".join(map(str, numbers[:most]))
    more = len(numbers) - most
    return f"{what}{'s' if len(numbers) > 1 else ''} {text}" + (f" and {more} more" if more > 0 else "")


def _page(verdict: Verdict) -> doc.Document:
    rank = f" on rank {verdict.rank}" if verdict.rank or verdict.ranks else ""
    notes = (doc.Bullets(verdict.notes),) if verdict.notes else ()
    details = (doc.hidden("The whole report", str(verdict)), *notes)
    return doc.page(
        f"halfstep black box: step {verdict.step}{rank}",
        doc.sentence(verdict.what),
        (_summary(verdict), _magnitudes(verdict), _history(verdict), _cures(verdict), doc.Section("Details", details)),
    )


def _summary(verdict: Verdict) -> doc.Section:
    cause = f"{_cause(verdict)}." if verdict.cause else "not known."
    why = (doc.sentence(verdict.why or "The replay shows no cause"),)
    shown = (f"Shown by: {doc.sentence(verdict.shown)}",) if verdict.shown else ()
    line = (verdict.line,) if verdict.line else ()
    facts = (
        doc.Fact("Cause", cause, why + shown, "bad"),
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
    rows = ((*_cells(row), row.line.partition(" ")[0]) for row in verdict.story)
    table = doc.table("Operators up to the place", (*HEADERS, "line"), rows)
    return doc.Section("Magnitudes", (doc.Gallery((picture,)), table))


def _cells(row: Magnitude) -> tuple[str, ...]:
    return row.op, row.module or "the model", row.phase, row.dtype, _size(row), f"{row.limit:.6g}"


def _strip(row: Magnitude) -> doc.Strip:
    try:
        form = format_of(getattr(torch, row.dtype))
    except FormatError:  # no format of halfstep
        form = FP32
    size = row.largest if row.finite else 2.0 * row.limit  # what is not finite is drawn beyond the end
    return doc.Strip(
        f"{row.op} in {row.module or 'the model'}" + (", backward" if row.phase == "backward" else ""),
        f"{form.name}, {_size(row)}",
        ((math.frexp(size)[1] - 1, 1.0),) if 0.0 < size < math.inf else (),
        1.0 if row.finite and not row.largest else 0.0,
        doc.limits_of(form),
    )


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
