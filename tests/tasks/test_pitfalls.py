from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.tasks.machine import cores_granted, pitfalls, threads_to_use
from halfstep.tasks.speed import DeviceSpeed, Speed, WorkSpeed
from halfstep.timing import Ratio


def speed(device: str = "cpu", spread: float = 0.01, **gains: float) -> DeviceSpeed:
    control = Ratio(median=1.0, low=1 / (1 + spread), high=1.0, rounds=9)
    rows = tuple(
        Speed(label=label, gflops=1.0, faster=Ratio(median=gain, low=gain, high=gain, rounds=9))
        for label, gain in gains.items()
    )
    work = WorkSpeed(work="matrix product", size="n", control=control, speeds=rows)
    return DeviceSpeed(device=device, works=(work,), cast_seconds=1e-9)


def found(**settings: Any) -> str:
    quiet: dict[str, Any] = {"speeds": [speed()], "threads": 4, "cores": 4}
    settings = {**quiet, **settings}
    return "\n".join(pitfalls(settings.pop("speeds"), **settings))


def test_a_quiet_machine_has_none() -> None:
    assert found() == ""
    assert found(threads=4, cores=8) == ""  # torch's own choice where a core has two hardware threads


def test_threads() -> None:
    assert found(threads=1) == "torch runs 1 of 4 cores; torch.set_num_threads(4)"
    by = found(threads=2, environ={"OMP_NUM_THREADS": "2"})
    assert by == "torch runs 2 of 4 cores; unset OMP_NUM_THREADS (OMP_NUM_THREADS=2)"
    assert found(granted=1.5).endswith("torch.set_num_threads(1)")
    assert found(granted=4.0) == ""


def test_variables_that_change_what_a_format_means() -> None:
    text = found(environ={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "NVIDIA_TF32_OVERRIDE": "", "HOME": "/"})
    assert text.startswith("ONEDNN_DEFAULT_FPMATH_MODE=BF16: ") and "\n" not in text


def test_switches_of_torch() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert "torch.get_float32_matmul_precision() is 'medium'" in found()
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms are on" in found()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_autocast_cache_enabled(False)
    try:
        assert "autocast's cache is off" in found()
    finally:
        torch.set_autocast_cache_enabled(True)


def test_missing_parts_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "this torch has no oneDNN" in found()


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build for CPUs; install a CUDA build" in found()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "(CUDA 13.0) cannot use; look at the driver's version" in found()


def test_what_is_special_about_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: ((8, 0), (7, 5))[i])
    text = found(speeds=[speed("cuda", tf32=7.2)])
    assert "cuDNN is missing" in text and "compute capability 7.5 and 8.0" in text
    assert "7.2 times as fast in matrix products; torch.set_float32_matmul_precision('high')" in text
    assert "allow_fp16_reduced_precision_reduction = False" in text
    assert "tf32, which" not in found(speeds=[speed("cuda", tf32=1.1)])


def test_noise() -> None:
    assert "load average 3.0 on 4 cores" in found(load=3.0) and found(load=0.5) == ""
    text = found(speeds=[speed(), speed("xpu", spread=0.25)])
    assert text.startswith("identical fp32 programs differed by up to 25% (matrix product on xpu)")


@pytest.mark.parametrize(
    ("threads", "cores", "load", "used"),
    [(2, 2, 0.1, 2), (2, 2, 1.0, 1), (2, 2, 9.0, 1), (4, 8, 3.0, 4), (8, 8, 3.0, 5)],
)
def test_measuring_uses_the_free_cores(threads: int, cores: int, load: float, used: int) -> None:
    assert threads_to_use(threads, cores, load) == used


@pytest.mark.parametrize(
    ("text", "granted"), [("150000 100000", 1.5), ("max 100000", None), ("", None), ("a b", None), (None, None)]
)
def test_what_a_container_grants(tmp_path: Path, text: str | None, granted: float | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert cores_granted(tmp_path) == granted
