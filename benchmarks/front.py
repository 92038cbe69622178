"""The README's pictures: time and bytes beside torch.amp, what the bytes of a step are, and a verdict in a terminal.

    python -m benchmarks.front --json benchmarks/results/verdict.json    # keep what examples/why_nan.py prints

`make tables` draws them from benchmarks/results/cpu.json, lean.json, plan.json and verdict.json. Each picture has its
own background and follows the reader's light or dark mode, because a page that shows it as an image cannot style it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.cases import AMP
from benchmarks.stamp import commit, write
from halfstep.tasks import machine

__all__ = ["front_pictures", "verdict"]

CASES = {  # case of cpu.json -> its name in the picture
    "resnet18": "ResNet-18",
    "gpt256": "GPT, 8 × 256 tokens",
    "gpt512": "GPT, one sequence",
    "mlp21m": "MLP, 21M parameters",
}
ROWS = {"fp32": "fp32", AMP: "torch.amp", "mixed": "halfstep, mixed", "pure": "halfstep, pure"}
TIMED = (AMP, "mixed", "pure")
COLOURS = {"fp32": "grey", AMP: "amber", "mixed": "teal", "pure": "blue", "lean": "violet"}
STYLE = """
    svg { --paper: #ffffff; --ink: #1c2430; --soft: #55606e; --rim: #d5dbe3; --grey: #9aa4b1; --amber: #d9a036;
      --teal: #2a9d8f; --blue: #2f6fde; --violet: #8257d8; }
    @media (prefers-color-scheme: dark) { svg { --paper: #151b24; --ink: #e8edf4; --soft: #a3aebc; --rim: #333d4b;
      --grey: #6b7685; --amber: #e0ae4f; --teal: #3bb6a7; --blue: #5f95f2; --violet: #a283ea; } }
    text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
    .title { font-size: 15px; font-weight: 600; } .soft { fill: var(--soft); } .number { font-size: 12px; }
    .grey { fill: var(--grey); } .amber { fill: var(--amber); } .teal { fill: var(--teal); }
    .blue { fill: var(--blue); } .violet { fill: var(--violet); }"""
WIDTH, LEFT, RIGHT = 560, 170, 64  # px of a picture, of the names left of its bars, and of the numbers right of them
BAR, GAP, GROUP = 13, 3, 12  # px: height of a bar, space below it, space below a group
TERMINAL = 11  # px of the terminal's font; a character of a monospaced font is 0.6 of it wide
COLUMNS = 96


PLANNED = {"fp32": "fp32", "torch": "torch.amp", "mixed": "halfstep, mixed", "lean": "halfstep, lean"}
"""Preset in plan.json -> its name in the picture; `torch` has the lists and the bytes of torch.amp."""
PARTS = {  # part of hs.plan -> its colour, from the bytes that stay between steps to those of a moment
    "parameters": "blue",
    "optimizer state": "violet",
    "low copies": "teal",
    "saved for backward": "amber",
    "temporaries": "grey",
}


def front_pictures(
    bench: Mapping[str, Any], lean: Mapping[str, Any], plan: Mapping[str, Any], shown: Mapping[str, Any]
) -> dict[str, str]:
    """Return the README's pictures as SVG by file name."""
    return {
        "front_numbers.svg": numbers(bench, lean),
        "front_bytes.svg": peak(plan),
        "front_verdict.svg": terminal(shown["lines"]),
    }


def verdict() -> list[str]:
    """Run examples/why_nan.py and return the lines that it prints."""
    from examples import why_nan

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        why_nan.main()
    return printed.getvalue().splitlines()


def numbers(bench: Mapping[str, Any], lean: Mapping[str, Any]) -> str:
    """Draw the time of a step with fp32 as 1, bytes saved for backward, and bytes a parameter."""
    parts: list[str] = []
    y = 30
    parts.append(_text(20, y, "Time of a training step, fp32 = 1 (shorter is better)", "title"))
    y += 12
    for case, title in CASES.items():
        rows = bench["cases"][case]["rows"]
        times = {"fp32": 1.0, **{name: rows[name]["to_fp32"]["median"] for name in TIMED}}
        y = _group(parts, y, title, [(name, value, f"{value:.2f}") for name, value in times.items()], 1.0)
    y += 26
    parts.append(_text(20, y, "Bytes (shorter is better)", "title"))
    y += 12
    rows = bench["cases"]["gpt256"]["rows"]
    saved = {name: rows[name]["counts"]["saved_bytes"] / 1e6 for name in ROWS}
    bars = [(name, value, f"{value:.0f} MB") for name, value in saved.items()]
    y = _group(parts, y, "saved for backward,|GPT, 8 × 256 tokens", bars, max(saved.values()))
    found = {row["label"]: row["bytes"] for row in lean["programs"]["gpt"]["rows"]}
    state = {"fp32": found["fp32"], AMP: found["torch.amp"], "lean": found["lean"]}
    bars = [(name, value, f"{value:.0f} B") for name, value in state.items()]
    y = _group(parts, y, "weights and AdamW|states, a parameter", bars, max(state.values()))
    y += 8
    x = 20.0
    for name, title in {**ROWS, "lean": "halfstep, lean"}.items():
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" rx="2" class="{COLOURS[name]}"/>')
        parts.append(_text(x + 15, y + 10, title, "number"))
        x += 28 + 6.6 * len(title)
    about = bench["machine"]
    y += 34
    where = f"bf16; {about['cores']} CPU cores with bf16 units ({about['cpu']}), torch {about['torch'].split('+')[0]}; "
    parts.append(_text(20, y, f"{where}not measured on a GPU", "soft number"))
    words = "; ".join(f"{title} {text}" for title, text in _words(bench, lean))
    return _svg(WIDTH, y + 18, f"Time of a training step with fp32 as 1, and bytes: {words}", parts)


def peak(plan: Mapping[str, Any]) -> str:
    """Draw what the bytes of a GPT's step are at their most, as `hs.plan` counts them."""
    rows = {title: plan["cases"]["gpt-5m"][preset] for preset, title in PLANNED.items()}
    most = max(row["planned_peak"] for row in rows.values())
    parts = [_text(20, 30, "Bytes of a training step at its peak (shorter is better)", "title")]
    words, y = [], 48
    for title, row in rows.items():
        x = float(LEFT)
        parts.append(_text(LEFT - 10, y + 16, title, "right"))
        for part, colour in PARTS.items():
            length = (WIDTH - LEFT - RIGHT) * row["parts"].get(part, 0) / most
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="22" class="{colour}"/>')
            x += length
        total = f"{row['planned_peak'] / 1e6:.0f} MB"
        parts.append(_text(x + 6, y + 16, total, "number"))
        kinds = ", ".join(f"{part} {row['parts'][part] / 1e6:.0f}" for part in PARTS if part in row["parts"])
        words.append(f"{title} {total} ({kinds})")
        y += 30
    x = 20.0
    for part, colour in PARTS.items():
        parts.append(f'<rect x="{x:.0f}" y="{y + 6}" width="11" height="11" rx="2" class="{colour}"/>')
        parts.append(_text(x + 15, y + 16, part, "number"))
        x += 26 + 6.2 * len(part)
    for line in ("A GPT of 5.3M parameters with AdamW, 4 × 128 tokens, in bf16 (fp32 aside),",
                 "counted by hs.plan. torch.amp: the preset torch, which has its operator lists"):  # fmt: skip
        parts.append(_text(20, y + 42, line, "soft number"))
        y += 18
    return _svg(WIDTH, y + 42, f"Bytes of a training step at its peak: {'; '.join(words)}", parts)


def _words(bench: Mapping[str, Any], lean: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for case, title in CASES.items():
        rows = bench["cases"][case]["rows"]
        yield title, ", ".join(f"{ROWS[name]} {rows[name]['to_fp32']['median']:.2f}" for name in TIMED)
    rows = bench["cases"]["gpt256"]["rows"]
    saved = ", ".join(f"{title} {rows[name]['counts']['saved_bytes'] / 1e6:.0f}" for name, title in ROWS.items())
    yield "MB saved for backward", saved
    found = {row["label"]: row["bytes"] for row in lean["programs"]["gpt"]["rows"]}
    yield (
        "bytes a parameter for weights and AdamW states",
        f"torch.amp {found['torch.amp']:.0f}, lean {found['lean']:.0f}",
    )


def _group(parts: list[str], y: int, title: str, bars: Sequence[tuple[str, float, str]], most: float) -> int:
    """Append one model's bars below `y`; return the y below them."""
    y += 6
    height = len(bars) * (BAR + GAP) - GAP
    lines = title.split("|")
    for number, line in enumerate(lines):
        parts.append(_text(LEFT - 10, y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2), line, "right"))
    for name, value, text in bars:
        length = (WIDTH - LEFT - RIGHT) * value / most
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" class="{COLOURS[name]}"/>'
            f"{_text(LEFT + length + 6, y + BAR - 2.5, text, 'number')}"
        )
        y += BAR + GAP
    return y - GAP + GROUP


def terminal(lines: Sequence[str]) -> str:
    """Draw what a terminal shows: the lines of a verdict, with a mark for the cures left out."""
    start = next(index for index, line in enumerate(lines) if line.startswith("  cause"))
    cures = [index for index, line in enumerate(lines) if line.startswith("  cure")]
    end = next(index for index, line in enumerate(lines) if line.startswith("  do"))
    kept = [lines[0], *lines[start : cures[0] + 2], f"  ...       ({len(cures) - 1} more cures)", *lines[end:-1]]
    shown = [">>> print(step.explain())", *(part for line in kept for part in _wrapped(line))]
    height, x = 17, 20
    width = COLUMNS * TERMINAL * 0.6 + 2 * x
    parts = [
        f'<rect width="{width:.0f}" height="{len(shown) * height + 34}" rx="8" fill="#10151d"/>',
    ]
    for number, line in enumerate(shown):
        colour = "#7fd1c6" if number == 0 else "#f2b8b5" if "not finite" in line else "#e3e9f1"
        colour = "#a5d6a7" if "verified:" in line else colour
        style = f"font: {TERMINAL}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: {colour}"
        body = escape(line[:COLUMNS])
        parts.append(f'<text x="{x}" y="{28 + number * height}" xml:space="preserve" style="{style}">{body}</text>')
    return _svg(width, len(shown) * height + 34, "\n".join(shown), parts)


def _wrapped(line: str) -> list[str]:
    """Break a line where a terminal of `COLUMNS` columns does."""
    return [line[at : at + COLUMNS] for at in range(0, len(line), COLUMNS)]


def _text(x: float, y: float, text: str, kind: str) -> str:
    anchor = ' text-anchor="end"' if kind == "right" else ""
    return f'<text x="{x:.0f}" y="{y:.1f}" class="{kind}"{anchor}>{escape(text)}</text>'


def _svg(width: float, height: float, words: str, parts: Sequence[str]) -> str:
    body = "\n  ".join(parts)
    frame = f'x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8"'
    paper = f'<rect {frame} fill="var(--paper)" stroke="var(--rim)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">\n  <title>{escape(words)}</title>\n  <style>{STYLE}\n  </style>\n'
        f"  {paper}\n  {body}\n</svg>\n"
    )


def main() -> int:
    """Run the example and write what it prints."""
    parser = argparse.ArgumentParser(description="Keep the verdict of examples/why_nan.py.")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    report = {"command": "python examples/why_nan.py", "commit": commit(), "machine": machine(), "lines": verdict()}
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
