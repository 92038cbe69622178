"""Policy: a frozen value that refuses nonsense and says what would have been right."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from halfstep.errors import PolicyError
from halfstep.policy import PRESETS, SCALE_RULES, Policy, ScaleRule
from tests.policy.strategies import policies


class TestValue:
    @settings(max_examples=100, deadline=None)
    @given(policies())
    def test_repr_can_be_pasted(self, policy: Policy) -> None:
        pasted = eval(repr(policy), {"Policy": Policy, "ScaleRule": ScaleRule})
        assert pasted == policy
        assert hash(pasted) == hash(policy)

    def test_repr_shows_what_is_not_default(self) -> None:
        assert repr(Policy()) == "Policy()"
        assert (
            repr(Policy(dtype="fp16", ops=(("softmax", "fp32"),))) == "Policy(dtype='fp16', ops=(('softmax', 'fp32'),))"
        )

    @pytest.mark.parametrize("name", PRESETS)
    def test_survives_pickle_and_copies(self, name: str) -> None:
        policy = PRESETS[name].with_modules({"head": "fp32"})
        assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy

    def test_is_frozen_and_slotted(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Policy().dtype = "fp16"  # type: ignore[misc]
        assert not hasattr(Policy(), "__dict__")

    def test_every_field_is_documented(self) -> None:
        documented = inspect.cleandoc(Policy.__doc__ or "")  # Python 3.13 takes the indentation away by itself
        for field in dataclasses.fields(Policy):
            assert f"\n    {field.name}: " in documented, field.name

    def test_sequences_become_tuples_and_names_short(self) -> None:
        written: Any = [["torch.nn.functional.softmax", "fp32"], ("linalg_*", "keep")]
        modules: Any = {"head": "fp32"}
        policy = Policy(ops=written, modules=modules, scale=128)
        assert policy.ops == (("softmax", "fp32"), ("linalg_*", "keep"))
        assert policy.modules == (("head", "fp32"),)
        assert isinstance(policy.scale, float)
        assert hash(policy)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"dtype": "bfloat16"},
                r"policy: dtype='bfloat16'; expected one of 'auto', 'bf16', .*did you mean 'bf16'\?",
            ),
            ({"params": None}, "policy: params must be one of 'fp32', 'low' and is None"),
            ({"master": "splitt"}, r"did you mean 'split'\?"),
            ({"table": "apex"}, r"policy: table must be .* and is 'apex'; did you mean 'apex-o1'\?"),
            ({"name": 3}, "policy: name must be a text and is 3"),
            ({"ops": [("softmx", "fp32")]}, r"unknown operator 'softmx'.*did you mean 'softmax'\?"),
            ({"ops": [("cnv*", "fp32")]}, r"operator pattern 'cnv\*' matches no operator"),
            (
                {"ops": [("softmax", "fp23")]},
                r"rule of 'softmax' in ops must be .* and is 'fp23'; did you mean 'fp32'\?",
            ),
            ({"ops": "softmax"}, r"policy: ops='softmax'; expected pairs of \(pattern, rule\)"),
            (
                {"ops": [("softmax",)]},
                r"policy: ops contains \('softmax',\); expected a pair of strings \(pattern, rule\)",
            ),
            (
                {"modules": [("head", "widest")]},
                "rule of 'head' in modules must be one of 'low', 'fp32', 'keep'",
            ),
            ({"modules": [(1, "low")]}, r"policy: modules contains \(1, 'low'\)"),
            ({"scale": "apx"}, r"policy: scale must be one of 'auto', 'none', .* and is 'apx'; did you mean 'apex'\?"),
            ({"scale": 0}, "policy: scale must be .* a positive number in fp32, or a ScaleRule and is 0"),
            ({"scale": float("inf")}, "policy: scale must be .* and is inf"),
            ({"scale": True}, "policy: scale must be .* and is True"),
            ({"scale": None}, "policy: scale must be .* and is None"),
        ],
    )
    def test_name_the_value_and_what_was_expected(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(PolicyError, match=message):
            Policy(**fields)
        with pytest.raises(ValueError, match=message):
            Policy.of("mixed", **fields)

    def test_unknown_field_names_the_nearest(self) -> None:
        with pytest.raises(PolicyError, match=r"a policy has no field 'residuals'.*did you mean 'residual'\?"):
            Policy.of("mixed", residuals="low")


class TestOf:
    def test_preset_policy_and_overrides(self) -> None:
        assert Policy.of("O2") is PRESETS["O2"]
        assert Policy.of(PRESETS["O2"]) is PRESETS["O2"]
        assert Policy.of("O2", dtype="fp16") == dataclasses.replace(PRESETS["O2"], dtype="fp16")

    def test_toml_file_by_path_or_name(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.toml"
        file.write_text('preset = "O2"\ndtype = "fp16"\nname = "mine"\n', encoding="utf-8")
        want = PRESETS["O2"].replace(dtype="fp16", name="mine")
        assert Policy.of(file) == Policy.of(str(file)) == want
        assert Policy.of(file, dtype="bf16") == want.replace(dtype="bf16")

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match=r"cannot read the policy file .*none\.toml"):
            Policy.of(tmp_path / "none.toml")

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ("mixd", r"unknown preset 'mixd'; expected one of O0, torch, .*did you mean 'mixed'\?"),
            (None, "a policy is a preset's name, a path or a Policy, not NoneType None"),
            (16, "not int 16"),
        ],
    )
    def test_what_is_no_policy(self, wrong: Any, message: str) -> None:
        with pytest.raises(PolicyError, match=message):
            Policy.of(wrong)


class TestWith:
    def test_ops_append_and_leave_the_original(self) -> None:
        first = Policy().with_ops(fp32=["F.softmax"], low=["conv*"])
        second = first.with_ops(keep=["softmax"], widest=["cat"], banned=["pow"])
        assert first.ops == (("conv*", "low"), ("softmax", "fp32"))
        assert second.ops == (*first.ops, ("softmax", "keep"), ("cat", "widest"), ("pow", "banned"))
        assert Policy().ops == ()

    def test_modules_append(self) -> None:
        policy = Policy().with_modules({"a": "fp32"}).with_modules({"class:LayerNorm": "keep", "": "low"})
        assert policy.modules == (("a", "fp32"), ("class:LayerNorm", "keep"), ("", "low"))

    def test_a_string_is_not_a_list(self) -> None:
        with pytest.raises(
            PolicyError, match=r"with_ops\(fp32='softmax'\) takes a list of operators: fp32=\['softmax'\]"
        ):
            Policy().with_ops(fp32="softmax")

    def test_unknown_operator(self) -> None:
        with pytest.raises(PolicyError, match=r"did you mean 'softmax'\?"):
            Policy().with_ops(low=["softmx"])


def test_scale_takes_every_named_rule() -> None:
    for name, rule in SCALE_RULES.items():
        assert Policy(scale=name).scale == name
        assert Policy(scale=rule).scale is rule
