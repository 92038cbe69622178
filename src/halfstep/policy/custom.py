"""Custom operators: somebody's own functions as operators with a name and a rule, known to policies and plans.

Names contain ``::`` as torch.library's do ("mylib::swiglu"), so none can be mistaken for an operator of torch. A policy
may speak of one that is not registered yet: it is data, and data is read before code is imported. In ``ops`` a pattern
for custom operators is a name, a name's beginning with ``*`` behind it ("mylib::*"), or ``*`` for every operator.

The registry is one for the process, as torch.library's is: a name means the same to every policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfstep.errors import PolicyError
from halfstep.policy.plan import Decision

__all__ = [
    "CustomOperator",
    "check_pattern",
    "custom_operators",
    "custom_rule",
    "decisions",
    "is_custom",
    "overrides",
    "register",
]

MARK = "::"


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomOperator:
    """A registered operator.

    Attributes:
        name: "namespace::name".
        rule: its rule unless a policy says otherwise.
        backward: the rule of what its backward pass calls, "" for the formats they come in.
        where: the file and line, or the library, it comes from.
    """

    name: str
    rule: str
    backward: str
    where: str


_registered: dict[str, CustomOperator] = {}


def is_custom(pattern: str) -> bool:
    """Return whether `pattern` speaks of custom operators alone."""
    return MARK in pattern


def check_pattern(pattern: str) -> None:
    """Raise PolicyError unless `pattern` is a form that custom operators are matched with."""
    if any(c in pattern[:-1] for c in "*?[") or pattern[-1] in "?[":
        raise PolicyError(f"operator pattern {pattern!r}: for custom operators only a last * is a wildcard")


def register(operator: CustomOperator) -> None:
    """Make `operator` known; the same one may be registered again, as when its module is reloaded.

    Raises:
        PolicyError: the name belongs to an operator from elsewhere.
    """
    known = _registered.get(operator.name)
    if known is not None and known.where.rpartition(":")[0] != operator.where.rpartition(":")[0]:
        raise PolicyError(
            f"custom operator {operator.name!r} from {operator.where} is already registered from {known.where}; "
            "give one of them another name: hs.operator(rule, name='namespace::name')"
        )
    _registered[operator.name] = operator


def custom_operators() -> tuple[CustomOperator, ...]:
    """Return all registered operators, sorted by name."""
    return tuple(_registered[name] for name in sorted(_registered))


def overrides(ops: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return those of a policy's ``ops`` that may speak of custom operators."""
    return tuple(pair for pair in ops if is_custom(pair[0]) or pair[0] == "*")


def custom_rule(ops: tuple[tuple[str, str], ...], name: str, default: str) -> str:
    """Return the rule of the operator `name` under ``ops``; the last match wins. Plain enough for Dynamo to trace."""
    rule = default
    for pattern, wanted in ops:
        if name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern:
            rule = wanted
    return rule


def decisions(ops: tuple[tuple[str, str], ...]) -> dict[str, Decision]:
    """Return the decision for every registered operator under a policy's ``ops``."""
    made = {}
    for operator in custom_operators():
        decision = Decision(operator.rule, "operator", f"@hs.operator({operator.rule!r}) at {operator.where}")
        for pattern, rule in overrides(ops):
            if custom_rule(((pattern, rule),), operator.name, ""):
                decision = Decision(rule, "ops", f"ops: {pattern!r} = {rule!r}")
        made[operator.name] = decision
    return made
