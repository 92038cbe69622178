"""Operator tables: the rule of each operator, the reason and the source.

A table is a TOML file of groups (operators that share rule, kind, reason and source) in ``tables/``:

* ``mixed``: halfstep's own, the same on every device and torch version;
* ``apex-o1``: the lists of Apex's opt level O1, and what its users found missing;
* ``torch-cpu``, ``torch-cuda``: torch.autocast's lists of one torch version, as data (the region itself uses those of
  the running version);
* ``none`` has no rows, in ``all-low``, made from ``mixed``, every operator with a low kernel is low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from halfstep.arguments import check, one_of
from halfstep.errors import PolicyError
from halfstep.schema import packaged_toml

TABLES = ("none", "torch", "apex-o1", "mixed", "all-low")
NO_LOW_KERNEL = "no low kernel"
"""In the kind of rows that are fp32 because torch has no kernel for low formats on some device."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator of a table, by the name that `operators.canonical` gives it."""

    op: str
    rule: str
    kind: str  # what it is ("gemm", "loss", "reduction", ...); in the ``torch`` tables torch's category
    reason: str
    source: str  # where the reason is stated


@cache
def data(path: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return packaged_toml(f"policy/{path}")


@cache
def table(name: str, device_type: str = "cpu") -> Mapping[str, OperatorRow]:
    """Return the table `name` of `TABLES`, operator -> row.

    The device matters only for ``torch``, whose CPU lists differ from its CUDA lists; other accelerators' lists are
    CUDA's but for vendor kernels.
    """
    check("operator table", PolicyError, name=(name, one_of(*TABLES)))
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
    rows: dict[str, OperatorRow] = {}
    for group in data(f"tables/{file}.toml")["group"]:
        shared = {key: value for key, value in group.items() if key != "ops"}
        rows |= {op: OperatorRow(op=op, **shared) for op in group["ops"]}
    return MappingProxyType(rows)
