"""Documents: headings, paragraphs, tables and pictures as data, and numbers as readers see them.

`render` makes a page of a document. A `Table` is also what the command line prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halfstep.report.charts import Bar, Chart, Key
from halfstep.schema import packaged_toml

__all__ = [
    "Block", "Bullets", "Cell", "Code", "Decimals", "Details", "Document", "Fact", "Facts", "Figure", "Gallery", "Note",
    "Paragraph", "Section", "Size", "TONES", "Table", "counted", "hidden", "judged", "listed", "method", "minus",
    "page", "sentence", "spoken", "table",
]  # fmt: skip

TONES: Mapping[str, str] = {
    **dict.fromkeys(("within the margin", "equivalent", "better", "fits", "chosen", "within"), "good"),
    **dict.fromkeys(("worse", "diverged", "failed", "does not fit"), "bad"),
    "undecided": "open",
}
"""Word of a verdict -> its tone, the same on pages and terminals."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text."""

    text: str


class Note(Paragraph):
    """Text that must not be overlooked."""


class Code(Paragraph):
    """Text in a fixed-width font, with its line breaks."""


@dataclass(frozen=True, slots=True)
class Bullets:
    """Short texts below each other."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A finding in words under a short heading; `tone` is "good", "bad", "open" or ""."""

    heading: str
    text: str
    more: tuple[str, ...] = ()
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Findings side by side, where there is room."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a table; `tone` as in `Fact`."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the first column names the rows, numbers stand in the others, but sentences in the columns `words`."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: tuple[int, ...] = ()  # numbers of the columns, from 0

    def texts(self) -> list[tuple[str, ...]]:
        """Return headers and rows as plain texts."""
        return [self.headers, *(tuple(cell.text for cell in row) for row in self.rows)]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture."""

    heading: str  # what it shows
    caption: str  # how to read it
    alt: str  # its content in words, for readers who do not see it
    chart: Chart  # its content


@dataclass(frozen=True, slots=True)
class Gallery:
    """Figures side by side, where there is room; the legend has the label and the look of each curve in them."""

    figures: tuple[Figure, ...]
    legend: tuple[tuple[str, Key], ...] = ()


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that are shown on demand."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A page: its title, one paragraph below it, its sections, and a last line."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""


Block = Paragraph | Bullets | Facts | Table | Figure | Gallery | Details


def page(title: str, lead: str, sections: Iterable[Section], made_by: str = "halfstep") -> Document:
    """Return a document of the sections that are not empty, whose last line says what made it."""
    footer = f"Made by {made_by}. This file is complete: it loads nothing and runs no script."
    return Document(title, lead, tuple(section for section in sections if section.blocks), footer)


def table(
    caption: str, headers: Sequence[str], rows: Iterable[Iterable[str | Cell]], words: Iterable[int] = ()
) -> Table:
    """Return a table in which a plain text is a cell without a tone."""
    cells = (tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
    return Table(caption, tuple(headers), tuple(cells), tuple(words))


def judged(verdict: str) -> Cell:
    """Return the word of a verdict with its tone."""
    return Cell(verdict, TONES.get(verdict, ""))


def hidden(summary: str, text: str) -> Details:
    """Return code that is shown on demand, such as a policy."""
    return Details(summary, (Code(text.strip()),))


def method(name: str, **words: object) -> Bullets:
    """Return how the numbers of a page came about, from ``methods.toml``."""
    return Bullets(tuple(item.format(**words) for item in packaged_toml("report/methods.toml")[name]))


def sentence(text: str) -> str:
    """Return `text` with a capital at its begin and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def spoken(what: str, rows: Iterable[Bar]) -> str:
    """Return bars or dots in words, for readers who do not see them."""
    return f"{what}: {'; '.join(f'{row.label} {row.text}' for row in rows)}."


# ------------------------------------------------------------------ numbers: real minus signs, columns in one unit

UNITS = (("B", 1), ("kB", 1_000), ("MB", 1_000_000), ("GB", 1_000_000_000))


def minus(text: str) -> str:
    """Return `text` with hyphens as minus signs; for numbers, not for words."""
    return text.replace("-", "\N{MINUS SIGN}")


def counted(count: int, what: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


class Decimals:
    """Numbers with the digits behind the point that show a hundredth of `largest`: a margin, or of a column."""

    def __init__(self, largest: float) -> None:
        self.count = max(0, 2 - math.floor(math.log10(largest)))

    def __call__(self, number: float) -> str:
        """Return the number, in words if it is none."""
        if not math.isfinite(number):
            return "not finite"
        return minus(f"{self._nearest(number):.{self.count}f}")

    def signed(self, number: float) -> str:
        """Return the number with its sign; a zero has none."""
        nearest = self._nearest(number)
        return minus(f"{nearest:+.{self.count}f}" if nearest else f"{nearest:.{self.count}f}")

    def _nearest(self, number: float) -> float:
        return round(number, self.count) + 0.0  # adding makes -0.0 a plain zero


class Size:
    """Bytes in a unit that suits all of some counts, with three digits of the largest."""

    def __init__(self, counts: Iterable[int]) -> None:
        most = max(counts)
        self.unit, self.bytes = next((pair for pair in reversed(UNITS) if most >= pair[1]), UNITS[0])
        self._decimals = Decimals(most / self.bytes if self.bytes > 1 else 100.0)

    def __call__(self, count: int) -> str:
        """Return the count in this unit, without the unit."""
        return self._decimals(count / self.bytes)
