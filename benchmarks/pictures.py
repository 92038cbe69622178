"""Pictures of docs/pictures/, from the committed measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import AMP
from benchmarks.reports import bf16_cases, row
from halfstep.report import Bar, BarChart, Key

HUES = {"torch": 1, "mixed": 3, "O2": 4, "pure": 5}  # a policy looks the same in every picture
SPEED = ("mixed", "pure", "pure compiled")


def speed(bench: dict[str, Any]) -> BarChart:
    """Steps in bf16 beside torch.amp."""
    bars, bands = [], []
    for case in bf16_cases(bench).values():
        bands.append(case["control"])
        for label in SPEED:
            found = case["rows"].get(label)
            if found is None:
                continue
            ratio = found["to_amp"]
            preset, _, compiled = label.partition(" ")
            bars.append(
                Bar(
                    label=f"{case['title']}, {label}",
                    text=f"{ratio['median']:.3f}",
                    value=ratio["median"],
                    low=ratio["low"],
                    high=ratio["high"],
                    key=Key(colour=HUES[preset], light=bool(compiled)),
                )
            )
    band = (min(row["low"] for row in bands), max(row["high"] for row in bands))
    return BarChart(x_label="time of a step / torch.amp bf16", bars=tuple(bars), line=1.0, band=band)


def saved(bench: dict[str, Any]) -> BarChart:
    """What is kept for backward beside torch.amp."""
    amp = row(bench, "gpt256", AMP)
    assert amp is not None
    whole, bars = amp["counts"]["saved_bytes"], []
    for label, found in bench["cases"]["gpt256"]["rows"].items():
        if found["counts"] is None or found["counts"]["saved_bytes"] is None:
            continue
        kept = found["counts"]["saved_bytes"]
        preset, comma, _ = label.partition(",")
        key = Key(colour=HUES.get(preset, 0), light=bool(comma))
        bars.append(Bar(label=label, text=f"{kept / 1e6:.1f} MB, {kept / whole:.3f}", value=kept / whole, key=key))
    return BarChart(x_label="bytes saved for backward / torch.amp bf16 (GPT)", bars=tuple(bars), line=1.0)


def pictures(bench: dict[str, Any]) -> dict[str, tuple[BarChart, str]]:
    """Return the pictures by file name, with what they say in words."""

    def words(chart: BarChart) -> str:
        return f"{chart.x_label}: " + "; ".join(f"{bar.label} {bar.text}" for bar in chart.bars)

    charts = {"speed.svg": speed(bench), "saved.svg": saved(bench)}
    return {name: (chart, words(chart)) for name, chart in charts.items()}
