"""The picture of the architecture, docs/architecture.svg, drawn from the imports; ``make tables`` writes it.

    python -m tests.architecture.picture [--check]

A row is a layer of `imports.LAYERS`, a box a part of the package, an arrow the imports of one part by another. Parts of
layer 0 are imported by all others; these imports are not drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from tests.architecture.imports import LAYERS, OUTSIDE, imported
from tests.architecture.reading import write

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "halfstep"
PICTURE = ROOT / "docs" / "architecture.svg"

PARTS: Mapping[str, tuple[int, str]] = {
    "cli": (225, "the command halfstep"),
    "advise": (385, "tune, plan, lint"),
    "tasks": (545, "models to train"),
    "testing": (705, "counts casts, bytes"),
    "compat": (865, "names of apex ..."),
    "integrations": (1025, "Trainer, accelerate"),
    "": (965, "import halfstep: the public names"),
    "report": (430, "pages in HTML"),
    "lens": (230, "black box, monitor, audit"),
    "checkpoints": (700, "save, load, preemption"),
    "step": (530, "TrainStep and its parts"),
    "auto": (640, "a policy by measuring"),
    "binding": (430, "prepare, shard"),
    "update": (780, "gradients to weights"),
    "cast": (380, "regions, rules, low copies"),
    "weights": (560, "fp32 values of low weights"),
    "scale": (730, "the loss scale"),
    "policy": (330, "formats and rules as data"),
    "kernels": (680, "a reference, three backends"),
    "formats": (230, "number formats"),
    "errors": (550, "cause and remedy"),
    "events": (710, "results of a step"),
    "trees": (870, "containers of tensors"),
    "optim": (2150, "several as one"),
    "timing": (1030, "candidates in turns"),
    "snapshot": (1030, "taking back"),
    "lazy": (390, "names at first use"),
    "mistakes": (1510, "orders of calls"),
    "meeting": (1670, "what ranks tell"),
    "schema": (1350, "what files must hold"),
    "accelerators": (1190, "any device of torch"),
    "arguments": (1830, "kinds of values"),
    "torch_private": (1990, "names of torch"),
}
"""Part -> the middle of its box, and a few words; a part that is not here is drawn at the right end."""

ROWS: Mapping[int, tuple[str, str]] = {
    7: ("users", "public names only"),
    6: ("around a step", "observe and save"),
    5: ("the step", "a list of parts"),
    4: ("choice", "measures steps"),
    3: ("model, update", "independent"),
    2: ("strategies", "independent"),
    1: ("data, arithmetic", "independent"),
    0: ("vocabulary", "for every part"),
}
"""Layer -> its name, and what holds in it."""

WIDTH, HEIGHT, TOP, BAR = 2250, 124, 108, 70
BOX = (152, 52)
DARK, GREY = "#1f2933", "#5f6b7a"
TITLE = "The parts of halfstep and their imports"
LEGEND = (
    "An import points down. The thicker an arrow, the more imports. Dashed: within a layer, or up, for a reason that",
    "stands in tests/architecture/imports.py. Every part may import layer 0; these arrows are left out.",
)
COLOURS = {7: "#7a5195", 6: "#b4456e", 5: "#c8553d", 4: "#8a6d1f", 3: "#a1466b", 2: "#2f7f6b", 1: "#2b6cb0", 0: GREY}


def edges(source: Path = SOURCE) -> dict[tuple[str, str], int]:
    """Return (part, imported part) -> how many import statements; "" is the package itself."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for path in sorted(source.rglob("*.py")):
        words = ["halfstep", *path.relative_to(source).with_suffix("").parts]
        module = ".".join(words[:-1] if words[-1] == "__init__" else words)
        part = words[1] if words[1] != "__init__" else ""
        for _, target in imported(path, module, source):
            if target != part and part in LAYERS and (target in LAYERS or target == ""):
                found[part, target] += 1
    return dict(found)


def parts(source: Path = SOURCE) -> list[str]:
    """Return the parts that exist, the package itself last."""
    return [*(part for part in LAYERS if (source / part).is_dir() or (source / f"{part}.py").is_file()), ""]


def middle(part: str) -> tuple[float, float]:
    """Return the middle of a part's box."""
    x = PARTS.get(part, (WIDTH - 100, ""))[0]
    if part == "":
        return x, TOP + HEIGHT + BAR / 2 - 22
    layer = LAYERS[part]
    return x, TOP + (OUTSIDE - layer) * HEIGHT + (0 if layer == OUTSIDE else BAR) + BOX[1] / 2


def drawn(found: Mapping[tuple[str, str], int]) -> list[tuple[str, str, int]]:
    """Return the imports that are drawn: not those of layer 0."""
    return [(a, b, n) for (a, b), n in sorted(found.items()) if LAYERS.get(b, 1) > 0]


