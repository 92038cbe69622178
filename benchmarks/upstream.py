"""Defects of other libraries: run the programs of docs/upstream under several interpreters, and record what they show.

    python -m benchmarks.upstream [--python PATH[:FOLDER] ...] [--json benchmarks/results/upstream.json]

PATH is an interpreter with another torch or other libraries; FOLDER is appended to its import path. The interpreter
that runs this is always among them. A program prints what is expected and what is found, and its status is 1 while the
defect is there, 0 when it is gone and 2 where it cannot show (no CUDA device, the library is absent).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import write

PROGRAMS = Path(__file__).resolve().parent.parent / "docs" / "upstream"
LIBRARIES = ("torch", "triton", "accelerate", "lightning", "transformers")
ALONE = (
    "dynamo_mode_table",
    "triton_interpreter",
)  # in a process: the first may kill it, the second sets its environment
WORDS = {0: "gone", 1: "there", 2: "-"}


def names() -> list[str]:
    """Return the programs, by name."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


def imported(name: str) -> Any:
    """Return a program as a module; Dynamo looks for it among the imported ones."""
    spec = importlib.util.spec_from_file_location(f"upstream_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def show(name: str) -> dict[str, Any]:
    """Run a program in this process, in a thread of its own, with which autocast's state goes away.

    Returns:
        status: as above; 3 if it raised.
        found: the lines that it prints after "found:".
    """
    printed = io.StringIO()

    def run() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(imported(name).main())

    with contextlib.redirect_stdout(printed), ThreadPoolExecutor(max_workers=1) as pool:
        try:
            status = pool.submit(run).result()
        except Exception as error:
            return {"status": 3, "found": [f"{type(error).__name__}: {error}"]}
    return {"status": status, "found": found(printed.getvalue())}


def show_alone(name: str) -> dict[str, Any]:
    """Run a program in a process of its own; as `show`."""
    command = [sys.executable, "-W", "ignore", str(PROGRAMS / f"{name}.py")]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return {"status": 1, "found": [f"the process was killed by signal {-done.returncode}"]}
    return {"status": 3 if "Traceback" in done.stderr else done.returncode, "found": found(done.stdout)}


def found(printed: str) -> list[str]:
    """Return what a program says it found."""
    return [line.removeprefix("found:").strip() for line in printed.splitlines() if line.startswith("found:")]


def environment() -> dict[str, str]:
    """Return the versions in this process; "" for a library that is absent."""
    versions = {"python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = ""
    return versions


def here() -> dict[str, Any]:
    """Run all programs in this process."""
    return {"versions": environment(), "programs": {n: (show_alone if n in ALONE else show)(n) for n in names()}}


def there(python: str) -> dict[str, Any]:
    """Run all programs with another interpreter."""
    path, _, folder = python.partition(":")
    setup = f"import sys; sys.path[:0] = [{str(PROGRAMS.parent.parent)!r}]; sys.path += {[folder] if folder else []!r}"
    script = f"{setup}; import json; from benchmarks import upstream; print(json.dumps(upstream.here()))"
    done = subprocess.run([path, "-c", script], capture_output=True, text=True, check=False)
    reports = [line for line in done.stdout.splitlines() if line.startswith('{"versions"')]
    if not reports:
        raise SystemExit(f"{path}: {done.stderr.strip()[-2000:]}")
    report: dict[str, Any] = json.loads(reports[0])
    return report


def upstream_tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of docs/upstream.md: in which version each defect is there."""
    rows = report["rows"]
    torches = {row["versions"]["torch"].partition("+")[0]: row["programs"] for row in reversed(rows)}
    of_torch, others = [], []
    for name in names():
        library = next((library for library in LIBRARIES[1:] if name.startswith(library)), "")
        linked = f"[{name}](#{name})"
        if library:
            shown = {row["versions"][library]: row["programs"][name]["status"] for row in rows}
            others += [[linked, f"{library} {v}", WORDS[s]] for v, s in sorted(shown.items()) if v and s != 2]
        else:
            of_torch.append([linked, *(WORDS[torches[torch][name]["status"]] for torch in sorted(torches))])
    return {
        "upstream torch": table(["program", *(f"torch {torch}" for torch in sorted(torches))], of_torch),
        "upstream others": table(["program", "version", "defect"], others),
    }


def main() -> None:
    """Run the programs everywhere and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="interpreter[:folder appended to its path]")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    rows = [here(), *(there(python) for python in options.python)]
    for row in rows:
        print(*(f"{library} {row['versions'][library] or 'absent'}" for library in row["versions"]), sep=", ")
        for name, result in row["programs"].items():
            print(f"  {result['status']} {name}: {'; '.join(result['found'])[:150]}")
    if options.json:
        write(options.json, {"command": "python -m benchmarks.upstream --python ...", "rows": rows})


if __name__ == "__main__":
    main()
