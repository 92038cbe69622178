"""Write the tables and pictures of README and docs from the committed JSON files; `make tables`.

    python benchmarks/tables.py [--check]

Numbers in documents are never typed: this script puts them between the markers ``<!-- name -->`` and ``<!-- end -->``,
and draws docs/pictures/. A test runs it with --check, which compares a picture by the data it states it was drawn from:
another matplotlib draws other lines.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from halfstep.report import Bar, BarChart, Key, picture_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LABELS = {"lenet5": "LeNet-5", "gpt": "GPT", "resnet": "ResNet", "mlp21m": "MLP, 21M parameters"}
HUES = {"torch": 1, "O1": 2, "mixed": 3, "O2": 4, "pure": 5}  # a policy looks the same in every picture


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return data


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(data: dict[str, Any]) -> str:
    machine = data["machine"]
    units = ", ".join(machine["instruction_sets"])
    return (
        f"`{data['command']}` on {machine['cpu']}, {machine['cores']} cores ({units}), "
        f"torch {machine['torch']}, Python {machine['python']}."
    )


def ratio(row: dict[str, Any]) -> str:
    return f"{row['median']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def timings(bench: dict[str, Any]) -> str:
    rows = []
    for key, data in bench.items():
        case = LABELS.get(key.rpartition("_")[0])
        if case is None or "rows" not in data:
            continue
        for name, row in data["rows"].items():
            if name != data["baseline"]:
                what = "the baseline again (A/A)" if name == "A/A" else f"`{name}`"
                rows.append([case, data["baseline"], what, f"{row['ms']:.2f}", ratio(row), str(row["rounds"])])
    return table(["model", "baseline", "candidate", "ms a step", "time / baseline", "rounds"], rows)


def entry(bench: dict[str, Any]) -> str:
    rows = [[f"`{name}`", f"{row['ms']:.2f}", ratio(row)] for name, row in bench["region_entry"]["rows"].items()]
    return table(["region", "us to make, enter and leave", "time / torch.autocast"], rows)


def norms(bench: dict[str, Any]) -> str:
    rows = [[name, f"{1e3 * row['ms']:.0f}", ratio(row)] for name, row in bench["norms"]["rows"].items()]
    return table(["layer_norm of 2048 x 256, forward and backward", "us", "ratio"], rows)


def native(bench: dict[str, Any]) -> str:
    data = bench["gpt_fp16_native"]
    rows = [[f"`{name}`", f"{times:.1f}"] for name, times in data["times as long as"].items()]
    head = f"torch.amp in fp16: {data['torch.amp fp16 ms']:.0f} ms a step; times as long as"
    return table([head, "times"], rows)


def summary(bench: dict[str, Any]) -> str:
    def row(what: str, key: str, name: str) -> list[str]:
        return [what, ratio(bench[key]["rows"][name])]

    native_times = bench["gpt_fp16_native"]["times as long as"]["mixed:fp16"]
    rows = [
        row("enter and leave a region: `hs.autocast` / `torch.autocast`", "region_entry", "hs.autocast"),
        row("step of LeNet-5, `torch` / torch.amp bf16", "lenet5_bf16", "torch:bf16"),
        row("step of LeNet-5, `mixed` / torch.amp bf16", "lenet5_bf16", "mixed:bf16"),
        row("step of a GPT (5.3M), `mixed` / torch.amp bf16", "gpt_bf16", "mixed:bf16"),
        row("step of an MLP (21M), `O2` / torch.amp bf16", "mlp21m_bf16", "O2:bf16"),
        row("step of the GPT in emulated fp16, `mixed` / fp32", "gpt_fp16", "mixed:fp16"),
        ["step of the GPT in fp16, torch.amp / `mixed` emulated", f"{native_times:.1f}"],
        [
            "bytes saved for backward, `mixed` / torch.amp bf16",
            f"{bench['saved_for_backward']['mixed']['ratio']:.3f}",
        ],
    ]
    return table(["two CPU cores with bf16 units", "ratio (90 % interval)"], rows)


def memory(bench: dict[str, Any]) -> str:
    rows = [
        [f"`{name}`", f"{row['bytes'] / 1e6:.1f}", f"{row['ratio']:.3f}"]
        for name, row in bench["saved_for_backward"].items()
    ]
    return table(["GPT, 8 x 256 tokens", "saved for backward, MB", "of torch.amp bf16"], rows)


def per_parameter(bench: dict[str, Any]) -> str:
    data = bench["bytes_per_parameter"]["rows"]
    rows = [[f"`{name}`", f"{row['between steps']:.1f}", f"{row['peak']:.1f}"] for name, row in data.items()]
    return table(["MLP, AdamW", "bytes a parameter between steps", "peak in a step"], rows)


def casts(bench: dict[str, Any]) -> str:
    rows = [[f"`{n}`", str(row["casts"]), f"{row['MB']:.1f}"] for n, row in bench["casts_per_step"].items()]
    return table(["GPT, 8 x 128 tokens", "casts a step", "MB read and written by them"], rows)


def metrics(task: dict[str, Any]) -> str:
    rows = []
    for row in task["rows"]:
        values = row["metrics"]
        difference = row["difference"]
        own = row["label"] == "fp32"
        interval = "" if own else f"{difference['mean']:+.4g} [{difference['low']:+.4g}, {difference['high']:+.4g}]"
        rows.append(
            [
                row["label"],
                f"{sum(values) / len(values):.4g}",
                interval,
                "" if own else difference["verdict"],
                f"{row['state_bytes'] / 1e6:.2f}",
                f"{row['saved_bytes'] / 1e6:.2f}",
                f"{sum(row['skipped']) / len(values):.1f}",
                f"{row['scale'][0]:g}",
            ]
        )
    head = [
        "policy",
        task["metric"],
        "minus fp32, 90 % interval",
        "verdict",
        "parameters + state, MB",
        "saved for backward, MB",
        "skipped steps a run",
        "final scale",
    ]
    about = f"{task['about']}. {task['steps']} steps, {len(task['seeds'])} seeds, margin {task['margin']:.4g}."
    return about + "\n\n" + table(head, rows)


def blocks() -> dict[str, str]:
    bench, full, digits = load("cpu.json"), load("compare.json"), load("compare_resnet.json")
    tasks = {t["task"]: t for report in (full, digits) for t in report["tasks"]}
    return {
        "source bench": source(bench),
        "source compare": source(full),
        "source compare resnet": source(digits),
        "summary": summary(bench),
        "entry": entry(bench),
        "timings": timings(bench),
        "norms": norms(bench),
        "native": native(bench),
        "memory": memory(bench),
        "per parameter": per_parameter(bench),
        "casts": casts(bench),
        **{f"metric {name}": metrics(task) for name, task in tasks.items()},
    }


def speed_picture(bench: dict[str, Any]) -> BarChart:
    """Steps in bf16 beside torch.amp."""
    bars, bands = [], []
    for key, model in LABELS.items():
        rows = bench[f"{key}_bf16"]["rows"]
        bands.append(rows["A/A"])
        for label, row in rows.items():
            policy = label.removesuffix(":bf16")
            if policy in HUES:
                bars.append(
                    Bar(
                        label=f"{model}, {policy}",
                        text=f"{row['median']:.3f}",
                        value=row["median"],
                        low=row["low"],
                        high=row["high"],
                        key=Key(colour=HUES[policy]),
                    )
                )
    band = (min(row["low"] for row in bands), max(row["high"] for row in bands))
    return BarChart(x_label="time of a step / torch.amp bf16", bars=tuple(bars), line=1.0, band=band)


def bytes_picture(bench: dict[str, Any]) -> BarChart:
    """What is kept for backward beside torch.amp."""
    bars = tuple(
        Bar(
            label=name,
            text=f"{row['bytes'] / 1e6:.1f} MB, {row['ratio']:.3f}",
            value=row["ratio"],
            key=Key(colour=HUES.get(name, 0)),
        )
        for name, row in bench["saved_for_backward"].items()
    )
    return BarChart(x_label="bytes saved for backward / torch.amp bf16 (GPT)", bars=bars, line=1.0)


def pictures() -> dict[str, tuple[BarChart, str]]:
    """Return the pictures of docs/pictures/ by file name, with what they say in words."""
    bench = load("cpu.json")

    def words(chart: BarChart) -> str:
        return f"{chart.x_label}: " + "; ".join(f"{bar.label} {bar.text}" for bar in chart.bars)

    charts = {"speed.svg": speed_picture(bench), "saved.svg": bytes_picture(bench)}
    return {name: (chart, words(chart)) for name, chart in charts.items()}


def fill(text: str, made: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- {name} -->\n{made[name]}\n<!-- end -->"

    return re.sub(r"<!-- ([\w ]+) -->\n.*?<!-- end -->", put, text, flags=re.DOTALL)


def main() -> int:
    made, stale = blocks(), []
    for path in (ROOT / "README.md", ROOT / "docs" / "performance.md"):
        text = path.read_text(encoding="utf-8")
        new = fill(text, made)
        if new != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    for name, (chart, words) in pictures().items():
        path = ROOT / "docs" / "pictures" / name
        if not path.exists() or f"<title>{html.escape(words)}</title>" not in path.read_text(encoding="utf-8"):
            stale.append(path.name)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(picture_file(chart, words), encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"not what the JSON files say: {', '.join(stale)}; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
