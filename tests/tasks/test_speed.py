from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import halfstep as hs
from halfstep.tasks import speed
from halfstep.tasks.speed import Sizes, decided, measure_speed, sizes_for
from halfstep.timing import Ratio

TINY = Sizes(product=16, small_product=8, image=(1, 4, 8), small_image=(1, 2, 4), seconds=0.0)


@pytest.mark.parametrize(("bf16", "fp16"), [(True, False), (True, True), (False, False)])
def test_formats_without_units_run_in_the_small_size(bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hs.policy, "units", lambda device: hs.policy.Units(device, bf16=bf16, fp16=fp16, reason=""))
    measured = measure_speed("cpu", TINY)
    found = {(work.work, work.size): [each.label for each in work.speeds] for work in measured.works}
    has = ["fp32"] + ["bf16"] * bf16 + ["fp16"] * fp16 + ["fp16 emulated"] * (not fp16)
    lacks = ["bf16"] * (not bf16) + ["fp16"] * (not fp16)
    assert found[("matrix product", "16 x 16 x 16")] == has
    assert found[("convolution", "1 x 4 x 8 x 8, 3x3")] == has
    assert found.get(("matrix product", "8 x 8 x 8"), ["fp32"]) == ["fp32", *lacks]
    assert measured.cast_seconds > 0
    for work in measured.works:
        assert work.speeds[0].faster is None and all(each.gflops > 0 for each in work.speeds)
        assert all(each.faster is not None and each.faster.rounds == 5 for each in work.speeds[1:])


def test_what_is_measured_is_announced() -> None:
    said: list[str] = []
    measure_speed("cpu", TINY, on_step=said.append)
    assert said == ["matrix product on cpu", "convolution on cpu", "casts on cpu"]


def test_operations_are_counted_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "timed", lambda run, device: 1e-9)
    product, convolution = measure_speed("cpu", TINY).works[:2]
    assert product.speeds[0].gflops == pytest.approx(3 * 2 * 16**3)
    assert convolution.speeds[0].gflops == pytest.approx(3 * 2 * 8 * 8 * 4 * 4 * 9)


def test_a_speed_is_decided_only_beyond_what_identical_programs_differ_by() -> None:
    def of(median: float, low: float, high: float) -> Ratio:
        return Ratio(median=median, low=low, high=high, rounds=9)

    def control(low: float, high: float) -> Ratio:
        return of(1.0, low, high)

    assert decided(of(1.2, 1.1, 1.3), control(0.95, 1.05)) and decided(of(0.05, 0.04, 0.2), control(0.95, 3.0))
    assert not decided(of(1.2, 1.1, 1.3), control(0.95, 1.3))
    assert not decided(of(1.2, 1.1, 1.3), control(0.7, 1.0))
    assert not decided(of(1.2, 0.9, 1.3), control(0.99, 1.01))
    assert not decided(None, control(0.99, 1.01))


def test_tf32_is_switched_on_cuda_alone_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, conv = SimpleNamespace(fp32_precision="none"), SimpleNamespace(fp32_precision="tf32")
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends.cudnn, "conv", conv)
    with speed._tf32("cpu", allowed=True):
        assert (matmul.fp32_precision, conv.fp32_precision) == ("none", "tf32")
    with pytest.raises(ZeroDivisionError), speed._tf32("cuda", allowed=False):
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
        raise ZeroDivisionError
    assert (matmul.fp32_precision, conv.fp32_precision) == ("none", "tf32")


def test_quick_sizes_are_smaller() -> None:
    for device in ("cpu", "cuda"):
        whole, quick = sizes_for(device), sizes_for(device, quick=True)
        assert quick.product < whole.product and quick.seconds < whole.seconds


@pytest.mark.gpu
def test_a_gpu_is_measured_too() -> None:
    measured = measure_speed("cuda", TINY)
    assert "fp16" in [each.label for work in measured.works for each in work.speeds]
