"""Draw the pictures of docs/concepts: what a format holds, where a step casts, how a loss scale moves.

    python -m benchmarks.concept_pictures [--check]

Formats come from `halfstep.formats`, the rest from benchmarks/results/concepts.json (`benchmarks.concept_facts`).
"""

from __future__ import annotations

import html
import math
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.canvas import SIDE, WIDTH, Canvas
from benchmarks.reports import load
from halfstep.formats import FORMATS, Format

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SHOWN = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
FIRST, LAST = -150, 128  # the axis of formats, log2
HUE = {"fp32": 1, "fp16": 2}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(exponent: int) -> str:
    return f"2{str(exponent).translate(SUPERSCRIPTS)}"


def _share(share: float) -> str:
    return f"{100 * share:.2g}%"


# ------------------------------------------------------------------ what a format holds


def formats_picture(facts: dict[str, Any]) -> str:
    """Return the significant bits of each format over the magnitude, and where gradients fall."""
    canvas = Canvas()

    def across(exponent: float) -> float:
        return SIDE + (WIDTH - 2 * SIDE) * (exponent - FIRST) / (LAST - FIRST)

    canvas.text(SIDE, 22, "significant bits of a number, by its size", bold=True)
    canvas.text(SIDE, 38, "solid: normal numbers; light: subnormal ones", paint="muted")
    y, words = 50.0, []
    for name in SHOWN:
        known = FORMATS[name]
        height = 4 + 1.4 * (known.mantissa_bits + 1)
        least, normal, most = (math.log2(n) for n in (known.smallest_subnormal, known.smallest_normal, known.max))
        y += 15
        says = f"{_power(round(least))} to {_largest(known)}, {_bits(known)}"
        canvas.text(SIDE, y, name, bold=True)
        canvas.text(WIDTH - SIDE, y, says, at="end", paint="muted")
        words.append(f"{name} {says}")
        base, one = y + 6 + height, height / (known.mantissa_bits + 1)
        steps = range(round(least), round(normal))
        below = [(across(e + up), base - one * (e - least + 1)) for e in steps for up in (0, 1)]
        canvas.area([(across(least), base), *below, (across(normal), base)], "hue6")
        canvas.box(across(normal), base - height, across(most) - across(normal), height, "hue1")
        canvas.line([(SIDE, base), (WIDTH - SIDE, base)], "faint")
        y = base
    y += 12
    for scale in (0, 16):
        found = facts["gradients"]["activation gradient"]
        lost = _share(found["zero in fp16, scaled by 2^16" if scale else "zero in fp16"])
        y += 16
        told = f"gradients × {_power(scale)}" if scale else "gradients"
        canvas.text(SIDE, y, f"{told}: {lost} are 0 in fp16", bold=True)
        words.append(f"{told}: {lost} are 0 in fp16")
        base = y + 40
        most = max(count for _, count in found["exponents"])
        zero = math.log2(FORMATS["fp16"].smallest_subnormal) - 1
        top = math.log2(FORMATS["fp16"].max)
        canvas.box(across(zero), base - 34, across(top) - across(zero), 34, "band")
        for exponent, count in found["exponents"]:
            left, tall = across(exponent + scale), 32 * math.sqrt(count / most)
            paint = "hue2" if exponent + scale < zero else "hue3"
            canvas.box(left, base - tall, across(1) - across(0), tall, paint)
        canvas.line([(SIDE, base), (WIDTH - SIDE, base)], "faint")
        y = base
    for exponent in (-149, -126, -64, -24, 0, 16, 64, 127):
        if exponent not in (-149, 127):
            label = _power(exponent) if exponent else "1"
            canvas.text(across(exponent), y + 16, label, at="middle", paint="muted")
        canvas.line([(across(exponent), y), (across(exponent), y + 4)], "muted")
    canvas.text(WIDTH - SIDE, y + 16, _power(127), at="end", paint="muted")
    canvas.text(SIDE, y + 36, "grey: what fp16 holds; height: root of the count", paint="muted")
    about = facts["gradients"]
    alt = (
        "Range and precision of formats on one axis of powers of two: "
        + "; ".join(words[: len(SHOWN)])
        + f". Below it the gradients of activations of the {about['task']} task at step {about['step']}, "
        f"beside the range of fp16: {'; '.join(words[len(SHOWN) :])}"
    )
    return canvas.file(round(y + 48), alt)


def _largest(known: Format) -> str:
    return f"{known.max:g}" if known.max < 1e6 else f"{known.max:.1e}".replace("e+", "e")


