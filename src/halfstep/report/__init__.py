"""Reports: documents and charts as plain data, and the one HTML file they become. Knows nothing of training."""

from halfstep.report.charts import Bar, BarChart, Dot, DotChart, Key, LineChart, Series
from halfstep.report.document import (
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
    Note,
    Paragraph,
    Section,
    Table,
)
from halfstep.report.html import MissingExtraError, picture_file, render, require_extra

__all__ = [
    "Bar",
    "BarChart",
    "Block",
    "Bullets",
    "Cell",
    "Code",
    "Details",
    "Document",
    "Dot",
    "DotChart",
    "Fact",
    "Facts",
    "Figure",
    "Gallery",
    "Key",
    "LineChart",
    "MissingExtraError",
    "Note",
    "Paragraph",
    "Section",
    "Series",
    "Table",
    "picture_file",
    "render",
    "require_extra",
]
