"""Tables of the score on stories from public trackers, from the JSON of `benchmarks.faults.stories_scored`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import told
from halfstep.lens.verdict import CAUSES

Row = dict[str, Any]

PARTS: dict[str, Callable[[Row], bool | None]] = {
    "place": lambda row: row["place"],
    "cause": lambda row: row["cause"],
    "verified cure, or rightly none": lambda row: row["cure"],
    "words": lambda row: not row["unsaid"],
}
"""What of a verdict is judged -> whether it is right; None: it cannot be said."""


def story_blocks(report: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    if not report:
        return dict.fromkeys(("source stories", "stories", "stories peers", "stories wrong"), "Not scored.")
    return {
        "source stories": source(report),
        "stories": scores(report),
        "stories peers": peers(report),
        "stories wrong": wrong(report),
    }


def source(report: dict[str, Any]) -> str:
    """Return the command, the machine and the commit."""
    machine = report["machine"]
    return (
        f"`{report['command']}` on {machine['cpu']}, torch {machine['torch']}, Python {machine['python']}. "
        f"{report['seconds'] / 60:.0f} minutes. {told(report['commit'])}"
    )


def answered(report: dict[str, Any]) -> dict[str, Row]:
    """Return the stories that were scored to their end."""
    return {name: row for name, row in report["stories"].items() if "died" not in row}


def share(values: Iterable[bool | None]) -> str:
    """Return how many of how many."""
    known = [value for value in values if value is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def scores(report: dict[str, Any]) -> str:
    """Return how often each part is right, by root cause."""
    rows, found = [], list(answered(report).values())
    for cause in (*CAUSES, "all"):
        mine = [row for row in found if cause in (row["truth"]["cause"], "all")]
        if not mine:
            continue
        verified = [not reason for row in mine for reason in row["verified"].values()]
        cells = [share(judge(row) for row in mine) for judge in PARTS.values()]
        rows.append([cause, *cells, share(verified), share(bool(row["twin"]) for row in mine)])
    head = ["root cause", *PARTS, "verified cures that train", "healthy twins accused"]
    died = len(report["stories"]) - len(found)
    return table(head, rows) + (f"\n\n{died} stories gave no answer." if died else "")


def peers(report: dict[str, Any]) -> str:
    """Return how often each instrument names the place of the stories that have an operator."""
    placed = [row for row in answered(report).values() if row["truth"]["op"]]
    ours, *others = report["instruments"]
    silent = str(sum(row["said"] is None for row in placed))
    parts = [share(row["parts"].get(part, False) for row in placed) for part in ("op", "module", "line")]
    rows = [[f"halfstep (`{ours}`, `hs.BlackBox`)", *parts, share(row["place"] for row in placed), silent]]
    for name in others:
        said = [row["peers"][name] for row in placed]
        parts = [share(one[part] for one in said) for part in ("op", "module", "line")]
        whole = share(one["op"] and one["module"] and one["line"] for one in said)
        rows.append([name, *parts, whole, str(sum(not one["words"] for one in said))])
    head = ["instrument", "operator right", "module right", "line right", "all three", "silent"]
    return table(head, rows)


def wrong(report: dict[str, Any]) -> str:
    """Return each story with a wrong answer: what was expected and said."""
    lines = []
    for name, row in report["stories"].items():
        if "died" in row:
            lines.append(f"- `{name}`: {row['died']}")
            continue
        parts = [part for part, judge in PARTS.items() if judge(row) is False]
        reasons = [f"a verified cure does not train: {reason}" for reason in row["verified"].values() if reason]
        reasons += [f"its twin is accused: {shortened(row['twin'][0])}"] if row["twin"] else []
        if not parts and not reasons:
            continue
        expected, said = row["truth"], row["said"]
        names = [f"wrong {part.removeprefix('verified ').partition(',')[0]}" for part in parts]
        what = f"`{name}` ({row['source']}): {', '.join([*names, *reasons])}."
        wanted = f"Expected cause {expected['cause']}, {place(expected)}."
        if "words" in parts:
            wanted += f" Words: {'; '.join(row['unsaid'])}."
        got = row["error"] or "nothing" if said is None else f"cause {said['cause'] or 'not known'}, {place(said)}"
        lines.append(f"- {what} {wanted} Given: {got}.")
    return "\n".join(lines) or "None."


def shortened(text: str, names: int = 3) -> str:
    """Return a finding with its first few names; the JSON has all."""
    parts = text.split(", ")
    return text if len(parts) <= names + 1 else f"{', '.join(parts[:names])} and {len(parts) - names} more"


def place(found: dict[str, Any]) -> str:
    """Return a place in a few words."""
    parts = [found["kind"], found["phase"] and f"{found['phase']} of", found["op"] and f"`{found['op']}`"]
    parts += [found["module"] and f"in `{found['module']}`", found["parameter"] and f"`{found['parameter']}`"]
    return " ".join(part for part in parts if part)
