"""halfstep tune: the policy's file, the pages beside it, progress, wrong input, an interrupted search."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import halfstep as hs
from halfstep.advise.tune import Progress
from halfstep.cli import app
from halfstep.cli.progress import Watch

SOURCE = """
import torch
from tests.tasks.small import small_task

def task():
    return small_task()

def moving():
    return small_task(batches=lambda seed, step: (torch.randn(16, 8), torch.randn(16, 1)))

def infinite():
    return small_task(loss_fn=lambda model, x, y: model(x).mean() / 0.0)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *words])
    return result.exit_code, result.output


def test_without_time_it_writes_fp32_and_what_is_missing(tasks: Path, tmp_path: Path) -> None:
    policy, report = tmp_path / "policy.toml", tmp_path / "report.json"
    code, text = run(f"{tasks}:task", "-o", str(policy), "--minutes", "0.0001", "--json", str(report))
    assert code == 0 and hs.Policy.of(policy) == hs.Policy.of("O0")
    assert (
        "note: the time was too short" in text and f"written: {policy}; what was measured: {policy}.state.json" in text
    )
    written = policy.read_text(encoding="utf-8")
    assert "# command: halfstep tune" in written and "--minutes 0.0001" in written.replace("\n#     ", " ")
    record = json.loads(report.read_text(encoding="utf-8"))
    assert record["task"] == "small" and record["halfstep"] == hs.__version__
    state = policy.with_name("policy.toml.state.json")
    assert json.loads(state.read_text(encoding="utf-8"))["about"]["task"] == "small"
    assert run(f"{tasks}:task", "-o", str(policy), "--minutes", "0.0001", "--resume")[0] == 0
    assert not list(tmp_path.glob("*.old"))
    assert run(f"{tasks}:task", "-o", str(policy), "--target", "speed")[0] == 2
    assert json.loads(state.with_name(state.name + ".old").read_text(encoding="utf-8"))["about"]["task"] == "small"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tasks}:task", "-o", "{folder}/policy.json"], "a policy's file ends in .toml"),
        (
            ["{tasks}:task", "-o", "{folder}/p.toml", "--resume"],
            "there is no .*p.toml.state.json' of an earlier search",
        ),
        (["{tasks}:task", "-o", "{folder}/p.toml", "--target", "speed"], 'target=.speed.; expected "time", "memory"'),
        (["{tasks}:task", "-o", "{folder}/p.toml", "--dtypes", "fp8"], "['fp8']"),
        (["{tasks}:moving", "-o", "{folder}/p.toml"], "gave other numbers when it was called again"),
        (["{tasks}:infinite", "-o", "{folder}/p.toml"], "the loss of fp32 is not finite"),
        (["resnet5", "-o", "{folder}/p.toml"], "unknown task 'resnet5'; did you mean 'resnet'"),
    ],
)
def test_wrong_input_ends_with_one_line(tasks: Path, tmp_path: Path, words: list[str], message: str) -> None:
    import re

    code, text = run(*(word.format(tasks=tasks, folder=tmp_path) for word in words))
    last = text.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and re.search(message, last), text
    assert not list(tmp_path.glob("*.toml"))


def test_what_is_proven_is_written_at_once(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, policy = hs.tune, tmp_path / "policy.toml"

    def ending(task: hs.Task, **options: Any) -> Any:
        found = real(task, **{**options, "minutes": 0.0001})
        options["on_progress"](Progress(phase="", share=0.5, found=dataclasses.replace(found, seconds=12.0)))
        assert hs.Policy.of(policy) == hs.Policy.of("O0") and "# command: halfstep tune" in policy.read_text()
        policy.unlink()
        return found

    monkeypatch.setattr(hs, "tune", ending)
    code, text = run(f"{tasks}:task", "-o", str(policy))
    assert code == 0 and policy.exists() and f"written after 12 s: {policy}, O0; more is tried" in text


def test_an_interrupted_search_writes_what_is_safe(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    real, policy = hs.tune, tmp_path / "policy.toml"

    def interrupted(task: hs.Task, **options: Any) -> Any:
        return dataclasses.replace(real(task, **{**options, "minutes": 0.0001}), interrupted=True)

    monkeypatch.setattr(hs, "tune", interrupted)
    code, _ = run(f"{tasks}:task", "-o", str(policy))
    assert code == 130 and hs.Policy.of(policy) == hs.Policy.of("O0")


def test_progress_is_a_bar_on_a_terminal_and_plain_lines_otherwise() -> None:
    moments = [
        Progress(phase="presets", share=0.25), Progress(phase="presets", share=0.26),
        Progress(phase="", share=0.3, note="mixed bf16: within"), Progress(phase="audit of mixed bf16", share=0.5),
    ]  # fmt: skip
    shown = {}
    for terminal in (False, True):
        out = io.StringIO()
        with Watch(Console(file=out, force_terminal=terminal, width=100)) as watch:
            for moment in moments:
                watch.see(moment.share, moment.phase, moment.note)
        shown[terminal] = out.getvalue()
    assert shown[False].splitlines() == [
        "[25 %] presets ...", "mixed bf16: within", "[50 %] audit of mixed bf16 ...",
    ]  # fmt: skip
    assert "mixed bf16: within" in shown[True] and "━" in shown[True]