def _bits(known: Format) -> str:
    return f"{known.mantissa_bits + 1} bits"


# ------------------------------------------------------------------ where a step casts

COLUMN = 158.0
GAP = 26.0
TALL = 40.0


def step_picture(facts: dict[str, Any]) -> str:
    """Return a training step under two presets, side by side: what is in which format, and the casts between."""
    canvas, words = Canvas(), []
    bottoms = []
    for place, (preset, found) in enumerate(facts["steps"].items()):
        left = SIDE + place * (COLUMN + 2 * 5)
        canvas.text(left, 22, f"{preset}, low format fp16", bold=True)
        y, said = 32.0, []
        for title, formats, casts in _moments(found):
            if casts is not None:
                told = ", ".join(f"{count} {what}" for what, count in casts.items() if count)
                canvas.arrow(left + 14, y, y + GAP, "hue5" if told else "muted")
                canvas.text(left + 24, y + GAP / 2 + 4, told or "no cast", paint="ink" if told else "muted")
                said.append(f"casts of {told}" if told else "no cast")
                y += GAP
            canvas.box(left, y, COLUMN, TALL, "band", 4)
            for n, part in enumerate(dict.fromkeys(word for word in formats.replace(",", " ").split() if word in HUE)):
                canvas.box(left + COLUMN - 10 - 8 * n, y + 6, 5, TALL - 12, f"hue{HUE[part]}", 2)
            canvas.text(left + 8, y + 16, title, bold=True)
            canvas.text(left + 8, y + 32, formats)
            said.append(f"{title}: {formats}")
            y += TALL
        total = f"{found['all casts']} casts, {found['bytes'] / 1024:.0f} KiB"
        canvas.text(left, y + 20, total, bold=True)
        words.append(f"{preset}, {total}: {'; '.join(said)}")
        bottoms.append(y)
    y = max(bottoms) + 42
    for n, (name, hue) in enumerate(HUE.items()):
        canvas.box(SIDE + 60 * n, y - 11, 5, 14, f"hue{hue}", 2)
        canvas.text(SIDE + 10 + 60 * n, y, name, paint="muted")
    canvas.line([(SIDE + 120, y - 4), (SIDE + 132, y - 4)], "hue5", 2)
    canvas.text(SIDE + 138, y, "cast; KiB read and written", paint="muted")
    return canvas.file(round(y + 14), "A training step of linear, norm, gelu, linear under " + ". ".join(words))


def _moments(found: dict[str, Any]) -> list[tuple[str, str, dict[str, int] | None]]:
    """Return what a step passes, in order: title, formats, casts before it (None: it is the first)."""
    formats, casts = found["formats"], found["casts"]
    forward, backward = casts["forward"], casts["backward"]
    return [
        ("weights", _mixture(formats["weights"]), None),
        (
            "forward",
            _mixture(formats["forward"]),
            {"weights": forward.get("weight", 0), "input": forward.get("down", 0)},
        ),
        ("loss × scale", formats["loss"], {"output": forward.get("up", 0)}),
        ("backward", _mixture(formats["backward"]), {"gradient": backward.get("down", 0)}),
        ("weight gradients", _mixture(formats["gradients"]), {"gradients": backward.get("gradient", 0)}),
        ("check, unscale, clip", f"one factor, {' and '.join(formats['stepped'])}", casts.get("tail", {})),
        ("update: AdamW", _written(formats), {}),
    ]


def _mixture(formats: dict[str, str]) -> str:
    """Return the formats of named tensors; where they differ, those of the norm apart."""
    rest = {value for name, value in formats.items() if not name.startswith("norm")}
    norms = {value for name, value in formats.items() if name.startswith("norm")}
    text = " and ".join(sorted(rest))
    return text if norms <= rest else f"{text}, norm {' and '.join(sorted(norms))}"


def _written(formats: dict[str, Any]) -> str:
    stored = {value for name, value in formats["weights"].items() if not name.startswith("norm")}
    stepped = " and ".join(formats["stepped"])
    return f"{stepped} weights" if stored == set(formats["stepped"]) else f"{stepped} masters, {' '.join(stored)}"


# ------------------------------------------------------------------ how a scale moves


