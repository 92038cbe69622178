"""Policies as TOML: both ways without loss, and errors that name the key."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from halfstep.errors import PolicyError, UnbuiltError
from halfstep.policy import PRESETS, SCALE_RULES, Policy
from tests.policy.strategies import policies


@settings(max_examples=200, deadline=None)
@given(policies())
def test_round_trip(policy: Policy) -> None:
    assert Policy.from_toml(policy.to_toml()) == policy


@pytest.mark.parametrize("name", SCALE_RULES)
def test_round_trip_of_every_scale_rule(name: str) -> None:
    policy = Policy(scale=SCALE_RULES[name])
    assert Policy.from_toml(policy.to_toml()) == policy


def test_a_lost_field_would_be_noticed() -> None:
    """The seeded fault: dropping any one line of a policy in which every field differs from the default."""
    policy = Policy(
        name="n",
        dtype="fp16",
        params="low",
        norms="low",
        master="kahan",
        grads="fp32",
        table="torch",
        ops=(("add", "low"),),
        modules=(("a", "keep"),),
        residual="low",
        inputs="low",
        outputs="fp32",
        loss="keep",
        reduce="fp32",
        state="low",
        scale=2.0,
        emulate="never",
    )
    assert all(getattr(policy, f.name) != f.default for f in dataclasses.fields(Policy)), "name the new field here"
    flat = policy.to_toml().replace("[\n", "[").replace(",\n]", "]")
    lines = flat.splitlines()
    assert Policy.from_toml(flat) == policy
    for i in range(len(lines)):
        assert Policy.from_toml("\n".join(lines[:i] + lines[i + 1 :])) != policy, lines[i]


def test_reads_what_people_write() -> None:
    text = """
    preset = "O2"
    name = "my model"
    dtype = "fp16"
    ops = [["F.softmax", "fp32"], ["conv*", "keep"]]
    modules = [["class:*Norm*", "keep"], ["head", "fp32"]]  # the last match wins
    [scale]
    init = 1024
    interval = 100
    """
    policy = Policy.from_toml(text)
    assert policy.params == PRESETS["O2"].params
    assert policy.ops == (("softmax", "fp32"), ("conv*", "keep"))
    assert policy.modules == (("class:*Norm*", "keep"), ("head", "fp32"))
    assert policy.scale == dataclasses.replace(SCALE_RULES["halfstep"], init=1024.0, interval=100)


def test_writes_one_rule_a_line() -> None:
    text = Policy(ops=(("softmax", "fp32"), ("conv*", "low"))).to_toml()
    assert 'ops = [\n    ["softmax", "fp32"],\n    ["conv*", "low"],\n]\n' in text


def test_an_empty_text_is_the_default() -> None:
    assert Policy.from_toml("") == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tabel = 'mixed'", r"unknown key 'tabel' in a policy; it has name, dtype, .*did you mean 'table'\?"),
        ("[scale]\nintervall = 3", r"unknown key 'intervall' in \[scale\].*did you mean 'interval'\?"),
        ("[scale]\ninit = -1.0", r"\[scale\] of a policy: scale rule: init=-1.0"),
        ("preset = 'mixd'", r"unknown preset 'mixd'.*did you mean 'mixed'\?"),
        ("preset = ['mixed']", "a policy is a preset's name"),
        ("dtype = 16", "policy: dtype=16; expected one of"),
        ("ops = [['softmax']]", "policy: ops contains"),
        ("ops = 'softmax'", "policy: ops='softmax'"),
        ("dtype = \nname = 3", "a policy's TOML does not parse: .*line 1"),
        ("name = 'a'\nname = 'b'", "a policy's TOML does not parse"),
    ],
)
def test_errors_name_the_key(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.from_toml(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [("preset = 'fp8'", "preset 'fp8'"), ("ops = [['conv*', 'fp8']]", r"rule of 'conv\*' in ops='fp8'")],
)
def test_what_is_not_built_yet_has_an_error_of_its_own(text: str, what: str) -> None:
    with pytest.raises(UnbuiltError, match=rf"{what} cannot run yet: products in fp8 are missing; .* preset 'O2'"):
        Policy.from_toml(text)
