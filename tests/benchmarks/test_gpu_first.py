"""The first minutes on a GPU: blocks hide no other, and every line of them runs on a CPU."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks import gpu_blocks, gpu_dry, gpu_first, gpu_kernels
from benchmarks.gpu_first import BLOCKS, MARK, TEN_MINUTES, Block, measure, summary
from tests.kernels.cases import COMBINATIONS, FORMS


def python(code: str, seconds: int = 20, *, alone: bool = True) -> Block:
    command = (sys.executable, "-S", "-c", code)
    return Block(title="a block", look="", seconds=seconds, commands=(command,), alone=alone)


def test_a_block_that_fails_dies_or_hangs_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_first, "GRACE", 0.2)
    file = tmp_path / "results" / "gpu.json"
    first = f"print({MARK!r} + '{{\"n\": 1}}', flush=True);print({MARK!r} + '{{\"n\"', flush=True);"  # one is cut off
    blocks = {
        "0": python(first + "raise SystemExit(3)"),
        "1": python(first + "import os; os.kill(os.getpid(), 11)"),
        "2": python(first + "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)", seconds=2),
        "3": python(first + f"print({MARK!r} + '{{\"m\": [2]}}'); print('words')"),
    }
    begun = time.monotonic()
    report = measure(blocks, tuple(blocks), file, device="cpu", small=True, seconds=60)
    assert time.monotonic() - begun < 20
    assert json.loads(file.read_text()).items() > report.items() and list(report["blocks"]) == ["0", "1", "2", "3"]
    found = {number: done["processes"][0] for number, done in report["blocks"].items()}
    assert [found[n]["exit"] for n in "0123"] == [3, -11, -9, 0]
    assert [found[n]["timed_out"] for n in "0123"] == [False, False, True, False]
    assert [report["blocks"][n]["passed"] for n in "0123"] == [False, False, False, True]
    assert all(found[n]["found"]["n"] == 1 for n in "0123")  # what was reported before is kept
    assert found["3"]["found"] == {"n": 1, "m": [2]} and found["3"]["output"].endswith("\nwords")
    assert report["machine"] == {"n": 1}
    assert capsys.readouterr().out.count("FAILED") == 3
    assert file.with_suffix(".log").read_text().count(f'{MARK}{{"n": 1}}') == 4
    again = measure(blocks, ("3", "0"), file, device="cpu", small=True, seconds=0)
    assert again["blocks"]["1"] == report["blocks"]["1"] and not again["blocks"]["3"]["passed"]  # no time left
    assert list(json.loads(file.read_text())["blocks"]) == ["0", "1", "2", "3"]
    lines = summary(again, tuple(blocks))
    assert lines[0] == "0 of 4 blocks passed, failed:" and [line[0] for line in lines[1:]] == ["0", "1", "2", "3"]
    assert "out of time" in lines[3] and "no time was left" in lines[4] and len(lines) == 5


def test_a_line_is_in_the_log_before_its_process_ends(tmp_path: Path) -> None:
    """So that a machine that is taken away leaves what was found."""
    log = tmp_path / "gpu.log"
    waits = f"import time\nwhile '{MARK}' not in open({str(log)!r}).read(): time.sleep(0.01)"
    block = python(f"print({MARK!r} + '{{}}', flush=True)\n{waits}")
    report = measure({"0": block}, ("0",), tmp_path / "gpu.json", device="cpu", small=True, seconds=20)
    assert report["blocks"]["0"]["passed"]


def test_blocks_that_only_check_run_at_the_same_time_and_those_that_measure_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_first, "AT_ONCE", 2)
    meets = "import os, time\nopen({mine!r}, 'w')\nwhile not os.path.exists({other!r}): time.sleep(0.01)"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    alone = f"import os\nassert os.path.exists({a!r})\nos.remove({a!r})"
    blocks = {
        "a": python(meets.format(mine=a, other=b), alone=False),
        "b": python(meets.format(mine=b, other=a), alone=False),
        "c": python(alone),
        "d": python(f"import os\nassert not os.path.exists({a!r})"),
    }
    report = measure(blocks, tuple(blocks), None, device="cpu", small=True, seconds=60)
    assert summary(report, tuple(blocks)) == ["4 of 4 blocks passed"]


def test_all_limits_together_are_ten_minutes() -> None:
    """Also if every block hangs on 16 cores: only the last, the rest of the kernels' tests, takes what is left."""
    *others, last = BLOCKS.values()
    checks = [block.seconds for block in others if not block.alone]
    waves = math.ceil(len(checks) / 8)
    limits = [*(block.seconds for block in others if block.alone), *[max(checks)] * waves]
    assert not last.alone and sum(limits) + len(limits) * gpu_first.GRACE <= TEN_MINUTES


