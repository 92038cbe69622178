"""The tables of docs/compare.md, from docs/compare.toml: every cell with its source, numbered below its table.

A word in braces in a cell is a number of halfstep's own measurements, from benchmarks/results (`numbers`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.reports import load

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["cell_of", "compare_tables", "numbers", "read"]

FILE = Path(__file__).resolve().parent.parent / "docs" / "compare.toml"
OWN = "halfstep"  # the column whose cells link to pages
OPEN = "not checked"


def read() -> dict[str, Any]:
    """Return the data."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def cell_of(text: str) -> tuple[str, list[str]]:
    """Return what a cell says, and its sources."""
    said, _, sources = text.partition(" @")
    return said, sources.split(",") if sources else []


def numbers() -> dict[str, str]:
    """Return what was measured here, by the word that stands for it in a cell."""
    lens, bench = load("lens.json"), load("cpu.json")
    turns = [case["turns"]["rows"] for case in lens["cases"].values() if "turns" in case]
    faults = [row["said"] for row in lens["faults"]["rows"].values() if row["set"] == "first"]
    found = {
        "box": _span([rows["TrainStep, black box on"]["ratio"]["median"] for rows in turns]),
        "anomaly": _span([rows["torch.amp under detect_anomaly"]["ratio"]["median"] for rows in turns]),
        "faults": str(len(faults)),
    }
    for word, name in (("own", "hs.TrainStep"), ("grad", "detect_anomaly"), ("hooks", "DebugUnderflowOverflow")):
        found[f"right_{word}"] = str(sum(all(said[name][part] for part in ("op", "module", "line")) for said in faults))
    for word, name in (("accelerate", "accelerate"), ("fabric", "Lightning Fabric")):
        rows = [case["rows"].get(name) for case in bench["cases"].values()]
        found[f"step_{word}"] = _span([row["to_amp"]["median"] for row in rows if row and row.get("to_amp")])
    steps = [case["rows"].get("mixed") for case in bench["cases"].values() if case["dtype"] == "bf16"]
    found["step_own"] = _span([row["to_amp"]["median"] for row in steps if row and row.get("to_amp")])
    return found


def _span(values: list[float]) -> str:
    """Return the smallest and the largest value."""
    return f"{min(values):.2f} to {max(values):.2f}"


def compare_tables() -> dict[str, str]:
    """Return each table with the list of its sources, by "compare " and its name."""
    data, measured = read(), numbers()
    return {f"compare {made['name']}": _one(made, data["source"], measured) for made in data["table"]}


def _one(made: dict[str, Any], known: dict[str, str], measured: dict[str, str]) -> str:
    """Return one table; a source has the number of its first use in it."""
    marks: dict[str, int] = {}
    rows = []
    for question, *cells in made["rows"]:
        row = [question.format_map(measured)]
        for column, text in zip(made["columns"][1:], cells, strict=True):
            said, sources = cell_of(text.format_map(measured))
            if column == OWN:
                row.append(f"[{said}]({sources[0]})")
            elif sources:
                given = ", ".join(str(marks.setdefault(source, len(marks) + 1)) for source in sources)
                row.append(f"{said} ({given})")
            else:
                row.append(said)
        rows.append(row)
    listed = "\n".join(f"{number}. {known[source]}" for source, number in marks.items())
    return f"{table(made['columns'], rows)}\n\nSources:\n\n{listed}"
