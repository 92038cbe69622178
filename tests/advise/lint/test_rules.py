"""Each static rule finds its bad example and is silent on its good one, which no other rule objects to either."""

from __future__ import annotations

import re

import pytest

from halfstep.advise.lint import RULES, SEVERITIES, rule_of
from halfstep.advise.lint.static.script import Script
from halfstep.errors import LintError

STATIC = [code for code, rule in RULES.items() if not rule.traced and code != "HS000"]


def found(text: str) -> set[str]:
    """Return the codes of the static rules that find something in a script."""
    script = Script(text)
    return {code for code in STATIC for _ in RULES[code].check(script)}


@pytest.mark.parametrize("code", STATIC)
def test_a_rule_finds_its_bad_example_and_not_its_good_one(code: str) -> None:
    assert code in found(RULES[code].bad)
    assert found(RULES[code].good) == set()


@pytest.mark.parametrize("code", STATIC)
def test_a_hit_is_on_a_line_of_the_example_and_has_words(code: str) -> None:
    lines = RULES[code].bad.splitlines()
    for hit in RULES[code].check(Script(RULES[code].bad)):
        assert 1 <= hit.line <= len(lines) and lines[hit.line - 1].strip()
        assert hit.what and not hit.what.endswith(".")


def test_there_are_at_least_24_static_rules_in_the_order_of_their_codes() -> None:
    assert len(STATIC) >= 24
    assert list(RULES) == sorted(RULES) and all(re.fullmatch(r"HS\d{3}", code) for code in RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_rule_is_described_in_full(code: str) -> None:
    rule = RULES[code]
    assert rule.severity in SEVERITIES
    assert rule.why.endswith(".") and rule.fix.endswith(".") and not rule.title.endswith(".")
    for part in (code, rule.title, rule.why, rule.fix, "Bad:", "Good:", f"ignore[{code}]"):
        assert part in rule.text()


def test_an_unknown_rule_is_an_error_with_the_nearest_one() -> None:
    assert rule_of("hs012").code == "HS012"
    with pytest.raises(LintError, match=r"unknown rule 'HS12'; did you mean 'HS\d+'\?; there are HS000 to HS"):
        rule_of("HS12")
