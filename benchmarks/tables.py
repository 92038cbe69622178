"""Write the tables and pictures of README and docs from the committed JSON files; `make tables`.

    python -m benchmarks.tables [--check]

Numbers in documents are never typed: this script puts them between the markers ``<!-- name -->`` and ``<!-- end -->``,
and draws docs/pictures/. A test runs it with --check, which compares a picture by the data it states it was drawn from:
another matplotlib draws other lines.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.advice_tables import plan_table, tune_table
from benchmarks.auto import auto_table
from benchmarks.cases import AMP
from benchmarks.engine_tables import engine_blocks
from benchmarks.goals import MIB, Goal, goals, instrument_goals
from benchmarks.kills_tables import kills_table
from benchmarks.lens_tables import lens_blocks
from benchmarks.lint_tables import lint_blocks
from benchmarks.losses import losses_table
from benchmarks.markdown import fill, megabytes, ratio, table, whole
from benchmarks.matrix import matrix_table
from benchmarks.pictures import pictures
from benchmarks.reports import Reports, bf16_cases, committed, load, row
from benchmarks.scale_tables import scale_blocks
from benchmarks.serving import serving_table
from benchmarks.soak import soak_table
from benchmarks.stories_tables import story_blocks
from benchmarks.wheel import wheel_table
from benchmarks.zoo_tables import zoo_table
from halfstep.report import picture_file

ROOT = Path(__file__).resolve().parent.parent
PAGES = (  # of docs, beside the README
    "auto",
    "checkpoints",
    "diagnosis",
    "engines",
    "install",
    "integrations",
    "lint",
    "performance",
    "plan",
    "reliability",
    "scale",
    "serving",
    "tune",
)
BESIDE = (
    "accelerate",
    "Lightning Fabric",
    "torch",
    "torch.amp in an empty function mode",
)  # in one table, by their time
SHOWN = (AMP, "mixed", "pure")  # candidates of the tables of stages and of page faults; the JSON files hold all


# ------------------------------------------------------------------ speed


def source(data: dict[str, Any]) -> str:
    machine = data["machine"]
    units = ", ".join(machine["instruction_sets"])
    return (
        f"`{data['command']}` on {machine['cpu']}, {machine['cores']} cores ({units}), "
        f"torch {machine['torch']}, Python {machine['python']}."
    )


def bench_source(data: dict[str, Any]) -> str:
    """Return the command, the machine, the versions of the peers, and what was not a measurement."""
    machine = data["machine"]
    peers = ", ".join(f"{name} {version}" for name, version in data["peers"].items())
    commits = sorted({case["commit"] for case in data["cases"].values()})
    text = (
        f"{source(data)} {machine['torch_threads']} threads; a copy moves "
        f"{machine['copy_bytes_per_second'] / 1e9:.1f} GB/s. Peers: {peers}. Commit {', '.join(commits)}; "
        f"{data['seconds'] / 60:.1f} minutes in all."
    )
    quick = [case["title"] for case in data["cases"].values() if case["quick"]]
    if quick:
        text += f"\n\n**Few rounds (`--quick`), which show that a case runs and measure nothing: {', '.join(quick)}.**"
    return text


def lens_source(data: dict[str, Any]) -> str:
    """Return the command and the machine of the measurements of instruments."""
    if not data:
        return "Not measured here."
    parts = [*data["cases"].values(), *([data["faults"]] if data["faults"] else [])]
    commits = sorted({part["commit"] for part in parts})
    text = f"{source(data)} {data['machine']['torch_threads']} threads. Commit {', '.join(commits)}."
    if any(part["quick"] for part in parts):
        text += "\n\n**Few rounds (`--quick`), which show that it runs and measure nothing.**"
    return text


def case_table(case: dict[str, Any]) -> str:
    """Return one case: its candidates below each other, the absent ones with the reason."""
    rows, half = [], case["dtype"] == "fp16"  # where torch.amp's own kernels are slow, fp32 is the yardstick
    for label, data in case["rows"].items():
        if label in BESIDE:
            continue
        counts, curve = data["counts"] or {}, data["curve"]
        casts = counts.get("casts")
        verdict = "-" if curve is None else f"{curve['of_spread']:.2f}" + ("" if curve["within"] else ", outside")
        rows.append(
            [
                f"`{label}`",
                f"{data['ms']:.2f}",
                ratio(data.get("to_amp")),
                *([ratio(data.get("to_fp32"))] if half else []),
                megabytes(counts.get("saved_bytes")),
                megabytes(counts.get("state_bytes")),
                megabytes(counts.get("peak_bytes")),
                "-" if casts is None else f"{casts} / {megabytes(counts['cast_bytes'])}",
                f"{data['beyond_us']:.0f}" if "beyond_us" in data else "-",
                f"{data['faults']:.0f}" if "faults" in data else "-",
                verdict,
            ]
        )
    head = ["candidate", "ms a step", "/ torch.amp", *(["/ fp32"] if half else []), "saved for backward, MB"]
    head += ["state, MB", "peak, MB", "casts / MB", "beyond low passes, us", "faults", "curve / spread"]
    control = case["control"]
    text = (
        f"{case['about']}; {case['dtype']}. {case['rounds']} rounds; A/A ({case['baseline']}) {ratio(control)}."
        f"\n\n{table(head, rows)}"
    )
    if case["absent"]:
        reasons = "; ".join(f"`{label}`: {reason}" for label, reason in case["absent"].items())
        text += f"\n\nAbsent: {reasons}."
    return text


def cases(bench: dict[str, Any]) -> str:
    """Return every case under its heading."""
    parts = []
    for case in bench["cases"].values():
        parts.append(f"### {case['title']}{', fp16' if case['dtype'] == 'fp16' else ''}\n{case_table(case)}")
    return "\n\n".join(parts)


def beside(bench: dict[str, Any]) -> str:
    """Return the times of candidates that do what torch.amp does: a row for each model."""
    rows = [
        [case["title"], *(ratio(case["rows"].get(label, {}).get("to_amp")) for label in BESIDE)]
        for case in bf16_cases(bench).values()
        if any(label in case["rows"] for label in BESIDE)
    ]
    return table(["model, time / torch.amp", *(f"`{label}`" for label in BESIDE)], rows)


def gpu(report: dict[str, Any]) -> str:
    """Return what was measured on a GPU."""
    if not report:
        return "Nothing so far: no number on this page is from a GPU."
    return f"{bench_source(report)}\n\n{cases(report)}"


def entry(bench: dict[str, Any]) -> str:
    found = bench["micro"]["region_entry"]["rows"]
    rows = [[f"`{name}`", f"{data['ms']:.2f}", ratio(data)] for name, data in found.items()]
    return table(["region", "us to make, enter and leave", "time / torch.autocast"], rows)


def faults(report: dict[str, Any]) -> str:
    """Return the page faults of a step and the largest memory of its process, candidate by candidate."""
    if not report:
        return "Not measured here."
    rows = []
    for case in report["cases"].values():
        found = [case["rows"][label] for label in SHOWN]
        together = max(row["together"] for row in found)
        left = [whole(row["alone_left"]) for row in found if "alone_left" in row]
        cells = [*(whole(row["alone"]) for row in found), whole(together), *left, *(whole(row["MiB"]) for row in found)]
        rows.append([case["title"], *cells])
    head = ["faults a step", *(f"`{label}`" for label in SHOWN), f"any among {report['together']}"]
    head += [*(f"`{label}`, malloc as it is" for label in SHOWN[1:]), *(f"`{label}`, MiB at most" for label in SHOWN)]
    return table(head, rows)


def versions(report: dict[str, Any]) -> str:
    """Return the times of steps of one checkout beside those of another."""
    if not report:
        return "Not measured here."
    rows = [[f"`{name}`", ratio(row)] for name, row in report["rows"].items()]
    head = ["step of", f"commit {report['new']} / commit {report['old']}"]
    return f"{source(report)}\n\n{table(head, rows)}"


def norms(bench: dict[str, Any]) -> str:
    found = bench["micro"]["norms"]["rows"]
    rows = [[name, f"{1e3 * data['ms']:.0f}", ratio(data)] for name, data in found.items()]
    return table(["layer_norm of 2048 x 256, forward and backward", "us", "ratio"], rows)


def spread(bench: dict[str, Any]) -> str:
    """Return how much torch.amp's deviation from fp32 differs from start to start."""
    rows = [
        [title, str(len(found)), f"{min(found):.2g} to {max(found):.2g}", f"{max(found) / min(found):.1f}"]
        for title, found in bench["micro"]["spread"].items()
    ]
    return table(["model", "starts", "torch.amp's deviation from fp32, nats", "largest / smallest"], rows)


