"""The doors: what `make test` leaves out, `make test-slow` runs, and CI runs both, beside the integrations."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.slow import LONGEST, SLOW, is_slow, slow_files
from tests.sources import nodes_of

ROOT = Path(__file__).parent.parent.parent


def defined(file: str) -> set[str]:
    """Return the functions of a test file."""
    return {node.name for node in nodes_of(ROOT / file) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", SLOW)
def test_every_slow_test_exists(file: str) -> None:
    assert set(SLOW[file]) <= defined(file)


def test_a_slow_test_is_named_by_itself_or_by_its_fixture() -> None:
    assert is_slow("tests/test_package.py", "test_anything", ("wheel", "tmp_path"))
    assert is_slow("tests/scale/test_ranks.py", "test_ranks_agree_on_a_skip", ())
    assert not is_slow("tests/scale/test_ranks.py", "test_another", ("tmp_path",))


def test_the_slow_door_collects_every_file_with_a_slow_test() -> None:
    files = slow_files()
    assert {file for file in SLOW if "integrations" not in file} <= set(files)
    assert "tests/benchmarks/test_zoo.py" in files and "tests/scale/test_finite.py" not in files
    assert all((ROOT / file).is_file() for file in files)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in LONGEST}
    assert all(file in SLOW or "mark.slow" in text for file, text in texts.items())


def test_what_one_door_leaves_out_the_other_runs_and_ci_runs_both() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    configuration = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"-m not slow and not hours"' in configuration and "-m 'slow and not hours'" in makefile
    commands = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    doors = [word for line in commands for word in line.partition("#")[0].split()]
    before, tests = doors[:6], doors[6:]
    assert before == ["setup", "--jobs", "2", "lint", "environments", "collection"]
    assert tests == ["test", "test-integrations", "test-slow"]
    assert re.search(r"^test-all: test test-slow test-integrations ", makefile, re.MULTILINE)
    assert re.search(r"^make test ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
