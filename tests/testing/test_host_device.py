"""The device that computes on the host: programs have the CPU's bits there, and nothing in them asks for CUDA.

One process runs `on_host_device.py`; this one keeps its accelerators as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.testing import HostDeviceError, host_device
from halfstep.testing.host_device import missing

SCRIPT = Path(__file__).parent / "on_host_device.py"
device = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def environment() -> dict[str, str]:
    """Return that of a process with this package, and without its own CPU kernels: other devices have none of them."""
    places = Path(sys.modules["halfstep"].__file__ or "").parent.parent, Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "HALFSTEP_NATIVE": "0"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The output of `on_host_device.py`."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# ------------------------------------------------------------------------------------------ the device


@device
def test_its_tensors_are_plain_ones_of_another_type(found: dict[str, Any]) -> None:
    about = found["device"]
    assert about["type"] == [True, "npu:0", False, "npu"] and about["copied"] == "npu"
    assert about["views"] == [[0.0, 2.0, 3.0], [3.0, 5.0, 6.0]] and about["out"]


@device
def test_it_has_generators_with_the_numbers_of_the_cpus(found: dict[str, Any]) -> None:
    assert found["device"]["drawn"] and found["device"]["global"]
    assert found["device"]["dropped"] == [True, False], "dropout draws from the device's generator, not from the CPU's"


@device
def test_a_process_has_one_such_device_under_one_name(found: dict[str, Any]) -> None:
    assert found["device"]["again"] == "npu:0"
    assert found["device"]["refused"] == [
        f"this process has a device of this kind, 'npu'; register {name!r} in another process"
        for name in ("other", "cuda")
    ]


@device
def test_torchs_autocast_has_its_lists_there_and_a_users_rule_holds_in_it(found: dict[str, Any]) -> None:
    assert found["rules"]["torch"] == ["torch.float16", *["torch.float32"] * 4]
    assert (
        found["rules"]["region"] == ["torch.float16", "torch.float32"] and found["rules"]["custom"] == "torch.float32"
    )


# ------------------------------------------------------------------------------------------ halfstep on it


@device
def test_what_is_trained_there_has_the_bits_of_the_cpu(found: dict[str, Any]) -> None:
    """Region, scaler, prepare and TrainStep, under policies that no device decides about."""
    assert len(found["equal"]) == 20
    assert {case: different for case, different in found["equal"].items() if different} == {}


@device
def test_a_bad_step_its_cause_metrics_and_a_checkpoint_are_as_on_the_cpu(found: dict[str, Any]) -> None:
    there, here = found["training"]["npu"], found["training"]["cpu"]
    assert there == here and there["skipped"] == [False, True, False] and there["resumed"]
    assert there["metrics"] == [0, *[1] * 6]
    assert there["verdict"][:3] == ["bad_batch", "data", "to"]


@device
def test_values_are_sent_to_the_host_behind_an_event(found: dict[str, Any]) -> None:
    assert found["sent"] == ["cuda", "npu"]
    assert found["streams"] == [0], "events are recorded on the tensors' device, whichever is the current one"


@device
def test_a_step_trains_under_a_default_device(found: dict[str, Any]) -> None:
    assert found["default device"] == [True] * 10


@device
def test_the_device_decides_about_auto_and_instruments_leave_its_generator_alone(found: dict[str, Any]) -> None:
    assert found["instruments"] == {
        "audited": True,
        "as before": True,
        "auto": ["npu", "bf16", "torch.npu.is_bf16_supported() is True"],
        "monitored": [1, 2, 3, 4],
    }


@device
def test_the_doctor_measures_and_advises_there(found: dict[str, Any]) -> None:
    seen = found["doctor"]
    assert seen["code"] == 0 and seen["printed"] and seen["units"]["device"] == "npu"
    assert seen["accelerator"] == "the host, by halfstep.testing.host_device"


@device
def test_a_program_of_apex_trains_there(found: dict[str, Any]) -> None:
    assert found["apex"] == sorted(found["apex"], reverse=True) and found["apex"][-1] < found["apex"][0] - 0.3


@device
def test_a_model_that_is_moved_there_computes_in_the_formats_of_its_policy(found: dict[str, Any]) -> None:
    assert found["moved"]["formats"] == ["torch.bfloat16"] * 3
    assert found["moved"]["refused"].startswith(
        "the model was prepared on 'cpu' with policy 'mixed' and moved to 'npu', where"
    )


@device
def test_a_model_whose_parameters_are_placed_there_one_by_one_follows_them_or_says_why_not(
    found: dict[str, Any],
) -> None:
    placed = found["moved"]["placed"]
    assert [placed[way] for way in ("replaced", "children", "to_empty")] == [["torch.bfloat16"] * 3] * 3
    assert placed["low"] == (
        "the model was prepared on 'cpu', and others without fp32 values behind them were put in the place of its low "
        "parameters, on 'npu'; place the model first, then call hs.prepare"
    )


@device
def test_updates_there_read_nothing_from_the_device(found: dict[str, Any]) -> None:
    assert found["reads"] == {"AdamW": 0, "SGD": 0}


# ------------------------------------------------------------------------------------------ errors


def test_without_a_compiler_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostDeviceError, match=r"the host device is built (with g\+\+, which is not|for Linux)"):
        host_device()


@pytest.mark.parametrize("name", ["cuda", "two words", ""])
def test_a_name_of_torch_or_no_word_is_refused(name: str) -> None:
    with pytest.raises(HostDeviceError, match=r"expected a word that torch does not use, such as 'npu'"):
        host_device(name)


# ------------------------------------------------------------------------------------------ the page


@device
@pytest.mark.slow
def test_the_program_of_the_page_prints_what_it_states() -> None:
    page = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text(encoding="utf-8")
    program = page.partition("python - <<'EOF'\n")[2].partition("EOF\n")[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == program.rstrip().rpartition("#")[2].strip() == "npu:0 65536.0", done.stderr
