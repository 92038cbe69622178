"""Tables of docs/concepts/ and on weights, made from the package.

What these pages say about formats, policies and scale rules is read from the code's own values and docstrings. Bytes
per parameter are counted by `benchmarks.parameter_bytes`. What training under `lean` loses is read from
`benchmarks/results/lean.json`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import halfstep as hs
from benchmarks.concept_pictures import links
from benchmarks.lean_tables import lean_blocks
from benchmarks.markdown import table
from benchmarks.parameter_bytes import byte_blocks
from benchmarks.reports import load
from benchmarks.writes import writes_table
from halfstep.events import StepResult
from halfstep.formats import FORMATS
from halfstep.policy.operators import TABLES
from halfstep.policy.operators import table as operators
from halfstep.policy.rule_kinds import RULES
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES
from halfstep.step import StepMetrics


def number(value: float) -> str:
    """Write a power of two as one, anything else in four digits."""
    power = math.log2(value) if value > 0 else math.nan
    if power == round(power) and not -4 < power < 11:
        return f"2^{round(power)}"
    return f"{value:.4g}"


def meanings(kind: type) -> dict[str, str]:
    """Return attribute -> its description in the class docstring, in Markdown."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    text = re.split(r"\n(?=\w+:\n)", text)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()).replace("``", "`") for name, words in found}


def attributes(kind: Any, head: str) -> str:
    told = meanings(kind)
    return table(
        [head, "what it is"], [[f"`{f.name}`", told[f.name]] for f in dataclasses.fields(kind) if f.name in told]
    )


def formats() -> str:
    rows = [
        [
            f"`{f.name}`",
            str(f.bits),
            str(f.bytes),
            f"{f.exponent_bits} + {f.mantissa_bits}",
            f"{f.max:.7g}",
            number(f.smallest_normal),
            number(f.smallest_subnormal),
            number(f.eps),
            {(True, True): "inf, nan", (False, True): "nan", (False, False): "-"}[f.has_inf, f.has_nan],
            "-" if f.torch_dtype is None else f"`{f.torch_dtype}`",
        ]
        for f in FORMATS.values()
    ]
    head = [
        "format",
        "bits",
        "bytes stored",
        "exponent + mantissa",
        "max",
        "smallest normal",
        "smallest subnormal",
        "eps",
    ]
    return table([*head, "specials", "dtype"], rows)


def policy_fields() -> str:
    told, hints = meanings(hs.Policy), get_type_hints(hs.Policy)
    rows = []
    for f in dataclasses.fields(hs.Policy):
        choice = get_origin(hints[f.name]) is Literal
        values = ", ".join(f"`{v}`" for v in get_args(hints[f.name])) if choice else "see there"
        rows.append([f"`{f.name}`", values, f"`{f.default!r}`", told[f.name]])
    return table(["field", "values", "default", "meaning"], rows)


def presets() -> str:
    plain, rows = hs.Policy(), []
    for name, policy in hs.policy.PRESETS.items():
        changed = [f.name for f in dataclasses.fields(policy) if f.name != "name"]
        changed = [f for f in changed if getattr(policy, f) != getattr(plain, f)]
        rows.append([f"`{name}`", ", ".join(f"`{f}={getattr(policy, f)!r}`" for f in changed) or "the defaults"])
    return table(["preset", "fields that are not the default"], rows)


def tables() -> str:
    rows = []
    for name in TABLES:
        for device in ("cpu", "cuda") if name == "torch" else ("cpu",):
            count = Counter(row.rule for row in operators(name, device).values())
            label = f"`{name}`" + (f" on {device}" if name == "torch" else "")
            rows.append([label, *(str(count[rule]) for rule in RULES)])
    return table(["table", *(f"`{rule}`" for rule in RULES)], rows)


def scale_fields() -> str:
    told = meanings(hs.ScaleRule)
    rows = [[f"`{f.name}`", _plain(f.default), told[f.name]] for f in dataclasses.fields(hs.ScaleRule)]
    return table(["field", "default", "meaning"], rows)


def scale_rules() -> str:
    shown = ("init", "growth", "backoff", "interval", "floor", "ceiling", "hysteresis")
    plain, rows = hs.ScaleRule(), []
    for name, rule in SCALE_RULES.items():
        others = [f.name for f in dataclasses.fields(rule) if f.name not in shown]
        others = [f"`{f}={getattr(rule, f)!r}`" for f in others if getattr(rule, f) != getattr(plain, f)]
        rows.append([f"`{name}`", *(_plain(getattr(rule, f)) for f in shown), ", ".join(others)])
    return table(["rule", *shown, "besides"], rows)


def _plain(value: Any) -> str:
    if value == FP32_MAX:
        return "none"
    if value == 0 and isinstance(value, float):
        return "0"
    return (
        number(value) if isinstance(value, float) else f"`{value!r}`" if isinstance(value, (str, bool)) else str(value)
    )


@cache
def blocks() -> dict[str, str]:
    """Return the tables by their names."""
    return {
        "formats": formats(),
        "policy fields": policy_fields(),
        "presets": presets(),
        "operator tables": tables(),
        "scale fields": scale_fields(),
        "scale rules": scale_rules(),
        "result": attributes(StepResult, "`result.`"),
        "record": attributes(StepMetrics, "`record.`"),
        **byte_blocks(),
        **lean_blocks(load("lean.json")),
        "writes": writes_table(),
        **links(),
    }
