"""The first minutes on a GPU: blocks hide no other, and each runs small on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_blocks, gpu_first
from benchmarks.gpu_first import BLOCKS, MARK, Block, measure
from halfstep.step import recorder
from tests.step.tape import TapeRecorder


def python(code: str, seconds: int = 20) -> Block:
    return Block(title="a block", look="", seconds=seconds, commands=((sys.executable, "-S", "-c", code),))


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
    again = measure(blocks, ("3", "0"), file, device="cpu", small=True, seconds=0)
    assert again["blocks"]["1"] == report["blocks"]["1"] and not again["blocks"]["3"]["passed"]  # no time left
    assert list(json.loads(file.read_text())["blocks"]) == ["0", "1", "2", "3"]


HEAVY = ("waits", "compiled", "ratios", "no_compiler", "two_ranks")  # the whole dry run below runs these


@pytest.mark.parametrize("name", [name for name in gpu_blocks.BLOCKS if name not in HEAVY])
def test_a_block_runs_small_on_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(recorder.RECORDERS, "cpu", TapeRecorder)
    gpu_blocks.BLOCKS[name]("cpu", True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] = {}
    for line in lines:
        found |= json.loads(line.removeprefix(MARK))
    assert found


def test_every_command_is_there() -> None:
    """A name that a refactoring has changed would be found on the GPU only."""
    root = gpu_first.ROOT
    for block in BLOCKS.values():
        for words in (*block.commands, *block.small):
            assert "benchmarks.gpu_blocks" not in words or words[3] in gpu_blocks.BLOCKS
            assert all((root / word).is_file() for word in words if word.startswith("tests/"))


@pytest.mark.hours
def test_the_whole_dry_run_passes(tmp_path: Path) -> None:
    report = measure(BLOCKS, tuple(BLOCKS), tmp_path / "gpu.json", device="cpu", small=True, seconds=1200)
    assert [number for number, done in report["blocks"].items() if not done["passed"]] == []
