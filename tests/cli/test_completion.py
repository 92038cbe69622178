"""Shell completion: what TAB offers after a part of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.cli.options import policy, task


def offered(*words: str) -> list[str]:
    """Return what bash is given for the last word."""
    env = {"_HALFSTEP_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["halfstep", *words])}
    env["COMP_CWORD"] = str(len(words))
    done = CliRunner().invoke(app, prog_name="halfstep", env=env)
    assert done.exit_code == 0, done.output
    return done.stdout.split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a policy file, a program and a folder with another."""
    (tmp_path / "more").mkdir()
    for name in ("mine.toml", "train.py", "more/other.toml", "notes.txt", ".hidden.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_and_options() -> None:
    assert offered("do") == ["doctor"]
    assert {"compare", "audit", "lint", "tune", "plan", "ops", "run", "replay"} <= {*offered("")}
    assert offered("doctor", "--qu") == ["--quick"]
    assert "--install-completion" in offered("--")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("audit", "gpt", "--policy", "mi"), ["mixed", "mine.toml"]),
        (("audit", "gpt", "--policy", "more/"), ["more/other.toml"]),
        (("compare", "--policies", "mixed,le"), ["mixed,lean"]),
        (("compare", "--task", "le"), ["lenet5"]),
        (("audit", "tr"), ["train.py"]),
        (("plan", "gpt", "--gpu", "h2"), ["h200"]),
        (("plan", "gpt", "--shard", "f"), ["fsdp2"]),
        (("ops", "softma"), ["softmax"]),
        (("ops", "--diff", "tor"), ["torch"]),
        (("lint", "--severity", "e"), ["error"]),
        (("audit", "gpt", "--device", "c"), ["cpu"]),
    ],
)
def test_values(words: tuple[str, ...], values: list[str]) -> None:
    found = offered(*words)
    assert found[: len(values)] == values
    assert all(value.startswith(words[-1]) for value in found)


def test_a_format_follows_a_preset() -> None:
    assert policy("O2:") == ["O2:bf16", "O2:fp16"] and policy("O2:f") == ["O2:fp16"]
    assert policy("no-such:") == []


def test_without_anything_typed_all_are_offered() -> None:
    assert policy("") == [*hs.policy.PRESETS, "mine.toml", "more/"]
    assert task("") == ["lenet5", "resnet", "gpt", "more/", "train.py"]
    assert task("no/such/folder/") == []