def svg(source: Path = SOURCE) -> str:
    """Return the picture."""
    there, arrows = parts(source), drawn(edges(source))
    height = TOP + OUTSIDE * HEIGHT + BAR + BOX[1] + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, sans-serif">',
        f"<title>{TITLE}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>',
        _text(24, 34, TITLE, 17, DARK, bold=True),
        _text(24, 54, LEGEND[0], 12),
        _text(24, 71, LEGEND[1], 12),
        "<defs>",
        *(_head(layer) for layer in COLOURS),
        "</defs>",
        *(_row(layer) for layer in ROWS),
        *_curves(arrows),
        *(_box(part) for part in there),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _head(layer: int) -> str:
    return (
        f'<marker id="head{layer}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{COLOURS[layer]}"/></marker>'
    )


def _text(
    x: float, y: float, text: str, size: float, colour: str = GREY, *, bold: bool = False, mid: bool = False
) -> str:
    look = ' font-weight="bold"' * bold + ' text-anchor="middle"' * mid
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{look}>{escape(text)}</text>'


def _rectangle(x: float, y: float, wide: float, high: float, round_by: int, look: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{round_by}" {look}/>'


def _row(layer: int) -> str:
    y = TOP + (OUTSIDE - layer) * HEIGHT + (0 if layer == OUTSIDE else BAR) - 14
    name, words = ROWS[layer]
    return (
        _rectangle(12, y, WIDTH - 24, BOX[1] + 28, 10, f'fill="{COLOURS[layer]}" fill-opacity="0.07"')
        + _text(26, y + 36, f"{layer}  {name}", 13, COLOURS[layer], bold=True)
        + _text(26, y + 53, words, 10.5)
    )


def _box(part: str) -> str:
    x, y = middle(part)
    words = PARTS.get(part, (0, ""))[1]
    if part == "":
        bar = _rectangle(x - (WIDTH - 330) / 2, y - 17, WIDTH - 330, 34, 17, f'fill="{DARK}"')
        return bar + _text(x, y + 5, words, 13, "#ffffff", mid=True)
    look = f'fill="#ffffff" stroke="{COLOURS[LAYERS[part]]}" stroke-width="1.6"'
    return (
        _rectangle(x - BOX[0] / 2, y - BOX[1] / 2, *BOX, 8, look)
        + _text(x, y - 3, part, 15, DARK, bold=True, mid=True)
        + _text(x, y + 15, words, 10, mid=True)
    )


def _curves(arrows: Iterable[tuple[str, str, int]]) -> list[str]:
    """Draw the arrows: they leave a box and arrive at one in the order of the boxes at their other ends."""
    arrows = list(arrows)
    leaving: dict[str, list[str]] = defaultdict(list)
    arriving: dict[str, list[str]] = defaultdict(list)
    for a, b, _ in arrows:
        if middle(b)[1] > middle(a)[1]:
            leaving[a].append(b)
            arriving[b].append(a)
    lines = []
    for a, b, count in arrows:
        layer = LAYERS.get(a, OUTSIDE)
        (xa, ya), (xb, yb) = middle(a), middle(b)
        width = 1 + (count > 3) + 1.5 * (count > 12)
        style = f'fill="none" stroke="{COLOURS[layer]}" stroke-opacity="0.62" stroke-width="{width:g}"'
        if yb > ya:
            x0 = _port(xa, a, leaving[a], b)
            x1 = _port(xb, b, arriving[b], a)
            y0, y1 = ya + _half(a), yb - _half(b) - 2
            bend = (y1 - y0) * 0.5
            path = f"M{x0:g} {y0:g} C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"
        else:
            side = 1 if xb > xa else -1
            style += ' stroke-dasharray="5 4"'
            if yb == ya:
                near = abs(xb - xa) < 1.5 * BOX[0]  # beside each other: a straight line, else over the boxes between
                x0, x1 = (xa + side * BOX[0] / 2, xb - side * (BOX[0] / 2 + 2)) if near else (xa, xb)
                y0, lift = (ya, 0.0) if near else (ya - BOX[1] / 2, 26.0)
                path = f"M{x0:g} {y0:g} C{x0:g} {y0 - lift:g} {x1:g} {y0 - lift:g} {x1:g} {y0 - (not near) * 2:g}"
            else:
                x0, x1 = xa + side * BOX[0] / 2, xb - side * 30
                path = (
                    f"M{x0:g} {ya:g} C{(x0 + x1) / 2:g} {ya:g} {x1:g} {(ya + yb) / 2:g} {x1:g} {yb + BOX[1] / 2 + 2:g}"
                )
        lines.append(f'<path d="{path}" {style} marker-end="url(#head{layer})"/>')
    return lines


def _half(part: str) -> float:
    return BOX[1] / 2 if part else 17


def _port(x: float, part: str, others: list[str], other: str) -> float:
    """Return where on the edge of a box the arrow from or to `other` is."""
    if part == "":
        return middle(other)[0]
    order = sorted(set(others), key=lambda name: middle(name)[0])
    share = BOX[0] * 0.72
    return x + share * ((order.index(other) + 0.5) / len(order) - 0.5)


if __name__ == "__main__":
    write({PICTURE: svg()})