def scale_picture(facts: dict[str, Any]) -> str:
    """Return the scale of a run, step by step, with its skipped steps."""
    found, canvas = facts["scale"], Canvas()
    rule, scales, skipped = found["rule"], found["scales"], found["skipped"]
    left, right, top, bottom = 46.0, WIDTH - SIDE, 62.0, 250.0
    highest, lowest = math.ceil(math.log2(max(scales))) + 1, math.floor(math.log2(rule["floor"])) - 2

    def at(step: float, scale: float) -> tuple[float, float]:
        up = (math.log2(scale) - lowest) / (highest - lowest)
        return left + (right - left) * step / len(scales), bottom - (bottom - top) * up

    first, last = found["broken"]
    canvas.text(SIDE, 22, "a dynamic loss scale, step by step", bold=True)
    canvas.text(SIDE, 40, f"× {rule['growth']:g} after {rule['interval']} good steps in a row,", paint="muted")
    canvas.text(SIDE, 55, f"× {rule['backoff']:g} at a step that overflows", paint="muted")
    canvas.box(at(first, 1)[0], top, at(last + 1, 1)[0] - at(first, 1)[0], bottom - top, "band")
    for exponent in range(0, highest, 4):
        y = at(0, 2.0**exponent)[1]
        canvas.line([(left, y), (right, y)], "faint", 0.8)
        canvas.text(left - 8, y + 4, _power(exponent), at="end", paint="muted")
    floor = at(0, rule["floor"])[1]
    canvas.line([(left, floor), (right, floor)], "ink", 1.2, "4 2")
    canvas.text(left + 4, floor + 14, f"floor {_power(round(math.log2(rule['floor'])))}", paint="ink")
    path = [point for n, scale in enumerate(scales) for point in (at(n, scale), at(n + 1, scale))]
    canvas.line(path, "hue1", 2)
    for n, bad in enumerate(skipped):
        if bad:
            x, y = at(n + 0.5, scales[n])
            canvas.line([(x - 3, y - 3), (x + 3, y + 3)], "bad", 1.8)
            canvas.line([(x - 3, y + 3), (x + 3, y - 3)], "bad", 1.8)
    canvas.text(at(first, 1)[0] - 6, at(0, 2.0**6)[1], "batches with inf", at="end", paint="ink")
    for step in range(0, len(scales), 20):
        canvas.text(at(step, 1)[0], bottom + 16, str(step), at="middle", paint="muted")
    canvas.text((left + right) / 2, bottom + 34, "step", at="middle", paint="muted")
    overflows = [n + 1 for n, bad in enumerate(skipped) if bad and not first <= n <= last]
    count = sum(skipped)
    canvas.line([(SIDE, bottom + 48), (SIDE + 6, bottom + 54)], "bad", 1.8)
    canvas.line([(SIDE, bottom + 54), (SIDE + 6, bottom + 48)], "bad", 1.8)
    canvas.text(SIDE + 14, bottom + 55, f"skipped: {count} of {len(scales)} steps change no weight", paint="muted")
    numbers = ", ".join(map(str, overflows))
    initial, reached, least = (_power(round(math.log2(n))) for n in (rule["init"], max(scales), rule["floor"]))
    alt = (
        f"The loss scale of a run in fp16, from {initial}: it doubles after each {rule['interval']} good steps; at "
        f"{reached} gradients overflow, steps {numbers} are skipped and the scale halves; batches with inf at steps "
        f"{first + 1} to {last + 1} bring it to its floor of {least}, and it grows again after them. "
        f"{count} of {len(scales)} steps are skipped"
    )
    return canvas.file(round(bottom + 68), alt)


def pictures() -> dict[str, str]:
    """Return the pictures by file name."""
    facts = load("concepts.json")
    return {
        "formats.svg": formats_picture(facts),
        "step_casts.svg": step_picture(facts),
        "scale_moves.svg": scale_picture(facts),
    }


def links() -> dict[str, str]:
    """Return Markdown of the pictures for pages of docs/concepts, with their alternative texts."""
    found = {name: re.search("<title>(.*)</title>", text) for name, text in pictures().items()}
    return {
        f"picture {name.removesuffix('.svg')}": f"![{html.unescape(title[1])}](../pictures/{name})"
        for name, title in found.items()
        if title
    }


def stale_pictures(*, write: bool = False) -> list[str]:
    """Return the pictures that differ from what the facts give; `write` draws them."""
    stale = []
    for name, text in pictures().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if write:
                path.write_text(text, encoding="utf-8")
    return stale


def main() -> int:
    check = "--check" in sys.argv
    stale = stale_pictures(write=not check)
    if stale and check:
        print(f"pictures that differ from the facts: {', '.join(stale)}; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
