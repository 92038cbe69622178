"""The notebooks: their cells run in order; committed are the outputs of a whole run, without a place of a machine.

Cells run here without a Jupyter kernel, in one namespace, with few steps; `make notebooks` runs them as a reader does.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FEWER = {"STEPS": "24", "MINUTES": "0.001"}
MOST_CELLS = 60  # of all notebooks together
MOST_BYTES = 200_000  # of one with its pictures
PLACES = re.compile(r"/(?:home|root|tmp|work|Users)/\w")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def problems(notebook: dict[str, Any]) -> list[str]:
    """Return what is wrong with the outputs of a notebook."""
    found, cells = [], code_cells(notebook)
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not run from top to bottom")
    for cell in cells:
        where = text(cell).partition("\n")[0]
        if ("print(" in text(cell) or "plt.show()" in text(cell)) and not cell["outputs"]:
            found.append(f"no output: {where}")
        for output in cell["outputs"]:
            written = json.dumps({name: value for name, value in output.items() if name != "data"})
            written += json.dumps({k: v for k, v in output.get("data", {}).items() if k != "image/png"})
            if output["output_type"] == "error" or output.get("name") == "stderr":
                found.append(f"error or warning: {where}")
            if PLACES.search(written):
                found.append(f"a place of a machine: {where}")
    return found


def test_three_notebooks_are_short_and_name_their_size() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["choosing_a_policy", "first_run", "why_nan"]
    assert sum(len(read(path)["cells"]) for path in NOTEBOOKS) <= MOST_CELLS
    for path in NOTEBOOKS:
        assert re.search(r"^STEPS = \d+", text(code_cells(read(path))[0]), re.MULTILINE), path.stem
        assert path.stat().st_size < MOST_BYTES, path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_those_of_a_whole_run(path: Path) -> None:
    assert problems(read(path)) == [], "run `make notebooks`"


def test_a_cell_that_was_not_run_an_error_and_a_path_are_noticed() -> None:
    whole = read(NOTEBOOKS[0])
    spoils: list[dict[str, Any]] = [
        {"outputs": []},
        {"execution_count": None},
        {"outputs": [{"output_type": "error"}]},
        {"outputs": [{"output_type": "stream", "name": "stdout", "text": ["/home/me/x.py"]}]},
    ]
    for spoil in spoils:
        spoiled = copy.deepcopy(whole)
        next(cell for cell in code_cells(spoiled) if "print(" in text(cell)).update(spoil)
        assert problems(spoiled) != [], spoil


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for cell in read(path)["cells"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text(cell) if cell["cell_type"] == "markdown" else ""):
            assert (path.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    monkeypatch.chdir(tmp_path)
    threads, log = torch.get_num_threads(), logging.getLogger("halfstep")
    level = log.level
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(read(path)), start=1):
            code = text(cell)
            for name, value in FEWER.items():
                code = re.sub(rf"^{name} = \S+", f"{name} = {value}", code, flags=re.MULTILINE)
            exec(compile(code, f"{path.stem}, code cell {number}", "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)
    assert namespace["STEPS"] == int(FEWER["STEPS"])
    assert capsys.readouterr().out.count("\n") > 5
