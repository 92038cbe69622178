"""Every rule of the linter by its code: the one list from which findings, ``--explain``, SARIF and docs are made."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halfstep.advise.lint.rule import Rule
from halfstep.advise.lint.static.autocasting import AUTOCASTING_RULES
from halfstep.advise.lint.static.files import FILE_RULES
from halfstep.advise.lint.static.loops import LOOP_RULES
from halfstep.advise.lint.static.low_copies import LOW_COPY_RULES
from halfstep.advise.lint.static.low_values import LOW_VALUE_RULES
from halfstep.advise.lint.static.numerics import NUMERIC_RULES
from halfstep.advise.lint.static.optimizers import OPTIMIZER_RULES
from halfstep.advise.lint.static.region_arguments import REGION_ARGUMENT_RULES
from halfstep.advise.lint.static.scaler_state import SCALER_STATE_RULES
from halfstep.advise.lint.static.scaling import SCALING_RULES
from halfstep.advise.lint.static.weights import WEIGHT_RULES
from halfstep.advise.lint.traced import TRACED_RULES
from halfstep.errors import LintError, did_you_mean
from halfstep.mistakes import MISTAKES

__all__ = ["RULES", "explained", "rule_of"]

STATIC_RULES = (
    *FILE_RULES, *SCALING_RULES, *SCALER_STATE_RULES, *AUTOCASTING_RULES, *REGION_ARGUMENT_RULES, *WEIGHT_RULES,
    *OPTIMIZER_RULES, *LOW_COPY_RULES, *LOOP_RULES, *NUMERIC_RULES, *LOW_VALUE_RULES,
)  # fmt: skip

RULES: Mapping[str, Rule] = MappingProxyType(
    {rule.code: rule for rule in sorted((*STATIC_RULES, *TRACED_RULES), key=lambda rule: rule.code)}
)
"""Code -> rule, in the order of codes; static rules (HS001 on), then traced ones (HS101 on)."""


def rule_of(code: str) -> Rule:
    """Return the rule called `code`.

    Raises:
        LintError: there is none.
    """
    if code.upper() not in RULES:
        first, *_, last = RULES
        raise LintError(f"unknown rule {code!r}{did_you_mean(code.upper(), RULES)}; there are {first} to {last}")
    return RULES[code.upper()]


def explained(code: str) -> str:
    """Return the rule `code` in full; of a mistake that only a run shows, what the catalogue has of it.

    Raises:
        LintError: there is none.
    """
    mistake = MISTAKES.get(code.upper())
    if mistake is None or mistake.code in RULES:
        return rule_of(code).text()
    return (
        f"{mistake.code} ({mistake.severity}): {mistake.title}\n\nWhy: {mistake.why}\nFix: {mistake.fix}\n"
        "Found while a loop runs, by hs.BlackBox or hs.GradScaler."
    )