# ------------------------------------------------------------------ stages and bounds


def stages(bench: dict[str, Any]) -> str:
    """Return the tails of a step: a row for each model."""
    rows = []
    for case in bf16_cases(bench).values():
        found = [case["stages"].get(label) for label in SHOWN]
        times = ["-" if s is None else f"{s['tail_ms'] + s['weight_casts_ms']:.2f}" for s in found]
        rows.append([case["title"], *times, *(ratio(s and s["tail_to_amp"]) for s in found[1:])])
    head = ["tail and weight casts", *(f"`{label}`, ms" for label in SHOWN)]
    return table([*head, *(f"`{label}` / torch.amp" for label in SHOWN[1:])], rows)


def bounds(bench: dict[str, Any]) -> str:
    """Return where the time of `pure` goes beyond the limit."""
    rows = []
    for name, case in bf16_cases(bench).items():
        own, limit = row(bench, name, "pure"), case["limit"]
        parts = case["stages"].get("pure")
        if own is None or parts is None or limit is None:
            continue
        tail = parts["tail_ms"] + parts["weight_casts_ms"]
        rest = parts["forward_ms"] + parts["backward_ms"] - limit["low_ms"]
        rows.append(
            [
                case["title"],
                f"{limit['low_ms']:.2f}",
                f"{limit['tail_ms']:.2f}",
                f"{tail - limit['tail_ms']:+.2f}",
                f"{rest - parts['weight_casts_ms']:+.2f}",
                ratio(own["to_limit"]),
            ]
        )
    head = ["model", "limit: forward and backward, ms", "limit: tail, ms", "`pure`: tail above it, ms"]
    return table([*head, "`pure`: forward and backward above it, ms", "step / limit"], rows)


