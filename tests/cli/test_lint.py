from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep.advise.lint.__main__ import main
from halfstep.cli import app
from tests.advise.lint.test_lint import BAD

NOTE = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BAD)
    (tmp_path / "note.py").write_text(NOTE)
    (tmp_path / "good.py").write_text("import torch\n")
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["lint", *words])
    return result.exit_code, result.stdout, result.stderr


def test_findings_are_printed_with_why_and_fix_and_make_the_exit_code_1(folder: Path) -> None:
    code, out, _ = run("train.py", "note.py")
    assert code == 1
    first, why, fix, second, *_, last = out.splitlines()
    assert first.startswith("train.py:7: error HS001: gradients are clipped while")
    assert why.startswith("    why: ") and fix.startswith("    fix: ")
    assert second == "note.py:3: note HS026: `torch.cuda.amp.GradScaler` is deprecated"
    assert last == "1 error, 1 note; `halfstep lint --explain HS001` shows an example"


def test_why_and_fix_stand_once_a_rule(folder: Path) -> None:
    (folder / "again.py").write_text(BAD)
    _, out, _ = run("train.py", "again.py")
    assert out.count("error HS001") == 2 and out.count("why: ") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["good.py"], 0),
        (["note.py"], 0),
        (["note.py", "--severity", "note"], 1),
        (["train.py", "--severity", "error"], 1),
        (["train.py", "--ignore", "HS001,HS026"], 0),
    ],
)
def test_the_exit_code_is_1_from_the_severity_asked_for(folder: Path, words: list[str], code: int) -> None:
    assert run(*words)[0] == code


def test_nothing_found_is_one_line(folder: Path) -> None:
    assert run("good.py") == (0, "nothing found\n", "")


def test_a_rule_is_explained(folder: Path) -> None:
    code, out, _ = run("--explain", "hs012")
    assert code == 0 and out.startswith("HS012 (warning): a checkpoint without the scaler's state\n\nWhy: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no target; give a .py file"),
        (["absent.py"], "error: target 'absent.py' does not exist"),
        (["train.py", "absent.py"], "error: target 'absent.py' does not exist"),
        (["train.py", "--severity", "bad"], "error: --severity 'bad'; expected error, warning, note"),
        (["train.py", "--ignore", "HS999"], "error: unknown rule 'HS999'"),
        (["--explain", "clip"], "error: unknown rule 'clip'"),
        (["train.py", "--sarif", "train.py/x"], "error: --sarif 'train.py/x' cannot be written"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(folder: Path, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert code == 2 and out == "" and err.startswith(message) and err.count("\n") == 1


def test_findings_are_written_as_json_and_sarif(folder: Path) -> None:
    run("train.py", "--json", "a/out.json", "--sarif", "a/out.sarif")
    report = json.loads((folder / "a" / "out.json").read_text())
    assert report["command"] == "halfstep lint train.py --json a/out.json --sarif a/out.sarif"
    assert [(f["code"], f["file"], f["line"]) for f in report["findings"]] == [("HS001", "train.py", 7)]
    log = json.loads((folder / "a" / "out.sarif").read_text())["runs"][0]
    (result,) = log["results"]
    assert (result["ruleId"], result["level"]) == ("HS001", "error")
    assert log["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "HS001"
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 7}}


def test_the_hook_of_pre_commit_prints_what_the_command_does_and_needs_no_package(folder: Path) -> None:
    root = Path(__file__).parent.parent.parent
    (entry,) = re.findall(r"entry: (\S+)\n", (root / ".pre-commit-hooks.yaml").read_text())
    assert os.access(root / entry, os.X_OK)
    words = [sys.executable, "-I", "-S", str(root / entry), "train.py", "note.py"]  # -S: no site-packages
    hook = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert (hook.returncode, hook.stdout, hook.stderr) == run("train.py", "note.py")
    hook = subprocess.run([*words[:4], "absent.py"], cwd=folder, capture_output=True, text=True)
    message = "error: target 'absent.py' does not exist; expected a .py file or a folder\n"
    assert (hook.returncode, hook.stdout, hook.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("words", "severity", "code"),
    [(["good.py"], "warning", 0), (["note.py"], "note", 1), (["train.py"], "error", 1)],
)
def test_the_module_of_the_linter_is_a_command(
    folder: Path, words: list[str], severity: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--severity", severity]) == run(*words, "--severity", severity)[0] == code
    assert tuple(capsys.readouterr()) == run(*words)[1:]
    assert main([*words, "--ignore", "HS001,HS026"]) == 0


def test_a_mistake_that_only_a_run_shows_is_explained_too() -> None:
    code, out, _ = run("--explain", "hs201")
    assert code == 0 and out.startswith("HS201 (error): gradients are cleared between the backward pass and the update")
    assert "Fix: Call `optimizer.zero_grad()` after the update" in out and "hs.BlackBox" in out
