"""hs.lint: targets, ignored lines and rules, places, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep as hs
from halfstep.advise.lint import LintFinding
from halfstep.errors import LintError

BAD = """
import torch

def train(model, loader, optimizer, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BAD)
    return tmp_path


def test_a_finding_has_its_place_what_why_and_fix(folder: Path) -> None:
    (finding,) = hs.lint("train.py")
    assert (finding.code, finding.severity, finding.place) == ("HS001", "error", "train.py:7")
    assert finding.what == (
        "gradients are clipped while they are multiplied by the scale of `scaler`: no `scaler.unscale_` since the "
        "backward pass"
    )
    assert finding.why.startswith("The gradients are still multiplied") and "unscale_(optimizer)" in finding.fix
    assert LintFinding(**finding.record()) == finding


def test_a_path_below_the_current_folder_is_relative_to_it(folder: Path) -> None:
    assert hs.lint(folder / "train.py") == hs.lint(Path("train.py")) == hs.lint(folder)


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# halfstep: ignore[HS001]", 0),
        ("#halfstep:ignore[hs017, HS001]  a reason", 0),
        ("# halfstep: ignore[HS002]", 1),
        ("# halfstep: ignore", 1),
    ],
)
def test_a_comment_takes_out_the_findings_of_its_line_and_rule(folder: Path, comment: str, count: int) -> None:
    (folder / "train.py").write_text(BAD.replace("1.0)", f"1.0)  {comment}"))
    assert len(hs.lint("train.py")) == count


def test_rules_can_be_left_out(folder: Path) -> None:
    assert hs.lint("train.py", ignore=["hs001"]) == []
    with pytest.raises(LintError, match="unknown rule 'HS1x'"):
        hs.lint("train.py", ignore=["HS1x"])


def test_a_folder_is_searched_without_other_peoples_code(folder: Path) -> None:
    for place in ("sub", ".venv/lib", "build", "node_modules"):
        (folder / place).mkdir(parents=True)
        (folder / place / "more.py").write_text(BAD)
    assert [finding.file for finding in hs.lint(".")] == ["sub/more.py", "train.py"]


def test_a_file_that_cannot_be_parsed_is_an_error_and_in_a_folder_a_finding(folder: Path) -> None:
    (folder / "old.py").write_text("print 'python 2'\n")
    with pytest.raises(LintError, match=r"old\.py:1 cannot be parsed: Missing parentheses"):
        hs.lint("old.py")
    assert [(f.code, f.file) for f in hs.lint(".")] == [("HS000", "old.py"), ("HS001", "train.py")]
    (folder / "deep.py").write_text("import torch\nloss.backward()\nx = " + "+".join(["a"] * 3000))
    with pytest.raises(LintError, match=r"deep\.py is nested too deeply"):
        hs.lint("deep.py")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    with pytest.raises(LintError, match=r"latin\.py' cannot be read"):
        hs.lint("latin.py")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent.py", "target 'absent.py' does not exist; expected a .py file, a folder, .* or one of lenet5"),
        ("notes.md", "'notes.md' is no Python file"),
        ("run.ipynb", "'run.ipynb' is a notebook; `jupyter nbconvert --to script run.ipynb` makes a .py file"),
        ("empty", "folder 'empty' holds no Python files"),
    ],
)
def test_a_target_that_is_no_script_is_refused(folder: Path, target: str, message: str) -> None:
    (folder / "empty").mkdir()
    (folder / "notes.md").touch()
    (folder / "run.ipynb").touch()
    with pytest.raises(LintError, match=message):
        hs.lint(target)


def test_a_function_of_a_file_is_read_and_traced(folder: Path) -> None:
    task = "\ndef task():\n    from tests.tasks.small import small_task\n    return small_task()\n"
    (folder / "train.py").write_text(BAD + task)
    assert "HS001" in {finding.code for finding in hs.lint("train.py:task")}
    with pytest.raises(hs.HalfstepError, match="has no function 'tasks'; did you mean 'task'"):
        hs.lint("train.py:tasks")


def test_a_file_with_a_byte_order_mark_and_an_empty_one_are_read(folder: Path) -> None:
    (folder / "train.py").write_text("\ufeff" + BAD, encoding="utf-8")
    (folder / "empty.py").touch()
    assert len(hs.lint("train.py")) == 1 and hs.lint("empty.py") == []


def test_a_function_with_too_many_paths_is_left_undecided(folder: Path) -> None:
    many = "".join(f"        if flag{i}:\n            scaler.scale(loss{i}).backward()\n" for i in range(12))
    (folder / "train.py").write_text(BAD.replace("        torch.nn", many + "        torch.nn"))
    assert hs.lint("train.py") == []
