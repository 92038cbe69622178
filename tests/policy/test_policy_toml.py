"""Policies as TOML: both ways without loss, and errors that name the key."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

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
        ("[scale]\ninit = -1.0", r"\[scale\] of a policy: scale rule: init must be a number in .* and is -1.0"),
        ("preset = 'mixd'", r"unknown preset 'mixd'.*did you mean 'mixed'\?"),
        ("preset = ['mixed']", "it is a preset's name"),
        ("dtype = 16", "policy: dtype=16; expected one of"),
        ("dtype = {}", "policy: dtype={}; expected one of"),
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


def nested(depth: int) -> str:
    return f"ops = {'[' * depth}{']' * depth}"


HOSTILE = {
    "deep arrays": (nested(100_000), "deeper than 8"),
    "arrays deeper than the longest rule": (nested(9), "deeper than 8"),
    "a key of many parts": (".".join(["a"] * 20_000) + " = 1", "deeper than 8"),
    "a table of many parts": ("[" + ".".join(["a"] * 20_000) + "]", "deeper than 8"),
    "quoted parts": (".".join(['"=,"'] * 20_000) + " = 1", "deeper than 8"),
    "parts behind a text of several lines": (
        f"x = {{a = '''\n\"''', {'.'.join('a' * 20_000)} = \"\"}}",
        "deeper than 8",
    ),
    "20,000 keys": ("\n".join(f"k{i} = 1" for i in range(20_000)), "unknown key 'k0'"),
    "20,000 patterns": (
        "ops = [" + ", ".join(f"['*[a-z{i}]*', 'low']" for i in range(20_000)) + "]",
        "ops has 20000 rules; at most 2000",
    ),
    "more values than a policy has": ("ops = [" + "1," * 110_000 + "]", "more than 100000 keys and values"),
    "long": ("#" * (1 << 20) + "\n", "has 1048577 characters"),
    "a long text": ("dtype = '" + "k" * 300_000 + "'", "a text of 300000 characters"),
    "a long key": ("k" * 300_000 + " = 1", "a text of 300000 characters"),
    "integer beyond 64 bits": ("scale = 9223372036854775808", "integer beyond 64 bits"),
    "integer beyond float": ("scale = 1" + "0" * 400, "integer beyond 64 bits"),
    "integer beyond Python's digits": ("scale = 1" + "0" * 5000, "does not parse: Exceeds the limit|beyond 64 bits"),
    "hexadecimal integer": ("[scale]\ninterval = 0x1" + "0" * 50_000, "integer beyond 64 bits"),
    "scale beyond fp32": ("scale = 1e39", "a positive number in fp32"),
    "scale below fp32": ("scale = 1e-46", "a positive number in fp32"),
    "digits of another script": ("dtype = 'e３m４'", "policy: dtype='e３m４'; expected one of"),
    "letters of another script": ("dtype = 'еЗm4'", "policy: dtype='еЗm4'; expected one of"),
    "thousands of bits": ("dtype = 'e" + "1" * 500 + "m4'", "expected one of"),
    "half a character": ("name = '\ud800'", "does not parse: .*surrogates"),
    "a NUL": ("name = '\0'", "does not parse"),
    "a file as the preset": ("preset = 'policy.toml'", "unknown preset 'policy.toml'"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_is_refused_in_words(what: str) -> None:
    text, message = HOSTILE[what]
    with pytest.raises(PolicyError, match=message) as caught:
        Policy.from_toml(text)
    assert len(str(caught.value)) < 2000


def test_the_parts_of_no_key_count() -> None:
    """Dots in strings and comments."""
    dots = ".".join("a" * 100)
    text = f"# {dots}\nname = '''\n{dots}'''\nmodules = [['{dots}', 'fp32'], [\"{dots}\\\"{dots}\", 'keep']]"
    assert len(Policy.from_toml(text).modules) == 2


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("preset = 'O2'", encoding="utf-8-sig")
    assert Policy.of(file) == PRESETS["O2"]


def test_text_that_is_none() -> None:
    for value in (b"name = 'x'", None):
        with pytest.raises(PolicyError, match="Policy.from_toml takes the text of a policy, not"):
            Policy.from_toml(value)  # type: ignore[arg-type]


def test_files_that_are_none(tmp_path: Path) -> None:
    large, binary, pipe = tmp_path / "large.toml", tmp_path / "binary.toml", tmp_path / "pipe.toml"
    large.write_bytes(b"#" * ((1 << 20) + 1))
    binary.write_bytes(b"\xff\xfe")
    wanted = {
        large: "at most 1048576 are expected",
        binary: "codec can't decode",
        tmp_path / "absent.toml": "No such file",
        tmp_path / "nul\0.toml": "null",
        tmp_path: "is a folder",
    }
    if hasattr(os, "mkfifo"):
        os.mkfifo(pipe)
        wanted |= {pipe: "only a plain file", Path("/dev/zero"): "only a plain file"}
    for path, message in wanted.items():
        with pytest.raises(PolicyError, match=f"cannot read the policy file .*{message}"):
            Policy.of(path)