def counted(counts: dict[str, Any]) -> str:
    """Return what steps do on fake CUDA tensors: every program of every model."""
    if not counts:
        return "Not counted here."
    rows = []
    for model, programs in counts["models"].items():
        for program, data in programs.items():
            if program.startswith("torch:") or program.endswith(":bf16"):  # close to O1 and to fp16; in the JSON
                continue
            s = data["summary"]
            around = s["tail_bytes_per_parameter"] + s["weight_bytes_per_parameter"]
            numbers = [f"{s['cast_bytes'] / MIB:.1f}", f"{s['bytes'] / MIB:.0f}", f"{around:.1f}"]
            rows.append([model, f"`{program}`", str(s["casts"]), *numbers, str(s["launches_tail"]), str(s["syncs"])])
    head = ["model", "program", "casts", "MiB of casts", "MiB in all", "bytes a parameter around the optimizer"]
    text = f"`{counts['command']}`, torch {counts['torch']}: {counts['device']}."
    return f"{text}\n\n{table([*head, 'launches of the tail', 'waits of the host'], rows)}"


# ------------------------------------------------------------------ goals


def goal_row(goal: Goal, reports: Reports) -> list[str]:
    """Return a goal, its bound, what was reached and whether that is enough."""
    found = goal.read(reports)
    bound = f"{'at least' if goal.least else 'at most'} {goal.bound:g}"
    if found is None:
        return [goal.what, bound, "not measured", ""]
    reached = f"{found.value:.3g}" if goal.least or found.value >= 10 else f"{found.value:.3f}"
    if found.low is not None and found.high is not None:
        form = "{:.3g}" if goal.least else "{:.3f}"
        reached += f" [{form.format(found.low)}, {form.format(found.high)}]"
    if found.where:
        reached += f" ({found.where})"
    return [goal.what, bound, reached, "yes" if goal.met(found) else "**no**"]


def goal_table(reports: Reports, listed: Iterable[Goal]) -> str:
    return table(["number", "goal", "reached", ""], [goal_row(goal, reports) for goal in listed])


