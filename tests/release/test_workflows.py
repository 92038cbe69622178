"""Workflow files and issue templates: they name targets, files and commands that exist. None of them can run here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.release.programs import EXTRAS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(file: Path) -> list[str]:
    """Return what a workflow runs, one command each."""
    return re.findall(r"^ *- run: (.+)$", file.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_targets_and_tests_that_exist(file: Path) -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    found = commands(file)
    assert found
    for command in found:
        program, *words = command.split()
        if program == "make":
            assert {*words} <= {*targets}, command
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), command


def test_the_changes_workflow_runs_what_ci_runs() -> None:
    doors = ("lint", "test", "test-integrations", "test-slow")
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    runs = {word for line in lines if line.startswith("make ") for word in line.partition("#")[0].split()}
    assert {*doors} <= runs
    assert {f"make {door}" for door in doors} <= {*commands(ROOT / ".github" / "workflows" / "ci.yml")}


def test_templates_ask_for_what_the_commands_write() -> None:
    for name in ("bug.yml", "not_finite.yml"):
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")
        assert "halfstep doctor --json doctor.json" in text


def test_every_extra_for_users_has_a_program_and_a_line_in_the_documentation() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.M)) - {"bench", "dev", "docs", "notebooks"}
    assert extras == set(EXTRAS)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert all(f"`{extra}`" in page for extra in extras)
