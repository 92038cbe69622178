"""Findings: what is wrong in an audit's rows, with its cause and its remedy."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.lens.rows import Row
from halfstep.policy.policy import Policy

__all__ = ["Finding", "diagnose", "is_stochastic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Stub."""

    kind: str


def diagnose(rows: tuple[Row, ...], policy: Policy, plan: object, *, headroom: float, scale: float) -> tuple[Finding, ...]:
    """Return what is wrong."""
    return ()


def is_stochastic(row: Row) -> bool:
    return row.reason == "stochastic rounding"
