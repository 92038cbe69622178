"""docs/upstream.md: each program has its section, and shows here what the page states for this version of torch."""

from __future__ import annotations

import ast
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import upstream
from benchmarks.reports import load

PAGE = upstream.PROGRAMS.with_suffix(".md")
RUN = [name for name in upstream.names() if not name.startswith(("accelerate", "lightning", "transformers"))]
COST = {name: pytest.mark.hours if name in upstream.ALONE else pytest.mark.slow for name in RUN}


def title(name: str) -> str:
    """Return the first line of a program's docstring."""
    tree = ast.parse((upstream.PROGRAMS / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0]


def sections() -> dict[str, str]:
    """Return the text below each heading of the third level."""
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def known() -> dict[str, Any]:
    """Return what was recorded for the torch that runs, by program; {} if it was another one."""
    mine = torch.__version__.split(".")[:2]
    rows = [row for row in load("upstream.json")["rows"] if row["versions"]["torch"].split(".")[:2] == mine]
    return rows[0]["programs"] if rows else {}


def test_every_program_has_its_section_with_title_cause_and_workaround() -> None:
    found = sections()
    assert sorted(found) == upstream.names()
    for name, text in found.items():
        assert f"**{title(name)}**" in text, name
        assert f"(upstream/{name}.py)" in text and "\n- halfstep: " in text, name


def test_files_that_the_page_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (PAGE.parent / link).exists(), link


def test_each_row_of_the_results_knows_every_program() -> None:
    for row in load("upstream.json")["rows"]:
        assert sorted(row["programs"]) == upstream.names()
        assert {result["status"] for result in row["programs"].values()} <= {0, 1, 2}


def test_a_program_that_raises_is_no_defect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken program must not count as a defect that is there."""
    (tmp_path / "broken.py").write_text("def main():\n    raise KeyError('x')\n", encoding="utf-8")
    monkeypatch.setattr(upstream, "PROGRAMS", tmp_path)
    assert upstream.show("broken")["status"] == 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86, whose kernels others do not share")
@pytest.mark.skipif(not known(), reason="this version of torch is not in benchmarks/results/upstream.json")
@pytest.mark.parametrize("name", [pytest.param(name, marks=COST[name]) for name in RUN])
def test_a_program_shows_what_was_recorded(name: str) -> None:
    result = upstream.show_alone(name) if name in upstream.ALONE else upstream.show(name)
    if result["status"] == 2:
        pytest.skip("needs CUDA or a library that is not here")
    assert result["status"] == known()[name]["status"], result
