"""Tables of what instruments cost and whom they name, from the JSON of `benchmarks.lens`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import ratio, table
from benchmarks.speed_tables import source

NOTHING = "Not measured here."


def lens_blocks(lens: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    cases = lens.get("cases", {})
    return {
        "instruments": "\n\n".join(steps(case) for case in cases.values() if "turns" in case) or NOTHING,
        "box bytes": bytes_kept(cases) if cases else NOTHING,
        "explain": explanations(cases) if cases else NOTHING,
        "audit cost": audits(cases) if cases else NOTHING,
        "named": named(lens["faults"]) if lens.get("faults") else NOTHING,
    }


def steps(case: dict[str, Any]) -> str:
    """Return steps with and without instruments."""
    turns = case["turns"]
    rows = [
        [label, f"{data['ms']:.2f}", "-" if "to" not in data else f"{ratio(data['ratio'])} {data['to']}"]
        for label, data in turns["rows"].items()
    ]
    rows += [[f"`hs.Monitor(every={every})`, on average", "", ratio(found)] for every, found in turns["every"].items()]
    controls = ", ".join(f"{label} {ratio(found)}" for label, found in turns["controls"].items())
    return f"{case['title']}: {case['about']}; bf16. {turns['rounds']} rounds; A/A: {controls}.\n\n" + table(
        ["step", "ms", "ratio"], rows
    )


def bytes_kept(cases: dict[str, Any]) -> str:
    """Return the bytes that black boxes keep from one step to the next."""
    rows = []
    for case in cases.values():
        held = list(case["turns"]["held_bytes"].values()) if "turns" in case else [None, None]
        cells = ["-" if n is None else f"{n:,}" for n in (held[0], case["explain"]["held_bytes"], held[1])]
        rows.append([case["title"], *cells])
    head = ["model", "`hs.TrainStep`", "`hs.TrainStep` that has had a bad step", "`hs.BlackBox`"]
    return table(head, rows)


def explanations(cases: dict[str, Any]) -> str:
    """Return what it takes to explain a bad step."""
    rows = []
    for case in cases.values():
        data = case["explain"]
        verdict = data["verdict"]
        said = f"{verdict['kind']}, {verdict['phase']} of `{verdict['op']}` in `{verdict['module']}`"
        numbers = [f"{data['ms']:.1f}", ratio(data["diagnosis"]), ratio(data["cures"]), ratio(data["explain"])]
        rows.append([case["title"], *numbers, said, str(len(data["verified"]))])
    head = ["model, fp16", "a step, ms", "replay and diagnosis, steps", "cures, steps", "both, steps"]
    return table([*head, "verdict", "verified cures"], rows)


def audits(cases: dict[str, Any]) -> str:
    """Return what an audit takes."""
    rows = []
    for case in cases.values():
        data = case["audit"]
        numbers = [str(data["steps"]), f"{data['ms']:.1f}", f"{data['audit_ms']:.1f}", ratio(data["ratio"])]
        rows.append([case["title"], *numbers])
    return table(["model, bf16", "steps", "a training step, ms", "an audited step, ms", "ratio"], rows)


def named(faults: dict[str, Any]) -> str:
    """Return how often each instrument is right, of each set of faults."""
    totals = []
    for title in ("first", "second"):
        asked = [row["said"] for row in faults["rows"].values() if row["set"] == title]
        for name in faults["instruments"] if asked else ():
            answers = [said[name] for said in asked]
            right = [sum(said[part] for said in answers) for part in ("op", "module", "line")]
            whole = sum(said["op"] and said["module"] and said["line"] for said in answers)
            silent = sum(not said["words"] for said in answers)
            totals.append([f"{title}, {len(asked)}", name, *map(str, (*right, whole, silent))])
    head = ["set, faults", "instrument", "operator right", "module right", "line right", "all three", "silent"]
    return table(head, totals)


def lens_source(data: dict[str, Any]) -> str:
    """Return the command and the machine of the measurements of instruments."""
    if not data:
        return "Not measured here."
    parts = [*data["cases"].values(), *([data["faults"]] if data["faults"] else [])]
    more = f" {data['machine']['torch_threads']} threads."
    text = source(data, *(part["commit"] for part in parts), more=more)
    if any(part["quick"] for part in parts):
        text += "\n\n**Few rounds (`--quick`), which show that it runs and measure nothing.**"
    return text