def test_every_command_is_there() -> None:
    """A name that a refactoring has changed would be found on the GPU only."""
    for name, block in BLOCKS.items():
        assert block.title and block.look, name
        for words in (*block.commands, *block.small):
            assert "benchmarks.gpu_blocks" not in words or words[3] in gpu_blocks.BLOCKS
            assert all((gpu_first.ROOT / word).is_file() for word in words if word.startswith("tests/"))
    assert gpu_blocks.BLOCKS.keys() < BLOCKS.keys()


def test_the_sample_has_every_form_and_format() -> None:
    sample = [COMBINATIONS[n] for n in gpu_first.FORMS]
    assert {row[:2] for row in sample} == set(FORMS)
    assert {row[2] for row in sample} == {torch.float32, torch.bfloat16, torch.float16}
    assert {row[3] for row in sample} == {torch.float32, torch.bfloat16}


# ------------------------------------------------------------------ every line


HEAVY = ("steps", "channels_last", "compiled", "first_step", "no_compiler", "two_devices", "two_ranks")
FILES = {str(module.__file__): module for module in (gpu_blocks, gpu_dry, gpu_kernels)}


def lines_of(module: ModuleType) -> set[int]:
    """Return the lines of a module's functions but `main`, which processes of blocks run."""
    found, codes = set[int](), [(compile(inspect.getsource(module), "", "exec"), False)]
    while codes:
        code, inside = codes.pop()
        inner = [const for const in code.co_consts if isinstance(const, CodeType) and const.co_name != "main"]
        codes += [(const, inside or bool(const.co_flags & inspect.CO_OPTIMIZED)) for const in inner]
        if inside and not code.co_name.startswith("<"):
            found |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
    return found


@contextmanager
def traced(seen: dict[str, set[int]]) -> Iterator[None]:
    """Note the lines of `FILES` that run."""

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        seen[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local(frame, event, argument) if frame.f_code.co_filename in seen else None

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)


