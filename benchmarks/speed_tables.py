"""Tables of docs/tables/: what a step takes, from the JSON of `benchmarks.run`."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import AMP
from benchmarks.markdown import ratio, table
from benchmarks.reports import bf16_cases, row
from benchmarks.stamp import told

BESIDE = (
    "accelerate",
    "Lightning Fabric",
    "torch",
    "torch.amp in an empty function mode",
)  # in one table, by their time
COMPILED = " compiled"  # how the labels of compiled candidates end
SHOWN = (AMP, "mixed", "pure")  # candidates of the tables of stages and of page faults; the JSON files hold all


def source(data: dict[str, Any], *commits: str, more: str = "") -> str:
    """Return the command, the machine, `more`, and the commits measured: those given, or the one of the report."""
    if not data:
        return ""
    machine = data["machine"]
    units = ", ".join(machine["instruction_sets"])
    return (
        f"`{data['command']}` on {machine['cpu']}, {machine['cores']} cores ({units}), "
        f"torch {machine['torch']}, Python {machine['python']}.{more} {told(*(commits or [data.get('commit', '')]))}"
    )


def bench_source(data: dict[str, Any]) -> str:
    """Return the command, the machine, the versions of the peers, and what was not a measurement."""
    machine = data["machine"]
    peers = ", ".join(f"{name} {version}" for name, version in data["peers"].items())
    more = (
        f" {machine['torch_threads']} threads; a copy moves {machine['copy_bytes_per_second'] / 1e9:.1f} GB/s. "
        f"Peers: {peers}. {data['seconds'] / 60:.1f} minutes in all."
    )
    text = source(data, *(case["commit"] for case in data["cases"].values()), more=more)
    quick = [case["title"] for case in data["cases"].values() if case["quick"]]
    if quick:
        text += f"\n\n**Few rounds (`--quick`), which show that a case runs and measure nothing: {', '.join(quick)}.**"
    return text


def case_table(case: dict[str, Any], *, compiled: bool = False) -> str:
    """Return the times of one case: its candidates below each other, the absent ones with the reason.

    Args:
        case: of the JSON.
        compiled: show the compiled candidates and their eager twins, not the eager ones alone.
    """
    rows, half = [], case["dtype"] == "fp16"  # where torch.amp's own kernels are slow, fp32 is the yardstick
    shown = [label for label in case["rows"] if not label.endswith(COMPILED)]
    if compiled:
        shown = [label for label in case["rows"] if label.removesuffix(COMPILED) + COMPILED in case["rows"]]
    for label, data in case["rows"].items():
        if label in BESIDE or label not in shown:
            continue
        curve = data["curve"]
        verdict = "-" if curve is None else f"{curve['of_spread']:.2f}" + ("" if curve["within"] else ", outside")
        cells = [f"`{label}`", f"{data['ms']:.2f}", ratio(data.get("to_amp"))]
        cells += [ratio(data.get("to_fp32"))] if half else []
        cells += [f"{data['beyond_us']:.0f}"] if "beyond_us" in data else ["-"] if not half else []
        rows.append([*cells, verdict])
    head = ["candidate", "ms a step", "/ torch.amp", *(["/ fp32"] if half else ["beyond low passes, us"])]
    text = (
        f"{case['about']}; {case['dtype']}. {case['rounds']} rounds; A/A ({case['baseline']}) "
        f"{ratio(case['control'])}.\n\n{table([*head, 'curve / spread'], rows)}"
    )
    if case["absent"]:
        reasons = "; ".join(f"`{label}`: {reason}" for label, reason in case["absent"].items())
        text += f"\n\nAbsent: {reasons}."
    return text


def title(case: dict[str, Any]) -> str:
    return f"{case['title']}{', fp16' if case['dtype'] == 'fp16' else ''}"


def cases(bench: dict[str, Any]) -> str:
    """Return every case under its heading."""
    return "\n\n".join(f"### {title(case)}\n{case_table(case)}" for case in bench["cases"].values())


def compiled(bench: dict[str, Any]) -> str:
    """Return the cases with compiled candidates, each beside its eager twin."""
    found = [case for case in bench["cases"].values() if any(label.endswith(COMPILED) for label in case["rows"])]
    return "\n\n".join(f"### {title(case)}\n{case_table(case, compiled=True)}" for case in found)


def beside(bench: dict[str, Any]) -> str:
    """Return the times of candidates that do what torch.amp does: a row for each model."""
    rows = [
        [case["title"], *(ratio(case["rows"].get(label, {}).get("to_amp")) for label in BESIDE)]
        for case in bf16_cases(bench).values()
        if any(label in case["rows"] for label in BESIDE)
    ]
    return table(["model, time / torch.amp", *(f"`{label}`" for label in BESIDE)], rows)


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


def entry(bench: dict[str, Any]) -> str:
    found = bench["micro"]["region_entry"]["rows"]
    rows = [[f"`{name}`", f"{data['ms']:.2f}", ratio(data)] for name, data in found.items()]
    return table(["region", "us to make, enter and leave", "time / torch.autocast"], rows)


def norms(bench: dict[str, Any]) -> str:
    found = bench["micro"]["norms"]["rows"]
    rows = [[name, f"{1e3 * data['ms']:.0f}", ratio(data)] for name, data in found.items()]
    return table(["layer_norm of 2048 x 256, forward and backward", "us", "ratio"], rows)


def gpu(report: dict[str, Any]) -> str:
    """Return what was measured on a GPU."""
    if not report:
        return "Nothing so far: no number of halfstep is from a GPU."
    return f"{bench_source(report)}\n\n{cases(report)}"
