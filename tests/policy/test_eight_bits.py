"""Which linear layers a rule for eight bits converts, and the reasons for the others; torchao is not needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.policy.resolve import cuda_units, hip_units

BF16 = hs.Policy.of("O2", dtype="bf16")


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 272), nn.Linear(272, 1040), nn.LayerNorm(1040), nn.Linear(1040, 24), nn.Linear(24, 1040),
        nn.MultiheadAttention(1040, 4), nn.Linear(1040, 16), nn.Linear(16, 1056),
    )  # fmt: skip


def rules(wanted: hs.Policy, of: nn.Module) -> dict[str, tuple[str, str]]:
    return {m.path: (m.rule, m.reason) for m in hs.resolve(wanted, of).modules}


def test_each_layer_that_stays_has_its_reason() -> None:
    found = rules(BF16.with_modules({"*": "fp8"}), model())
    assert {path: reason for path, (rule, reason) in found.items() if not rule and reason.startswith("fp8")} == {
        "0": "fp8: the first linear layer of the model",
        "3": "fp8: 24 no multiple of 16",
        "4": "fp8: 24 no multiple of 16",
        "5.out_proj": "fp8: NonDynamicallyQuantizableLinear is not computed by the forward of torch.nn.Linear",
        "6": "fp8: 1040 x 16 is too small to gain",
        "7": "fp8: the last linear layer of the model",
    }
    assert found["1"] == ("fp8", "modules: '*' = 'fp8'")
    assert found["2"] == ("", "no pattern matches it")


def test_the_name_of_a_layer_converts_it_at_any_place_and_size() -> None:
    found = rules(BF16.with_modules({"[0367]": "fp8", "7": "fp8", "0": "fp8-rowwise"}), model())
    assert [found[path][0] for path in ("0", "3", "6", "7")] == ["fp8-rowwise", "", "", "fp8"]


def test_what_stays_follows_the_rules_before() -> None:
    plan = hs.resolve(BF16.with_modules({"7": "fp32", "2": "low", "*": "fp8-rowwise"}), model())
    found = {m.path: m.rule for m in plan.modules}
    assert [found[path] for path in ("0", "2", "7")] == ["", "low", "fp32"]
    formats = {p.name: p.format for p in plan.parameters}
    assert [formats[f"{i}.weight"] for i in (0, 1, 2, 7)] == ["bf16", "bf16", "bf16", "fp32"]


@pytest.mark.parametrize("dtype", ["fp32", "fp8_e4m3"])
def test_formats_that_eight_bits_do_not_stand_beside_convert_nothing(dtype: str) -> None:
    plan = hs.resolve(hs.Policy.of("mixed", dtype=dtype).with_modules({"1": "fp8"}), model())
    assert not any(m.rule for m in plan.modules)
    assert any(f"dtype {dtype!r} is neither 'bf16' nor 'fp16': 1" in note for note in plan.notes)


def test_a_layer_with_a_forward_of_its_own_stays() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    found = rules(BF16.with_modules({"0": "fp8"}), nn.Sequential(Twice(32, 32)))
    assert found["0"] == ("", "fp8: Twice is not computed by the forward of torch.nn.Linear")


def test_units_for_eight_bits() -> None:
    assert [cuda_units([c]).fp8 for c in ((8, 0), (8, 9), (9, 0))] == [False, True, True]
    assert not cuda_units([(9, 0), (8, 0)]).fp8
    assert [hip_units([a]).fp8 for a in ("gfx90a", "gfx942:sramecc+")] == [False, True]
    assert not hs.policy.units("cpu").fp8
