"""Windows and macOS, simulated: what has no such call there is not called, and paths with a drive are read."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.checkpoints.files import _sync_folder
from halfstep.cli import run
from halfstep.errors import HalfstepError
from halfstep.kernels import pages
from halfstep.kernels.native import compiler
from halfstep.tasks.candidates import candidates
from halfstep.tasks.machine import usable_cores
from halfstep.tasks.task import load_task
from halfstep.testing import host_device
from tests.sources import nodes

DRIVE = PureWindowsPath("C:/my files/train.py")
ABSENT = ("fork", "getuid", "sched_getaffinity", "getloadavg", "register_at_fork")
"""Functions of `os` that Windows lacks."""


def become_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("USERNAME", "user")
    for name in ABSENT:
        monkeypatch.delattr(os, name, raising=False)


def test_a_step_and_its_checkpoint_need_nothing_that_windows_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folders cannot be opened there, and so not flushed."""
    opened = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(path)
        return opened(path, *args, **kwargs)

    model = torch.nn.Linear(4, 2)
    step = hs.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum(), policy="O0"
    )
    hs.save(step, tmp_path / "before")  # torch imports here what asks for the system
    become_windows(monkeypatch)
    monkeypatch.setattr(os, "open", refuse)
    step(torch.ones(2, 4))
    saved = hs.save(step, tmp_path)
    with hs.on_preemption(step, tmp_path, signals=(signal.SIGINT, signal.SIGTERM)):
        step(torch.ones(2, 4))
    assert Path(saved.path).parent == tmp_path and hs.load(step, tmp_path).step == 1
    _sync_folder(tmp_path)  # does not raise


def test_without_their_calls_there_are_no_kernels_no_kept_pages_and_no_test_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become_windows(monkeypatch)
    pages._glibc.cache_clear()
    try:
        assert pages._glibc() is None
    finally:
        pages._glibc.cache_clear()
    with pytest.raises(compiler.Unavailable, match="not compiled on this platform .win32"):
        compiler.compiled()
    with pytest.raises(HalfstepError, match="built for Linux, and this is win32"):
        host_device()
    assert usable_cores() == (os.cpu_count() or 1)


def test_a_program_is_run_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.execve would start another process there and end this one at once."""
    become_windows(monkeypatch)
    calls: list[Any] = []

    def started(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        calls.append((words, env))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(os, "execve", lambda *args: pytest.fail("execve"))
    assert run._become("C:/py/torchrun.exe", ["torchrun", "train.py"], {"A": "1"}) == 3
    assert calls == [(["C:/py/torchrun.exe", "train.py"], {"A": "1"})]


def test_a_colon_after_a_drive_names_no_function() -> None:
    with pytest.raises(HalfstepError, match=r"task 'C:.+train.py' names no function; write C:.+train.py:function"):
        load_task(str(DRIVE))
    with pytest.raises(HalfstepError, match=r"file .C:.+train.py. does not exist"):
        load_task(f"{DRIVE}:task")


@pytest.mark.parametrize(("behind", "dtype"), [("", "bf16"), (":fp16", "fp16")])
def test_a_policy_file_on_a_drive_is_read(monkeypatch: pytest.MonkeyPatch, behind: str, dtype: str) -> None:
    path, read = str(PureWindowsPath("C:/my files/policy.toml")), list[Any]()
    of = hs.Policy.of

    def found(spec: Any, **fields: Any) -> hs.Policy:
        read.append(spec)
        return of("mixed" if spec == path else spec, **fields)

    monkeypatch.setattr(hs.Policy, "of", found)
    assert candidates([f"{path}{behind}"], "cpu")[-1].dtype == dtype and read[0] == path


def bare(text: str) -> list[int]:
    """Return the lines of a program that open a text file in the system's own encoding."""
    found = []
    for node in nodes(text):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"read_text", "write_text"}:
            found.append(node.lineno)
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [] if any("b" in mode for mode in modes) else [node.lineno]
    return found


def test_text_is_read_and_written_in_a_named_encoding() -> None:
    """That of Windows is another one than that of Linux and macOS."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(hs.__file__).parent.rglob("*.py")}
    with_files = {name: text for name, text in texts.items() if "_text(" in text or "open(" in text}
    assert {name: lines for name, text in with_files.items() if (lines := bare(text))} == {}
    assert bare("p.read_text()\nopen(p)\nopen(p, 'rb')\np.write_text(x, encoding='utf-8')") == [1, 2]
