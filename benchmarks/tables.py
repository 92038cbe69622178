"""Write docs/performance.md and the README's table from the committed JSON files; `make tables`.

    python benchmarks/tables.py [--check]

Numbers in documents are never typed: this script puts them between the markers ``<!-- name -->`` and ``<!-- end -->``,
and a test runs it with --check.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LABELS = {"lenet5": "LeNet-5", "gpt": "GPT", "mlp21m": "MLP, 21M parameters"}


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
        if not isinstance(data, dict) or "rows" not in data or key in {"region_entry", "norms"}:
            continue
        case = LABELS[key.rpartition("_")[0]]
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
        "casts": casts(bench),
        **{f"metric {name}": metrics(task) for name, task in tasks.items()},
    }


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
    if stale and "--check" in sys.argv:
        print(f"not what the JSON files say: {', '.join(stale)}; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
