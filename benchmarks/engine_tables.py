"""Tables of docs/engines.md and of the pages in docs/tables/ on other engines.

What becomes of every field is read from the code, runs from the JSON of `benchmarks.engines`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import told
from halfstep.errors import PolicyError
from halfstep.policy.engines import ENGINES, Engine, Expressed, expressed

NOTHING = "Not measured here."

LOW = hs.Policy(dtype="bf16", params="low", norms="low", table="none", residual="low", loss="keep")
WIDE = hs.Policy(dtype="bf16", table="torch", residual="fp32", loss="keep")
HALF = LOW.replace(dtype="fp16")

SHOWN: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp32"),
    "ops": ((("softmax", "fp32"),),),
    "modules": ((("head", "fp32"),),),
    "scale": ("none", 1024.0, "halfstep"),
}
"""Values of the fields whose values are not a list of words."""

IN_HALF: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp16",),
    "params": ("low",),
    "master": ("none", "kahan"),
    "grads": ("param", "fp32"),
    "inputs": ("low",),
    "loss": ("keep",),
    "scale": ("auto", "none", 1024.0, "halfstep", "torch", "deepspeed", "megatron"),
    "emulate": ("always",),
}
"""What is not as in bf16."""


def engine_blocks(report: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    made = {f"fields {name}": fields(engine) for name, engine in ENGINES.items()}
    made |= {f"half {name}": half(engine) for name, engine in ENGINES.items() if name != "torchtitan"}
    made["engine lost"] = lost()
    made["engine summary"] = summary(report) if report else NOTHING
    made["engine runs"] = runs(report) if report else NOTHING
    made["engine scales"] = scales(report) if report else NOTHING
    made["engine parsers"] = parsers(report) if report else NOTHING
    return made


# ------------------------------------------------------------------ fields


def fields(engine: Engine) -> str:
    """Return what becomes of every value of every field in bf16, for low and for fp32 parameters."""
    rows = []
    for name, values in _values().items():
        for value in values:
            cells = [_cell(engine, base, name, value) for base in (LOW, WIDE)]
            if name == "params":
                cells = [_cell(engine, LOW if value == "low" else WIDE, name, value)] * 2
            rows.append([f"`{name}={value!r}`", *cells])
    merged = [[what, low, "as before" if low == wide and len(low) > 20 else wide] for what, low, wide in rows]
    return table(["field", "with `params='low'`", "with `params='fp32'`"], merged)


def half(engine: Engine) -> str:
    """Return what is not as in bf16."""
    rows = [
        [f"`{name}={value!r}`", _cell(engine, HALF, name, value)]
        for name, values in IN_HALF.items()
        for value in values
    ]
    return table(["field", "in fp16, with `params='low'`"], rows)


def lost() -> str:
    """Return the values of fields that an engine loses in bf16, a row for each engine."""
    rows = []
    for engine in ENGINES.values():
        cells = []
        for base in (LOW, WIDE):
            found: dict[str, list[str]] = {}
            for name, values in _values().items():
                words = [value for value in values if "**lost**" in _cell(engine, base, name, value)]
                if words:
                    found[name] = [repr(value) for value in words]
            cells.append(", ".join(f"`{name}`" + _shown(name, words) for name, words in found.items()))
        rows.append([engine.name, *cells])
    return table(["engine", "lost with `params='low'`", "lost with `params='fp32'`"], rows)


def _shown(name: str, values: list[str]) -> str:
    return "" if name in ("ops", "modules") else f" ({', '.join(f'`{value}`' for value in values)})"


def _values() -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(hs.Policy)
    words = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return {name: words.get(name, SHOWN.get(name, ())) for name in hints if name != "name"}


def _cell(engine: Engine, base: hs.Policy, name: str, value: Any) -> str:
    try:
        made = expressed(engine, base.replace(**{name: value}))
    except PolicyError:
        return "no such policy"
    return _words(next(e for e in made if e.field == name))


def _words(made: Expressed) -> str:
    parts = [", ".join(f"`{key}={value!r}`" for key, value in made.settings.items())]
    parts += [made.note, f"**lost**: {made.lost}" if made.lost else ""]
    return "; ".join(part for part in parts if part) or "done"


# ------------------------------------------------------------------ runs


def runs(report: dict[str, Any]) -> str:
    """Return how far DeepSpeed's losses are from a TrainStep's."""
    rows = []
    for run in report["runs"]:
        rows.append(
            [
                f"`{run['policy']}`",
                ", ".join(f"`{field}`" for field in run["accepted"]) or "-",
                run["optimizer"],
                str(run["stage"]),
                f"{run['equal']} of {run['of']}",
                f"{run['apart']:.2g}",
                f"{run['apart_from_it']:.2g} (`{run['nearest_other']}`)",
            ]
        )
    head = [
        "policy",
        "accepted",
        "optimizer",
        "ZeRO",
        "losses bit-equal",
        "largest distance",
        "to the nearest other policy",
    ]
    return f"{_source(report)}\n\n{table(head, rows)}"


def summary(report: dict[str, Any]) -> str:
    """Return what runs and parsers show, in sentences."""
    exact = [run for run in report["runs"] if run["policy"].startswith("low") and run["optimizer"] == "SGD"]
    equal = sum(run["equal"] == run["of"] for run in exact)
    far = max(run["apart"] for run in report["runs"] if not run["accepted"])
    moved = sum(run["equal"] == run["of"] for run in report["scales"])
    return (
        f"- **DeepSpeed** {report['deepspeed']['version']} ran on its CPU accelerator with {report['ranks']} "
        f"processes. Under policies that lose nothing and SGD, {equal} of {len(exact)} runs have every loss bit-equal "
        f"to a `TrainStep`'s; ZeRO 2 and 3 add up low gradients in another order. The largest distance of a loss under "
        f"any policy that loses nothing is {far:.2g}.\n"
        f"- **Loss scales in fp16** are equal in {moved} of {len(report['scales'])} runs.\n"
        f"- **Megatron-LM** and **torchtitan** were not run, because there is no GPU. Their own parsers read "
        f"{report['megatron']['configurations']} and {report['torchtitan']['configurations']} different "
        f"configurations, and each key had the value that was written."
    )


def scales(report: dict[str, Any]) -> str:
    rows = [
        [run["optimizer"], str(run["stage"]), f"{run['equal']} of {run['of']}", str(run["moves"])]
        for run in report["scales"]
    ]
    return table(["optimizer", "ZeRO", "scales equal", "moves of the scale"], rows)


def parsers(report: dict[str, Any]) -> str:
    rows = [
        [f"DeepSpeed {report['deepspeed']['version']}", "`DeepSpeedConfig`", *_counted(report["deepspeed"])],
        [
            f"Megatron-LM {report['megatron']['version']}",
            "`add_megatron_arguments`",
            *_counted(report["megatron"]),
        ],
        [f"torchtitan at {report['torchtitan']['commit']}", "`TrainingConfig`", *_counted(report["torchtitan"])],
    ]
    return table(["engine", "read by its own", "different configurations", "keys"], rows)


def _counted(found: dict[str, Any]) -> list[str]:
    return [str(found["configurations"]), str(found["keys"])]


def _source(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"`{report['command']}` on {machine['cpu']}, torch {machine['torch']}, DeepSpeed "
        f"{report['deepspeed']['version']} on its CPU accelerator with gloo, {report['ranks']} processes; "
        f"{report['steps']} updates of {report['accumulate']} micro-batches. {told(report['commit'])}"
    )
