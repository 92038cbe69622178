from __future__ import annotations

import dataclasses

import pytest

import halfstep as hs
from halfstep.tasks.speed import DeviceSpeed, Speed, WorkSpeed, advise, decided, rows_for_o2
from halfstep.timing import Ratio

QUIET = Ratio(median=1.0, low=0.99, high=1.01, rounds=20)
BOTH = hs.policy.Units("cpu", bf16=True, fp16=True, reason="it has both")
BF16 = hs.policy.Units("cpu", bf16=True, fp16=False, reason="it has bf16 units")
FP16 = hs.policy.Units("cpu", bf16=False, fp16=True, reason="it has fp16 units")
NONE = hs.policy.Units("cpu", bf16=False, fp16=False, reason="it has no units")


def ratio(median: float) -> Ratio:
    return Ratio(median=median, low=median * 0.98, high=median * 1.02, rounds=20)


def work(name: str, gains: dict[str, float], control: Ratio = QUIET) -> WorkSpeed:
    rows = [
        Speed(label=label, gflops=100 * gain, faster=ratio(gain), decided=decided(ratio(gain), control))
        for label, gain in gains.items()
    ]
    return WorkSpeed(work=name, size="n", control=control, speeds=(Speed(label="fp32", gflops=100, faster=None), *rows))


def speed(product: dict[str, float], convolution: dict[str, float]) -> DeviceSpeed:
    works = (work("matrix product", product), work("convolution", convolution))
    return DeviceSpeed(device="cpu", works=works, cast_seconds=1e-9)


def test_bf16_where_it_is_faster() -> None:
    advice = advise(BF16, speed({"bf16": 3.1, "fp16 emulated": 0.9}, {"bf16": 2.0, "fp16 emulated": 0.8}))
    assert (advice.preset, advice.dtype) == ("mixed", "bf16")
    assert advice.why[0] == "bf16 reaches 3.1 times fp32's speed in a matrix product, 2.0 times in a convolution, " + (
        "forward and backward"
    )
    assert any("emulated with a GPU's numerics, reaches 0.9 times fp32's speed" in what for _, what in advice.also)
    assert any("`lean`" in what for _, what in advice.also)  # fp16 weights would be stepped by the optimizer itself


def test_a_gain_in_one_kind_of_work_is_said_to_be_one() -> None:
    advice = advise(BOTH, speed({"bf16": 2.0, "fp16": 2.0}, {"bf16": 0.7, "fp16": 0.7}))
    assert advice.dtype == "bf16" and "fp16 is not clearly faster" in advice.why[-1]
    assert ("the model is mostly convolutions", "`O0`, which stays in fp32: bf16 gains nothing there") in advice.also


def test_fp16_where_only_it_has_units_and_the_code_names_it() -> None:
    advice = advise(FP16, speed({"bf16": 0.5, "fp16": 4.0}, {"bf16": 0.5, "fp16": 3.0}))
    assert (advice.preset, advice.dtype) == ("mixed", "fp16") and not any("`lean`" in what for _, what in advice.also)
    assert advice.code == 'policy=hs.Policy.of("mixed", dtype="fp16")'
    assert "bf16 would need no loss scale, but reaches only 0.5 times fp32's speed" in advice.why[1]


def test_fp32_where_nothing_is_faster() -> None:
    advice = advise(NONE, speed({"bf16": 0.4, "fp16": 0.01}, {"bf16": 0.9, "fp16": 0.02}))
    assert (advice.preset, advice.dtype, advice.code) == ("O0", "fp32", 'policy="O0"')
    assert advice.why[0] == "it has no units" and "bf16 reaches 0.4 times fp32's speed" in advice.why[1]
    assert [case for case, _ in advice.also][0] == "memory is short"


def test_a_format_without_units_is_never_advised_however_fast_a_disturbed_timing_makes_it() -> None:
    assert advise(NONE, speed({"bf16": 1.8, "fp16": 2.5}, {})).dtype == "fp32"


def test_a_difference_that_the_machine_does_not_resolve_is_none() -> None:
    noisy = Ratio(median=1.0, low=0.6, high=1.7, rounds=5)
    works = (work("matrix product", {"bf16": 1.5}, noisy), work("convolution", {"bf16": 0.8, "fp16 emulated": 1.01}))
    advice = advise(BF16, DeviceSpeed(device="cpu", works=works, cast_seconds=0.0))
    assert (
        advice.dtype == "fp32" and "an undecided 1.47 to 1.53 times fp32's speed in a matrix product" in advice.why[1]
    )
    assert "0.8 times in a convolution" in advice.why[1] and "1.0 times" not in " ".join(advice.why)
    assert advice.why[2] == "undecided for bf16, which has units here: measure again on a quiet machine"
    rehearsal = advice.also[-1][1]
    assert "reaches an undecided 0.99 to 1.03 times fp32's speed in a convolution" in rehearsal


def test_units_without_a_gain_are_not_followed() -> None:
    advice = advise(BF16, speed({"bf16": 1.05}, {"bf16": 0.9}))
    assert advice.dtype == "fp32"


def test_rows_for_o2_balance_casts_and_products() -> None:
    measured = speed({"bf16": 3.0}, {})
    rows = rows_for_o2(measured, "bf16")
    products = rows * 6 / 300e9  # seconds for one element of a weight, forward and backward
    assert 1e-9 == pytest.approx(0.2 * products, rel=0.25)
    assert rows_for_o2(dataclasses.replace(measured, cast_seconds=0.0), "bf16") == 0
    assert rows_for_o2(measured, "fp16") == 0
