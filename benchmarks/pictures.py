"""Pictures of docs/pictures/, from the committed measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import AMP
from benchmarks.reports import Reports, bf16_cases, load, row
from benchmarks.speed_tables import BESIDE, COMPILED
from halfstep.report import Bar, BarChart, Dot, DotChart, Key

HUES = {"torch": 1, "O1": 2, "mixed": 3, "O2": 4, "pure": 5, "lean": 6}  # a policy looks the same in every picture
TASKS = {"lenet5": "LeNet-5", "resnet": "ResNet", "gpt": "GPT"}


def speed(bench: dict[str, Any], label: str) -> BarChart:
    """Steps of a preset in bf16 beside torch.amp."""
    bars, bands = [], []
    for case in bf16_cases(bench).values():
        bands.append(case["control"])
        ratio = case["rows"][label]["to_amp"]
        bars.append(
            Bar(
                label=case["title"],
                text=f"{ratio['median']:.3f}",
                value=ratio["median"],
                low=ratio["low"],
                high=ratio["high"],
                key=Key(colour=HUES[label]),
            )
        )
    band = (min(row["low"] for row in bands), max(row["high"] for row in bands))
    return BarChart(x_label=f"time of a step, {label} / torch.amp bf16", bars=tuple(bars), line=1.0, band=band)


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


def accuracy(dtype: str) -> DotChart:
    """Results in a format beside fp32's, in units of the margin that each task fixed beforehand."""
    dots = []
    for task in (task for name in ("compare.json", "compare_resnet.json") for task in load(name)["tasks"]):
        worse, margin = -1 if task["metric"].startswith("accuracy") else 1, task["margin"]
        for found in task["rows"]:
            policy, _, low = found["label"].partition(" ")
            if low != dtype:
                continue
            difference = found["difference"]
            ends = sorted(worse * difference[end] / margin for end in ("low", "high"))
            dots.append(
                Dot(
                    label=f"{TASKS[task['task']]}, {policy}",
                    text=difference["verdict"],
                    value=worse * difference["mean"] / margin,
                    low=ends[0],
                    high=ends[1],
                    key=Key(colour=HUES.get(policy, 0)),
                    mark="full" if difference["verdict"] == "within the margin" else "hollow",
                )
            )
    return DotChart(x_label=f"{dtype}: worse than fp32, in margins", dots=tuple(dots), margin=1.0)


def peak(bench: dict[str, Any]) -> BarChart:
    """The most bytes of a step of the MLP beside torch.amp's."""
    amp = row(bench, "mlp21m", AMP)
    assert amp is not None
    whole, bars = amp["counts"]["peak_bytes"], []
    for label, found in bench["cases"]["mlp21m"]["rows"].items():
        if label.endswith(COMPILED) or label in BESIDE:
            continue
        value = found["counts"]["peak_bytes"]
        bars.append(
            Bar(
                label=label,
                text=f"{value / 1e6:.0f} MB, {value / whole:.2f}",
                value=value / whole,
                key=Key(colour=HUES.get(label, 0)),
            )
        )
    return BarChart(x_label="most bytes of a step / torch.amp bf16 (MLP, 21M)", bars=tuple(bars), line=1.0)


def causes() -> BarChart:
    """How often an instrument names the line that a story from a public tracker blames."""
    report = load("stories.json")
    placed = [found for found in report["stories"].values() if "died" not in found and found["truth"]["op"]]
    ours, *others = report["instruments"]
    right = {"halfstep": sum(bool(found["parts"].get("line")) for found in placed)}
    right |= {name: sum(bool(found["peers"][name]["line"]) for found in placed) for name in others}
    bars = tuple(
        Bar(
            label=name,
            text=f"{number} of {len(placed)}",
            value=number / len(placed),
            key=Key(colour=HUES["mixed"] if name == "halfstep" else 0),
        )
        for name, number in right.items()
    )
    return BarChart(x_label="share of stories in which the line is named", bars=bars, line=1.0)


def pictures(reports: Reports) -> dict[str, tuple[BarChart | DotChart, str]]:
    """Return the pictures by file name, with what they show in words."""
    bench = reports.cpu

    def words(chart: BarChart | DotChart) -> str:
        parts = chart.bars if isinstance(chart, BarChart) else chart.dots
        return f"{chart.x_label}: " + "; ".join(f"{part.label} {part.text}" for part in parts)

    charts: dict[str, BarChart | DotChart] = {
        **{f"speed_{label}.svg": speed(bench, label) for label in ("mixed", "pure")},
        "saved.svg": saved(bench),
        "peak.svg": peak(bench),
        **{f"accuracy_{dtype}.svg": accuracy(dtype) for dtype in ("bf16", "fp16")},
        "causes.svg": causes(),
    }
    return {name: (chart, words(chart)) for name, chart in charts.items()}


SHOWN = {
    "pictures speed": ("speed_mixed.svg", "speed_pure.svg"),
    "pictures bytes": ("peak.svg", "saved.svg"),
    "pictures accuracy": ("accuracy_bf16.svg", "accuracy_fp16.svg"),
    "picture causes": ("causes.svg",),
}
"""Marker of docs/performance.md -> the pictures that stand there, beside each other where there is room."""


def picture_blocks(reports: Reports) -> dict[str, str]:
    """Return the pictures of docs/performance.md in Markdown, with alternative texts that state what they show."""
    made = pictures(reports)
    return {
        marker: "\n".join(f"![{made[name][1]}](pictures/{name})" for name in names) for marker, names in SHOWN.items()
    }
