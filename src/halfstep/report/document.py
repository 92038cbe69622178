"""Documents: headings, paragraphs, tables and pictures as data."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.report.charts import Chart, Key

__all__ = [
    "Block", "Bullets", "Cell", "Code", "Details", "Document", "Fact", "Facts", "Figure", "Gallery", "Note",
    "Paragraph", "Section", "Table",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bullets:
    """Short texts below each other."""

    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Text that must not be overlooked."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A finding in words under a short heading; `tone` is "good", "bad", "open" or ""."""

    heading: str
    text: str
    more: tuple[str, ...] = ()
    tone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Findings side by side, where there is room."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One field of a table; `tone` as in `Fact`, or "words" for sentences, which are broken into lines."""

    text: str
    tone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table: the first column names the rows, numbers stand in the others."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A picture."""

    heading: str  # what it shows
    caption: str  # how to read it
    alt: str  # its content in words, for readers who do not see it
    chart: Chart  # its content


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """Figures side by side, where there is room; the legend has the label and the look of each curve in them."""

    figures: tuple[Figure, ...]
    legend: tuple[tuple[str, Key], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """Text in a fixed-width font, with its line breaks."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """Blocks that are shown on demand."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A page: its title, one paragraph below it, its sections, and a last line."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""


Block = Paragraph | Bullets | Note | Facts | Table | Figure | Gallery | Code | Details
