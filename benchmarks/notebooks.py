"""Run the notebooks of docs/notebooks and write their outputs into them; `make notebooks`.

    python -m benchmarks.notebooks [NAME ...]

Each runs in a Jupyter kernel of its own, in an empty folder, as for a reader. What differs from run to run without
meaning anything (times of cells, ids of a kernel) is left out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
MOST_SECONDS = 300  # of a cell
KEPT = {"text/plain", "image/png"}  # forms of a result


def run(path: Path) -> None:
    """Run a notebook and write it back with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has raised; nothing is written.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=MOST_SECONDS, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", []):
            for kind in set(output.get("data", {})) - KEPT:
                del output["data"][kind]
    notebook.metadata["language_info"] = {"name": "python"}
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main(names: list[str]) -> int:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            print(f"{path.stem} ...", flush=True)
            run(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
