"""Operator tables: the rule of each operator, the reason and the source.

A table is a TOML file of groups (operators that share rule, kind, reason and source) in ``tables/``:

* ``mixed``: halfstep's own, the same on every device and torch version;
* ``apex-o1``: the lists of Apex's opt level O1, and what its users found missing;
* ``torch-cpu``, ``torch-cuda``: torch.autocast's lists of one torch version, as data (the region itself uses those of
  the running version);
* ``none`` has no rows, in ``all-low``, made from ``mixed``, every operator with a low kernel is low.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from halfstep.errors import PolicyError, did_you_mean
from halfstep.policy.rule_kinds import RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["NO_LOW_KERNEL", "TABLES", "losses", "table"]

TABLES = ("none", "torch", "apex-o1", "mixed", "all-low")
NO_LOW_KERNEL = "no low kernel"
"""In the kind of rows that are fp32 because torch has no kernel for low formats on some device."""

KEYS = {"kind", "rule", "reason", "source", "ops"}


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of a table.

    Attributes:
        op: its name, as `operators.canonical` gives it.
        rule: one of `RULES`.
        kind: what it is ("gemm", "loss", "reduction", ...); in the ``torch`` tables torch's category.
        reason: why it has this rule.
        source: where it is stated.
    """

    op: str
    rule: str
    kind: str
    reason: str
    source: str


@cache
def table(name: str, device_type: str = "cpu") -> Mapping[str, OperatorRow]:
    """Return a table, operator -> row.

    Args:
        name: one of `TABLES`.
        device_type: matters only for ``torch``, whose CPU lists differ from its CUDA lists; other accelerators' lists
            are CUDA's but for vendor kernels.

    Raises:
        PolicyError: no such table.
    """
    if name not in TABLES:
        hint = did_you_mean(name, TABLES)
        raise PolicyError(f"unknown operator table {name!r}; expected one of {', '.join(TABLES)}{hint}")
    if name == "none":
        return MappingProxyType({})
    if name == "all-low":
        return MappingProxyType({op: _lowered(row) for op, row in table("mixed").items()})
    if name == "torch":
        return _read("torch-cpu" if device_type == "cpu" else "torch-cuda")
    return _read(name)


@lru_cache(maxsize=1)
def losses() -> frozenset[str]:
    """Return the operators that are loss functions: those that a policy's field `loss` applies to."""
    return frozenset(row.op for row in table("mixed").values() if row.kind.startswith("loss"))


def _lowered(row: OperatorRow) -> OperatorRow:
    if NO_LOW_KERNEL in row.kind or row.rule == "low":
        return row
    return replace(row, rule="low", reason=f"everything with a low kernel is low (mixed: {row.rule}, {row.reason})")


@cache
def _read(file: str) -> Mapping[str, OperatorRow]:
    """Read one data file. It is part of the package, so a mistake in it is a bug and raises PolicyError."""
    text = files("halfstep.policy").joinpath("tables", f"{file}.toml").read_text(encoding="utf-8")
    rows: dict[str, OperatorRow] = {}
    for group in tomllib.loads(text)["group"]:
        for row in _rows(file, group):
            if row.op in rows:
                raise PolicyError(f"operator table {file}: {row.op!r} is listed twice")
            rows[row.op] = row
    return MappingProxyType(rows)


def _rows(file: str, group: dict[str, Any]) -> list[OperatorRow]:
    if group.keys() != KEYS or group["rule"] not in RULES:
        raise PolicyError(f"operator table {file}: a group needs {sorted(KEYS)} and a rule of {RULES}, got {group}")
    shared = {key: group[key] for key in ("rule", "kind", "reason", "source")}
    return [OperatorRow(op=op, **shared) for op in group["ops"]]
