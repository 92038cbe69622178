"""A canvas for pictures of docs: text, boxes and lines as SVG, in the colours of reports, light and dark.

A picture is as wide as a phone and has its own background, so it can stand on any page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from halfstep.report.files import picture_style

WIDTH, SIDE = 350, 12  # px: a phone's screen without its margins, and the margin of a picture
FONT = 12


class Canvas:
    """SVG text; positions in px from the upper left corner."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, at: str = "start", paint: str = "ink", bold: bool = False) -> None:
        weight = "; font-weight: 600" if bold else ""
        style = f"font-size: {FONT}px; text-anchor: {at}; fill: var(--{paint}){weight}"
        self.parts.append(f'<text x="{_px(x)}" y="{_px(y)}" style="{style}">{html.escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, paint: str, round: float = 0) -> None:
        size = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
        self.parts.append(f'<rect {size} rx="{_px(round)}" style="fill: var(--{paint})"/>')

    def line(self, points: Sequence[tuple[float, float]], paint: str, width: float = 1.2, dashes: str = "") -> None:
        path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
        dashed = f"; stroke-dasharray: {dashes}" if dashes else ""
        style = f"fill: none; stroke: var(--{paint}); stroke-width: {width}{dashed}"
        self.parts.append(f'<polyline points="{path}" style="{style}"/>')

    def area(self, points: Sequence[tuple[float, float]], paint: str) -> None:
        path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" style="fill: var(--{paint})"/>')

    def arrow(self, x: float, top: float, bottom: float, paint: str) -> None:
        self.line([(x, top), (x, bottom - 4)], paint, 1.6)
        self.area([(x - 4, bottom - 6), (x + 4, bottom - 6), (x, bottom)], paint)

    def file(self, height: int, alt: str) -> str:
        """Return the picture as a file with its alternative text."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}">\n<title>{html.escape(alt)}</title>\n<style>\n{picture_style()}</style>\n'
            f'<rect width="{WIDTH}" height="{height}" rx="8" style="fill: var(--paper)"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
