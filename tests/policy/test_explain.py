"""Explain and diff: text for people whose lines can be parsed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from halfstep.errors import PolicyError
from halfstep.policy import PRESETS, Policy
from halfstep.policy.operators import known
from halfstep.policy.resolve import operator_rules
from halfstep.policy.scale_rule import ScaleRule
from tests.policy.strategies import policies


class TestExplain:
    @pytest.mark.parametrize(
        ("policy", "what", "lines"),
        [
            (
                PRESETS["mixed"],
                "F.softmax",
                ["policy 'mixed'", "operator softmax: keep, decided by table 'mixed'", "  because between 0 and 1"],
            ),
            (
                PRESETS["torch"],
                "layer_norm",
                [
                    "operator layer_norm on cpu: no rule: runs in its inputs' format",
                    "operator layer_norm on cuda: fp32, decided by table 'torch'",
                    "  because torch.autocast casts every eligible argument to fp32 (torch 2.13.0",
                ],
            ),
            (PRESETS["mixed"], "gelu", ["operator gelu: no rule: runs in its inputs' format (table 'mixed'"]),
            (PRESETS["O2"], "embedding", ["operator embedding: low, decided by field 'residual'"]),
            (
                Policy().with_ops(fp32=["softmax"]).with_ops(low=["soft*"]),
                "softmax",
                [
                    "Policy(ops=(('softmax', 'fp32'), ('soft*', 'low')))",
                    "operator softmax: low, decided by field 'ops'",
                    "  because ops: 'soft*' = 'low'",
                    "  overruled: ops 'softmax' = 'fp32' (a later entry matches)",
                ],
            ),
            (PRESETS["mixed"], "conv?d", ["operator conv1d: low", "operator conv2d: low", "operator conv3d: low"]),
            (
                Policy(name="p", modules=(("decoder.*.norm", "fp32"), ("decoder", "low"))),
                "decoder.1.norm",
                [
                    "module decoder.1.norm: low, decided by field 'modules'",
                    "  because 'decoder' = 'low' is the last pattern",
                    "  overruled: 'decoder.*.norm' = 'fp32' (a later entry matches)",
                ],
            ),
            (
                Policy(modules=(("decoder", "low"), ("class:*Norm*", "fp32"))),
                "decoder.1",
                ["module decoder.1: low", "  unless its class matches: 'class:*Norm*' = 'fp32'"],
            ),
            (Policy(modules=(("class:*Norm*", "fp32"),)), "class:LayerNorm", ["module class:LayerNorm: fp32"]),
            (Policy(modules=(("head", "fp32"),)), "head", ["module head: fp32"]),
            (
                Policy(modules=(("norm", "fp32"),)),
                "norm",
                ["operator norm: fp32, decided by table", "module norm: fp32"],
            ),
            (Policy(), "decoder.norm", ["module decoder.norm: no rule of its own"]),
            (Policy(modules=(("", "keep"),)), "", ["module (root): keep"]),
        ],
    )
    def test_says_which_rule_decides_and_why(self, policy: Policy, what: str, lines: list[str]) -> None:
        text = policy.explain(what)
        position = -1
        for line in lines:  # in this order
            found = next((i for i, got in enumerate(text.splitlines()) if got.startswith(line) and i > position), None)
            assert found is not None, f"{line!r} is missing in:\n{text}"
            position = found

    def test_neither_operator_nor_module(self) -> None:
        with pytest.raises(PolicyError, match=r"unknown operator 'softmx'.*did you mean 'softmax'\?"):
            Policy().explain("softmx")

    @pytest.mark.parametrize("name", PRESETS)
    def test_has_words_for_every_operator(self, name: str) -> None:
        for op in known():
            assert f"operator {op}" in PRESETS[name].explain(op)


class TestDiff:
    @settings(max_examples=30, deadline=None)
    @given(policies())
    def test_of_a_policy_and_itself_is_empty(self, policy: Policy) -> None:
        assert policy.diff(policy) == ""

    def test_takes_what_of_takes(self) -> None:
        assert PRESETS["mixed"].diff("mixed") == ""

    def test_lists_fields_and_operators(self) -> None:
        other = Policy.of("mixed", dtype="fp16").with_ops(fp32=["softmax"], low=["gelu"])
        assert PRESETS["mixed"].diff(other).splitlines() == [
            "dtype: 'auto' -> 'fp16'",
            "ops: () -> (('gelu', 'low'), ('softmax', 'fp32'))",
            "input -> low: gelu",
            "keep -> fp32: softmax",
        ]

    def test_of_two_scale_rules_only_what_differs_is_shown(self) -> None:
        mine = PRESETS["O2"].replace(scale=ScaleRule(floor=1.0))
        assert mine.diff(mine.replace(scale=ScaleRule(floor=2.0, interval=9))).splitlines() == [
            "scale.interval: 2000 -> 9",
            "scale.floor: 1.0 -> 2.0",
        ]
        assert PRESETS["O2"].diff(mine) == "scale: 'auto' -> ScaleRule(floor=1.0)"

    def test_says_on_which_device(self) -> None:
        lines = PRESETS["torch"].diff("mixed").splitlines()
        assert "table: 'torch' -> 'mixed'" in lines
        norms = next(line for line in lines if line.startswith("fp32 -> low: "))
        assert "layer_norm on cuda" in norms
        assert "layer_norm on cpu" in next(line for line in lines if line.startswith("input -> low: "))

    @pytest.mark.parametrize("left", PRESETS)
    @pytest.mark.parametrize("right", PRESETS)
    def test_can_be_parsed_back(self, left: str, right: str) -> None:
        """Applying the operator lines to the left rules gives the right rules."""
        mine, wanted = PRESETS[left], PRESETS[right]
        for device in ("cpu", "cuda"):
            rules = {op: decision.rule for op, decision in operator_rules(mine, device).items()}
            for line in mine.diff(wanted).splitlines():
                change, _, names = line.partition(": ")
                if " -> " not in change:
                    continue
                before, after = change.split(" -> ")
                for name in names.split(", "):
                    op, _, only = name.partition(" on ")
                    if only in ("", device):
                        assert rules.pop(op, "input") == before
                        if after != "input":
                            rules[op] = after
            assert rules == {op: decision.rule for op, decision in operator_rules(wanted, device).items()}
