"""Tables of benchmarks/results/lean.json: what is lost with nothing kept behind bf16 weights."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import told

TITLES = {"gpt": "GPT", "resnet": "ResNet"}


def lean_blocks(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the two programs that train and of the two that tune."""
    if not report:
        return dict.fromkeys(("lean source", "lean training", "lean tuning"), "Not measured here.")
    programs = report["programs"]
    return {
        "lean source": source(report),
        "lean training": training({name: p for name, p in programs.items() if name in TITLES}),
        "lean tuning": tuning({name: p for name, p in programs.items() if name not in TITLES}),
    }


def source(report: dict[str, Any]) -> str:
    machine = report["machine"]
    units = ", ".join(machine["instruction_sets"])
    return (
        f"`{report['command']}` on {machine['cpu']} ({units}), one thread, torch {machine['torch']}, "
        f"Python {machine['python']}, torchao {report['torchao']}. {told(report['commit'])}"
    )


def training(programs: dict[str, Any]) -> str:
    rows = [
        [TITLES[name], label(row), f"{row['bytes']:.1f}", f"{statistics.fmean(row['metrics']):.4g}", *against(row)]
        for name, found in programs.items()
        for row in found["rows"]
    ]
    about = "\n".join(
        f"- {TITLES[name]}: {found['about']}; {found['steps']:,} steps, {seeds(found)} seeds; {found['metric']}; "
        f"margin {found['margin']:.3g}."
        for name, found in programs.items()
    )
    head = ["task", "candidate", "bytes a parameter", "result", "minus fp32, 90 % interval", "verdict"]
    return f"{about}\n\n{table(head, rows)}"


def tuning(programs: dict[str, Any]) -> str:
    about, rows = [], []
    for name, found in programs.items():
        rate = name.removeprefix("tune ")
        fp32 = statistics.fmean(found["rows"][0]["metrics"])
        about.append(
            f"- {rate}: {found['about']}; {found['steps']:,} steps, {seeds(found)} seeds. The loss fell from "
            f"{found['before']:.4f} to {fp32:.4f} nats under fp32, whose seeds differ by {found['spread']:.1g} "
            f"(standard deviation); margin {found['margin']:.2g}, a tenth of the fall. fp32's ends on other batches "
            f"are {found['between']:.2f} of its way apart; rounded to bf16, an end moves by {found['rounded']:.2f}."
        )
        rows += [
            [
                rate,
                label(row),
                f"{statistics.fmean(row['metrics']):.4f}",
                *against(row),
                f"{statistics.fmean(row['along']):.3f}",
                f"{statistics.fmean(row['distance']):.2f}",
            ]
            for row in found["rows"]
        ]
    head = ["learning rate", "candidate", "loss", "minus fp32, 90 % interval", "verdict", "along", "distance"]
    return "\n".join(about) + f"\n\n{table(head, rows)}"


def seeds(found: dict[str, Any]) -> int:
    return len(found["rows"][0]["metrics"])


def label(row: dict[str, Any]) -> str:
    return f"{row['label']} ({len(row['metrics'])} seed)" if len(row["metrics"]) == 1 else f"`{row['label']}`"


def against(row: dict[str, Any]) -> list[str]:
    """Return the difference from fp32 and its verdict, empty for fp32 itself."""
    found = row["difference"]
    if row["label"] == "fp32":
        return ["", ""]
    if found["low"] is None:
        return [f"{found['mean']:+.2g}", "one seed"]
    return [f"{found['mean']:+.2g} [{found['low']:+.2g}, {found['high']:+.2g}]", found["verdict"]]
