"""The fake CUDA device, and what is counted on it: two processes, started once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.testing import FakeCudaError, fake_cuda, run_python
from halfstep.testing.__main__ import main
from halfstep.testing.fake_cuda import build, missing

MIB = 2.0**20
SCRIPT = Path(__file__).parent / "on_fake_cuda.py"
device = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def start(*words: str) -> str:
    places = Path(sys.modules["halfstep"].__file__ or "").parent.parent, Path(__file__).parents[2]
    done = run_python(words, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))})
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The output of `on_fake_cuda.py`."""
    answer: dict[str, Any] = json.loads(start(str(SCRIPT)))
    return answer


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The counts of the GPT, by program."""
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    programs = ("torch.amp:fp16", "pure:fp16", "pure:bf16", "limit:fp16")
    words = [word for program in programs for word in ("--program", program)]
    text = start("-m", "benchmarks.count", "--model", "gpt", *words, "--detail", "--json", str(path))
    assert "| torch.amp:fp16 | 94 |" in text
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["torch"] == torch.__version__ and report["command"].startswith("python -m benchmarks.count")
    programs_found: dict[str, Any] = report["models"]["gpt"]
    return {name: {**program, **program["summary"]} for name, program in programs_found.items()}


# ------------------------------------------------------------------------------------------ the numbers


@device
def test_torch_amp_moves_what_was_counted_before(counted: dict[str, Any]) -> None:
    """GPT of 5.29M parameters, fused AdamW, clipping; the numbers were taken by another program."""
    fp16 = counted["torch.amp:fp16"]
    assert fp16["parameters"] == 5_289_472
    assert (fp16["casts"], fp16["casts_weight"], fp16["casts_down"]) == (94, 33, 18)
    assert fp16["casts_up"] + fp16["casts_gradient"] == 43
    assert (round(fp16["cast_bytes"] / MIB), round(fp16["bytes"] / MIB)) == (135, 808)
    assert round(fp16["tail_bytes_per_parameter"]) == 48
    assert round(fp16["saved_bytes"] / MIB, 1) == 69.6
    assert fp16["launches_tail"] == 20 and fp16["syncs"] == 0


@device
def test_casts_of_weights_and_their_gradients_cost_twelve_bytes_each(counted: dict[str, Any]) -> None:
    rows = [row for row in counted["torch.amp:fp16"]["rows"] if row["kind"] in {"weight", "gradient"}]
    assert {(row["phase"], row["kind"], row["casts"]) for row in rows} == {
        ("forward", "weight", 33),
        ("backward", "gradient", 33),
    }
    assert sum(row["read"] + row["written"] for row in rows) == 12 * (5_289_472 - (4096 + 128) * 256 - 9 * 2 * 256)


@device
def test_the_limit_casts_nothing(counted: dict[str, Any]) -> None:
    limit = counted["limit:fp16"]
    assert limit["casts"] == 0 and limit["tail_bytes_per_parameter"] == pytest.approx(14, abs=0.01)


@device
@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_pure_casts_nothing_on_its_way_but_logits(counted: dict[str, Any], form: str) -> None:
    rows = [row for row in counted[f"pure:{form}"]["rows"] if row["casts"] and row["phase"] != "tail"]
    assert sum(row["casts"] for row in rows) <= 3
    assert counted[f"pure:{form}"]["bytes"] < counted["torch.amp:fp16"]["bytes"]
    assert counted[f"pure:{form}"]["syncs"] == 0


# ------------------------------------------------------------------------------------------ waits


@device
def test_no_preset_waits_for_the_device(found: dict[str, Any]) -> None:
    others = ("RMSprop",) if torch.__version__ >= "2.13" else ("RMSprop", "Adagrad")  # torch has no fused one before
    waits = {key: where for key, where in found["syncs"].items() if not key.endswith(others)}
    assert len(waits) == 5 * 2 * (6 - len(others)) and not any(waits.values()), waits


@device
def test_an_optimizer_without_a_device_predicate_costs_one_wait_which_is_named(found: dict[str, Any]) -> None:
    waits = [where for key, where in found["syncs"].items() if key.endswith("RMSprop")]
    assert all(len(where) == 1 and where[0].startswith("optimizer_step.py:") for where in waits) and len(waits) == 10


@device
def test_a_loop_of_ones_own_waits_for_nothing(found: dict[str, Any]) -> None:
    assert found["loops"] == {"fp16": 0, "bf16": 0}


@device
def test_an_average_over_ranks_waits_for_nothing(found: dict[str, Any]) -> None:
    waits = found["ranks"]
    assert len(waits) == 6 and all(one == [[], 0] for one in waits.values()), waits


@device
def test_without_triton_torch_s_operators_update_and_wait_for_nothing(found: dict[str, Any]) -> None:
    assert found["without triton"] == ["no compiler", 0, []]


@device
def test_modules_made_inside_reach_the_device_in_every_way_and_stay_the_same_objects(found: dict[str, Any]) -> None:
    ways = dict.fromkeys(("to", "cuda", "to_empty", "deepcopy"), ["cuda:0", 0])
    assert found["inside"] == {**ways, "tied": ["cuda:0", True, True, True]}


@device
def test_a_model_moved_after_its_step_was_made_computes_low_there(found: dict[str, Any]) -> None:
    assert found["moved after"] and set(found["moved after"]) == {"torch.bfloat16"}


@device
def test_a_device_without_float64_is_asked_for_none(found: dict[str, Any]) -> None:
    assert found["float64"] == {"widens": "TypeError: aten._to_copy.default made float64"}


@device
def test_linear_cross_entropy_moves_little_more_than_its_parts_and_saves_no_logits(found: dict[str, Any]) -> None:
    for size in found["linear losses"]:
        assert size["to_pair"] <= 1.34 and size["saved_to_logits"] < 0.001 and size["launches"] < 60


@device
def test_copies_between_devices_are_waits(found: dict[str, Any]) -> None:
    assert found["moves"] == ["aten::_to_copy", "aten::_to_copy", "aten::_local_scalar_dense"]


@device
def test_shapes_that_depend_on_values_are_refused(found: dict[str, Any]) -> None:
    assert "what aten::nonzero returns depends on values (on_fake_cuda.py:" in found["shapes"]
    assert "count this step on CPU tensors" in found["shapes"]


@device
def test_the_device_has_low_units_and_goes_with_its_block(found: dict[str, Any]) -> None:
    assert found["auto"] == ["auto", "compute capability 9.0 has bf16 and fp16 units"]
    assert found["after"] is torch.cuda.is_available()


# ------------------------------------------------------------------------------------------ the library


@device
def test_the_library_is_built_once() -> None:
    before = build().stat().st_mtime_ns
    assert build().stat().st_mtime_ns == before


def test_a_process_without_it_is_told_what_to_do() -> None:
    with (
        pytest.raises(FakeCudaError, match=r"no fake CUDA device.*python -m halfstep\.testing script\.py"),
        fake_cuda(),
    ):
        raise AssertionError("not reached")


def test_without_a_compiler_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FakeCudaError, match=r"built (with g\+\+, which is not on the PATH|for Linux)"):
        build()
    assert not list(tmp_path.rglob("*.so"))
    assert main(["script.py"]) == 2 and "fake CUDA device" in capsys.readouterr().err


def test_the_door_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main([]), main(["--help"])) == (2, 0)
    assert capsys.readouterr().out.count("usage: python -m halfstep.testing script.py") == 2


def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    module = sys.modules[FakeCudaError.__module__]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "fake_cuda.cpp"
    source.write_text("#error out of order\n")
    monkeypatch.setattr(module, "SOURCE", source)
    with pytest.raises(FakeCudaError, match="g.. could not compile the fake CUDA device for torch .*out of order"):
        build()
    assert not list(tmp_path.rglob("*.so"))


def test_a_plan_for_a_gpu_has_blocks_of_its_allocator_and_the_same_parts(found: dict[str, Any]) -> None:
    cpu, gpu = found["plans"]["cpu"], found["plans"]["cuda"]
    parameters, states = 8, 8 * 3  # of two linear layers and two norms; AdamW's, with a count of steps
    assert gpu[2]["parameters"] == 512 * parameters and gpu[2]["optimizer state"] == 512 * states
    assert set(gpu[2]) == set(cpu[2]) and gpu[1] > cpu[1] and gpu[0] > gpu[1]
    assert cpu[3] == [] and [note.partition(" of")[0] for note in gpu[3]] == ["planned on a fake GPU"]
