"""The command line starts without torch: help, completion and the linter of scripts."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import halfstep as hs
from halfstep.cli import app
from halfstep.cli.app import HELPS
from halfstep.cli.options import TASKS
from halfstep.tasks import task_names
from tests.two_processes import as_script

COMMANDS = [command.callback for command in app.registered_commands]
SCRIPT = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"


def imported(tmp_path: Path, *words: str, **variables: str) -> tuple[set[str], str]:
    """Return the modules that a command line imports, and what it prints."""
    (tmp_path / "train.py").write_text(SCRIPT)
    here = {"PYTHONPATH": str(Path(hs.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        cwd=tmp_path, env={**os.environ, **here, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}, run.stdout


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--help",), "doctor"),
        (("--version",), hs.__version__),
        (("tune", "--help"), "--minutes"),
        (("lint", "train.py"), "HS026"),
        (("lint", "."), "HS026"),
        (("lint", "--explain", "HS101"), "HS101"),
        (("lint", "train.py", "--json", "-"), '"HS026"'),
    ],
)
def test_a_command_starts_without_torch(tmp_path: Path, words: tuple[str, ...], shown: str) -> None:
    modules, text = imported(tmp_path, "-m", "halfstep", *words)
    assert shown in text and "torch" not in modules
    plain = words in {("lint", "train.py"), ("lint", ".")}
    assert ("halfstep.cli.app" in modules) is not plain and ("typer" in modules) is not plain


@pytest.mark.parametrize("words", ["do", "compare --po", "audit gpt --policy mi", "plan gpt --gpu h2"])
def test_completion_needs_no_torch(tmp_path: Path, words: str) -> None:
    asked = {"COMP_WORDS": f"halfstep {words}", "COMP_CWORD": str(len(words.split()))}
    modules, text = imported(tmp_path, "-m", "halfstep", _HALFSTEP_COMPLETE="complete_bash", **asked)
    assert text.strip() and "torch" not in modules


@pytest.mark.parametrize("code", ["import halfstep", "import halfstep as hs; hs.lint('train.py'); dir(hs)"])
def test_the_package_and_its_linter_need_no_torch(tmp_path: Path, code: str) -> None:
    modules, _ = imported(tmp_path, "-c", code)
    assert "halfstep" in modules and "torch" not in modules


def test_a_command_has_the_arguments_of_its_code() -> None:
    assert COMMANDS
    for command in COMMANDS:
        assert command is not None
        name = command.__name__
        code = import_module(f"halfstep.cli.{name}").carry_out
        assert [*inspect.signature(command).parameters] == [*inspect.signature(code).parameters], name


def test_every_option_is_explained_and_nothing_else() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        helps = {parameter.name: parameter.help for parameter in command.params}
        assert all(helps.values()), name
        assert HELPS.get(name, {}).keys() <= helps.keys(), name
    assert HELPS.keys() <= {"all", *group.commands}


def test_the_tasks_that_are_offered_are_those_that_exist() -> None:
    assert task_names() == TASKS


def test_every_lazy_name_is_listed_once_and_exists() -> None:
    assert set(hs.__all__) <= set(dir(hs))
    for name in hs.__all__:
        value = getattr(hs, name)
        assert value is vars(hs)[name] and callable(value)
    with pytest.raises(AttributeError, match="module 'halfstep' has no attribute 'polciy'"):
        _ = hs.polciy


@pytest.mark.parametrize(
    "name", [c.__name__ for c in COMMANDS if c is not None and "json" in inspect.signature(c).parameters]
)
def test_a_dash_is_the_standard_output_of_every_command(name: str) -> None:
    """What writes the files of a command is `Files`, in every one that has --json."""
    code = import_module(f"halfstep.cli.{name}")
    assert "files.write(" in inspect.getsource(code) and "Files(" in inspect.getsource(code)
    assert isinstance(app, typer.Typer)


@pytest.mark.parametrize("words", [["ops", "softmax"], ["lint", "train.py"]])
def test_json_on_standard_output_is_all_that_is_there(tmp_path: Path, words: list[str]) -> None:
    _, text = imported(tmp_path, "-m", "halfstep", *words, "--json", "-")
    assert json.loads(text)["command"].startswith(f"halfstep {words[0]}")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_plan_as_json_is_all_that_is_on_standard_output(tmp_path: Path) -> None:
    text = as_script(["-m", "halfstep", "plan", "lenet5", "--json", "-"], tmp_path).stdout
    assert json.loads(text)["command"].startswith("halfstep plan") and not list(tmp_path.iterdir())


def test_two_files_cannot_both_be_the_standard_output(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "halfstep", "lint", "train.py", "--json", "-", "--sarif", "-"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(hs.__file__).parent.parent)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2 and "name the same file '-'; give them two" in " ".join(run.stderr.split())
