"""The table of rule kinds: every reader of it handles every kind, and one that does not is refused at import."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import PolicyError
from halfstep.policy import rule_kinds
from halfstep.policy.rule_kinds import MODULE_RULES, NO_RULE, RULE_KINDS, RULES, RuleKind, for_every_kind

READERS = {
    "halfstep.policy.policy": "Policy.with_ops has no answer for the rules ['int8']",
    "halfstep.binding.bind": "binding.bind has no answer for the rules ['int8']",
    "halfstep.cli.ops": "'int8'",
}
"""Module with answers of its own for each kind -> what it says of a kind that it does not know."""


@pytest.fixture(autouse=True)
def same_safe_globals() -> Iterator[None]:
    """A second copy of `binding.bind` allows its own classes in files, in the place of the first one's."""
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def imported_anew(name: str) -> ModuleType:
    """Return a second copy of a module; the first stays what it is for all others."""
    importlib.import_module(name)  # dataclasses look their module up
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a kind that no reader knows."""
    for name in READERS:
        importlib.import_module(name)
    kinds = {**RULE_KINDS, "int8": replace(RULE_KINDS["low"], means="arguments in int8")}
    monkeypatch.setattr(rule_kinds, "RULE_KINDS", kinds)
    monkeypatch.setattr(hs.policy, "RULE_KINDS", kinds)
    monkeypatch.setattr(rule_kinds, "RULES", (*RULES, "int8"))
    monkeypatch.setattr(rule_kinds, "MODULE_RULES", (*MODULE_RULES, "int8"))
    monkeypatch.setattr(for_every_kind, "__defaults__", ((*RULES, "int8"),))


@pytest.mark.parametrize("name", READERS)
def test_every_reader_handles_every_kind(name: str) -> None:
    imported_anew(name)


@pytest.mark.usefixtures("unknown_kind")
@pytest.mark.parametrize("name", READERS)
def test_a_kind_that_a_reader_does_not_handle_is_an_error_at_import(name: str) -> None:
    with pytest.raises((PolicyError, KeyError), match=re.escape(READERS[name])):
        imported_anew(name)


def test_a_kind_states_every_property() -> None:
    with pytest.raises(TypeError, match="refuses_low"):
        RuleKind(format="low", cast_to=NO_RULE.cast_to, of_modules=True, means="")  # type: ignore[call-arg]


def test_answers_for_an_unknown_kind_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"here has no .*, and answers for the unknown \['int8'\]"):
        for_every_kind("here", {**dict.fromkeys(RULES, 0), "int8": 1})


@pytest.mark.parametrize(
    ("rule", "alone", "mixed"),
    [
        ("low", torch.bfloat16, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
        ("keep", None, torch.float16),
        ("widest", None, torch.float32),
        ("banned", None, None),
    ],
)
def test_what_arguments_are_cast_to(rule: str, alone: torch.dtype | None, mixed: torch.dtype | None) -> None:
    weight, half = nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.float16)
    assert RULE_KINDS[rule].cast_to("cpu", [weight]) is alone
    assert RULE_KINDS[rule].cast_to("cpu", [weight, half]) is mixed


def test_which_rules_may_leave_an_operator_low() -> None:
    assert [rule for rule in RULES if RULE_KINDS[rule].may_be_low] == ["low", "keep", "widest"]
    assert MODULE_RULES == ("low", "fp32", "keep", "mixed", "fp8", "fp8-rowwise", "fp8-rowwise-hp")
    assert RULES == ("low", "fp32", "keep", "widest", "banned")