def summary(bench: dict[str, Any]) -> str:
    """Return the README's excerpt."""

    def step(what: str, case: str, label: str, to: str = "to_amp") -> list[str]:
        found = row(bench, case, label)
        return [what, "-" if found is None else ratio(found.get(to))]

    amp, mixed = row(bench, "gpt256", AMP), row(bench, "gpt256", "mixed")
    assert amp is not None and mixed is not None
    kept = mixed["counts"]["saved_bytes"] / amp["counts"]["saved_bytes"]
    fp16 = row(bench, "gpt256_fp16", "mixed")
    entered = bench["micro"]["region_entry"]["rows"]["hs.autocast"]
    rows = [
        ["enter and leave a region: `hs.autocast` / `torch.autocast`", ratio(entered)],
        step("step of LeNet-5, `mixed` / torch.amp bf16", "lenet5", "mixed"),
        step("step of ResNet-18, `mixed` / torch.amp bf16", "resnet18", "mixed"),
        step("step of a GPT (5.3M), `mixed` / torch.amp bf16", "gpt256", "mixed"),
        step("step of a GPT (16.8M, one sequence), `pure` / torch.amp bf16", "gpt512", "pure"),
        step("step of an MLP (21M), `pure` / torch.amp bf16", "mlp21m", "pure"),
        step("step of the GPT in emulated fp16, `mixed` / fp32", "gpt256_fp16", "mixed", "to_fp32"),
        [
            "step of the GPT in fp16, torch.amp / `mixed` emulated",
            "-" if fp16 is None else f"{1 / fp16['to_amp']['median']:.1f}",
        ],
        ["bytes saved for backward of the GPT, `mixed` / torch.amp bf16", f"{kept:.3f}"],
    ]
    return table(["two CPU cores with bf16 units", "ratio (90 % interval)"], rows)


# ------------------------------------------------------------------ accuracy


def metrics(task: dict[str, Any]) -> str:
    rows = []
    for found in task["rows"]:
        values = found["metrics"]
        difference = found["difference"]
        own = found["label"] == "fp32"
        interval = "" if own else f"{difference['mean']:+.4g} [{difference['low']:+.4g}, {difference['high']:+.4g}]"
        rows.append(
            [
                found["label"],
                f"{sum(values) / len(values):.4g}",
                interval,
                "" if own else difference["verdict"],
                f"{found['state_bytes'] / 1e6:.2f}",
                f"{found['saved_bytes'] / 1e6:.2f}",
                f"{sum(found['skipped']) / len(values):.1f}",
                f"{found['scale'][0]:g}",
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


# ------------------------------------------------------------------ files


def blocks(reports: Reports) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    full, digits = load("compare.json"), load("compare_resnet.json")
    tasks = {t["task"]: t for report in (full, digits) for t in report["tasks"]}
    bench, serving, losses, auto = reports.cpu, load("serving.json"), load("losses.json"), load("auto.json")
    wheel = load("wheel.json")
    return {
        "source bench": bench_source(bench),
        "source compare": source(full),
        "source compare resnet": source(digits),
        "summary": summary(bench),
        "goals": goal_table(reports, goals()),
        "entry": entry(bench),
        "norms": norms(bench),
        "source pages": f"{source(reports.pages)} Commit {reports.pages['commit']}." if reports.pages else "",
        "pages": faults(reports.pages),
        "versions": versions(reports.versions),
        "spread": spread(bench),
        "cases": cases(bench),
        "beside": beside(bench),
        "stages": stages(bench),
        "bounds": bounds(bench),
        "counted": counted(reports.counts),
        "gpu": gpu(reports.gpu),
        "instrument goals": goal_table(reports, instrument_goals()),
        "source lens": lens_source(reports.lens),
        **lens_blocks(reports.lens),
        **lint_blocks(),
        **engine_blocks(load("engines.json")),
        **scale_blocks(*(load(f"{name}.json") for name in ("parity", "ranks", "collectives"))),
        "kills": kills_table(load("kills.json")),
        "matrix": matrix_table(load("matrix.json")),
        "source auto": f"{source(auto)} Commit {auto['commit']}." if auto else "",
        "auto": auto_table(auto),
        "source plan": source(plan) if (plan := load("plan.json")) else "",
        "plan": plan_table(plan),
        "source tune": f"{source(tune)} Commit {tune['commit']}." if (tune := load("tune.json")) else "",
        "tune": tune_table(tune),
        "source serving": f"{source(serving)} Commit {serving['commit']}." if serving else "",
        "serving": serving_table(serving),
        "source losses": f"{source(losses)} Commit {losses['commit']}." if losses else "",
        "losses": losses_table(losses),
        "source wheel": f"{source(wheel)} Commit {wheel['commit']}." if wheel else "",
        "wheel": wheel_table(wheel),
        "soak": soak_table(load("soak.json")),
        **story_blocks(load("stories.json")),
        "zoo": zoo_table(zoo) if (zoo := load("zoo.json")) else "Not measured here.",
        **{f"metric {name}": metrics(task) for name, task in tasks.items()},
    }


def main() -> int:
    reports = committed()
    made, stale = blocks(reports), []
    for path in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES)):
        text = path.read_text(encoding="utf-8")
        new = fill(text, made)
        if new != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    for name, (chart, words) in pictures(reports.cpu).items():
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