def found_by(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a block small, on the stand-ins; return what it reports."""
    with gpu_dry.stand_ins(gpu_blocks):
        {**gpu_blocks.BLOCKS, **gpu_blocks.PARTS}[name]("cpu", True)
    found: dict[str, Any] = {}
    for line in capsys.readouterr().out.splitlines():
        found |= json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
    return found


@pytest.mark.parametrize("name", [name for name in gpu_blocks.BLOCKS if name not in HEAVY])
def test_a_block_runs_small_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert found_by(name, capsys)


def test_every_line_of_the_blocks_runs_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    child = gpu_blocks._child

    def once(name: str, device: str, small: bool, **environment: str) -> dict[str, Any]:
        """Start the process that has no compiler; parts that other processes run are run here too."""
        return child(name, device, small, **environment) if "CXX" in environment else {}

    monkeypatch.setattr(gpu_blocks, "_child", once)
    seen: dict[str, set[int]] = {file: set() for file in FILES}
    for name in (*gpu_blocks.BLOCKS, *gpu_blocks.PARTS):
        with traced(seen):
            found_by(name, capsys)
    missed = {module.__name__: sorted(lines_of(module) - seen[file]) for file, module in FILES.items()}
    assert missed == {module.__name__: [] for module in FILES.values()}


@pytest.mark.hours
def test_the_whole_dry_run_passes(tmp_path: Path) -> None:
    report = measure(BLOCKS, tuple(BLOCKS), tmp_path / "gpu.json", device="cpu", small=True, seconds=1200)
    assert summary(report, tuple(BLOCKS)) == [f"{len(BLOCKS)} of {len(BLOCKS)} blocks passed"]


# ------------------------------------------------------------------ what a reader must not be misled by


def event(start: float, end: float, *, name: str = "kernel", note: bool = False) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(time_range=span, name=name, device_type=DeviceType.CUDA, is_user_annotation=note)


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `_gaps` finds in given events of the device and calls of the host."""

    def found(events: list[Any], calls: list[Any], steps: int = 1) -> dict[str, Any]:
        seen = SimpleNamespace(events=lambda: events, key_averages=lambda: calls)
        monkeypatch.setattr(gpu_blocks, "profile", lambda **options: nullcontext(seen))
        monkeypatch.setattr(gpu_blocks, "wait", lambda device: None)
        run: Any = SimpleNamespace(step=lambda batch: None)
        return gpu_blocks._gaps(run, [None] * 4, steps, "cuda")

    return found


def test_a_named_phase_is_no_work_of_the_device(gaps: Any) -> None:
    kernels = [event(0, 1000), event(500, 2000, name="other"), event(5000, 6000)]
    named = gaps([*kernels, event(0, 6000, name="halfstep::backward", note=True)], [])
    assert named == gaps(kernels, [])
    assert (named["kernels"], named["device_ms"], named["idle_ms"]) == (3, 6.0, 3.0)
    assert named["longest_ms"] == {"kernel": 2.0, "other": 1.5}
    assert gaps([], [])["idle_ms"] == 0


def test_launches_are_the_hosts_calls_that_give_the_device_work(gaps: Any) -> None:
    names = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
    other = ("cudaStreamIsCapturing", "cudaEventRecord", "aten::copy_", "Memcpy DtoD (Device -> Device)")
    calls = [SimpleNamespace(key=name, count=4, cpu_time_total=0.0) for name in (*names, *other)]
    waits = [SimpleNamespace(key="cudaStreamSynchronize", count=2, cpu_time_total=3000.0)]
    found = gaps([event(0, 1)], [*calls, *waits], 2)
    assert found["launches"] == 10 and found["host_waits_ms"] == {"cudaStreamSynchronize": 1.5}


def test_the_time_of_a_kernel_has_no_part_of_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read around a replay, in which the call itself does not run."""
    calls: list[str] = []
    work = gpu_kernels.Work("work", lambda: calls.append("call"), 1000)

    with gpu_dry.stand_ins(gpu_blocks):
        event = torch.cuda.Event(enable_timing=True)
        monkeypatch.setattr(event, "record", lambda stream: calls.append("event"))
        found = gpu_kernels.measured(work, "cpu", rounds=3)
    times = calls.index("event")
    assert "call" not in calls[times:] and times == 2 + gpu_kernels.CALLS
    assert found["us"] == 1e3 / gpu_kernels.CALLS and found["of_copy"] == 1.0


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_ranks_have_a_device_each_and_nccl(devices: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str, str, str]] = []

    def child(name: str, device: str, small: bool, **environment: str) -> dict[str, Any]:
        started.append((name, device, environment["RANK"], environment["WORLD_SIZE"]))
        return {}

    monkeypatch.setattr(gpu_blocks, "_child", child)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    gpu_blocks.two_ranks("cuda", True)
    assert sorted(started) == [("rank", "cuda", str(n), str(ranks)) for n in range(ranks)]
    chosen: list[Any] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: 1 / (backend != "nccl"))
    with pytest.raises(ZeroDivisionError):  # nothing further runs here
        gpu_blocks.rank("cuda", True)
    assert chosen == [1]


def test_a_process_that_fails_fails_its_block_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="KeyError: 'x'")
    monkeypatch.setattr(subprocess, "run", lambda words, **options: done)
    with pytest.raises(AssertionError, match="KeyError"):
        gpu_blocks._child("train", "cuda", True)


def test_a_machine_without_transformer_engine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_blocks.engine("cpu", True)
    assert "ModuleNotFoundError" in capsys.readouterr().out
