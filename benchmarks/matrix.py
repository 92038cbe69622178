"""Run the tests under other versions of Python, torch and the libraries of the integrations, and write a JSON file.

    python -m benchmarks.matrix [--only NAME ...] [--prepare] [--json benchmarks/results/matrix.json]

A corner is one combination of versions. Its environment is made in out/matrix/, with the lower bounds of pyproject.toml
("lowest") or the versions of constraints.txt ("newest"). A corner with the Python and the torch that run this script
uses these and installs the libraries alone. Where an interpreter is missing (``python3.X`` on the path, or in pyenv)
its corners are reported as not run. The exit status is 1 if a test failed.

Rows of corners that did not run now are kept from the file. With --prepare the environments are made and no test runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import commit, told, write
from halfstep.tasks import machine

__all__ = ["CORNERS", "Corner", "matrix_table"]

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "out" / "matrix"

LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "timm", "torchao", "tensorboard", "wandb", "mlflow")
"""What tests/integrations imports; a test skips without its library."""

TOOLS = ("pytest", "pytest-xdist", "hypothesis", "numpy", "setuptools")
NOT_CORE = ("tests/architecture", "tests/benchmarks", "tests/integrations", "tests/promises", "tests/test_tables.py")
"""What `make test` runs besides the core: tests of the source text and of benchmarks, and the integrations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corner:
    """One combination of versions.

    Attributes:
        name: of its row and its environment.
        python: "3.12"; "" for the interpreter that runs this script.
        torch: a version; "" for the one that is installed beside this script.
        libraries: "lowest", "newest" or "" for none: the core of the tests instead of those of the integrations.
        without: libraries that are left out: timm where no torchvision fits this torch, loggers for a quick CI.
        slow: whether the slow tests of the integrations run too.
    """

    name: str
    python: str = ""
    torch: str = ""
    libraries: str = ""
    without: tuple[str, ...] = ()
    slow: bool = True


CORNERS = (
    Corner(name="lowest libraries", libraries="lowest", without=("timm", "wandb", "mlflow"), slow=False),
    Corner(name="newest libraries", libraries="newest", without=("timm",)),
    Corner(name="torch 2.11, lowest libraries", python="3.10", torch="2.11.0", libraries="lowest"),
    Corner(name="torch 2.14, newest libraries", python="3.12", torch="2.14.1", libraries="newest"),
    Corner(name="torch 2.15, newest libraries", python="3.13", torch="2.15.0", libraries="newest", without=("timm",)),
    Corner(name="torch 2.11", python="3.10", torch="2.11.0"),
    Corner(name="torch 2.13"),
    Corner(name="torch 2.14", python="3.12", torch="2.14.1"),
    Corner(name="torch 2.15", python="3.13", torch="2.15.0"),
)

EXTRAS = ("transformers", "accelerate", "lightning", "peft", "timm", "fp8", "loggers")
"""Extras of pyproject.toml whose lower bounds are tested."""


def versions(which: str) -> dict[str, str]:
    """Return library -> version: the lower bounds of pyproject.toml, or what constraints.txt has."""
    if which == "lowest":
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        extras = "\n".join(re.findall(rf"^(?:{'|'.join(EXTRAS)}) = \[(.*?)\]", text, flags=re.DOTALL | re.MULTILINE))
        found = dict(re.findall(r"\"([A-Za-z0-9_-]+)>=([0-9.]+)\"", extras))
    else:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        found = dict(line.partition(";")[0].strip().split("==") for line in lines if "==" in line.partition(";")[0])
    return {name: found[name] for name in LIBRARIES if name in found}


def interpreter(python: str) -> str | None:
    """Return the path of an interpreter of a version, None if there is none."""
    if not python or python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{python}"):
        works = subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
        if works:  # a shim of pyenv is on the path also for versions that are not selected
            return found
    if pyenv := shutil.which("pyenv"):
        prefix = subprocess.run([pyenv, "prefix", python], capture_output=True, text=True, check=False).stdout.strip()
        if prefix and (path := Path(prefix) / "bin" / "python").exists():
            return str(path)
    return None


def environment(corner: Corner, python: str) -> Path:
    """Make the environment of a corner, or use the one that is there; return its interpreter."""
    place = ENVIRONMENTS / corner.name.replace(" ", "-").replace(",", "")
    binary = place / "bin" / "python"
    chosen = versions(corner.libraries) if corner.libraries else {}
    wanted = [f"{name}=={version}" for name, version in chosen.items() if name not in corner.without]
    ready, text = place / "ready", " ".join([corner.torch, *wanted])
    if ready.exists() and ready.read_text(encoding="utf-8") == text:
        return binary
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    if corner.torch:
        packages = [f"torch=={corner.torch}", "rich", "typer", "tomli", *TOOLS, "jinja2", "mlxtend"]
        install(binary, [*packages, "scikit-learn", *wanted])
    else:
        own = subprocess.check_output(
            [binary, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
        (Path(own) / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        torch = subprocess.check_output([binary, "-c", "import torch; print(torch.__version__)"], text=True).strip()
        install(binary, [f"torch=={torch}", *wanted])
    ready.write_text(text, encoding="utf-8")
    return binary


def install(binary: Path, packages: Sequence[str]) -> None:
    """Install packages into the environment of an interpreter."""
    command = [str(binary), "-m", "pip", "install", "--quiet", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, *packages], check=True)


def tests_of(corner: Corner) -> list[str]:
    """Return the arguments that select the tests of a corner."""
    if corner.libraries:
        return ["tests/integrations", "-m", "not hours" if corner.slow else "not slow and not hours"]
    return ["tests", *(f"--ignore={path}" for path in NOT_CORE), "-m", "not slow and not hours"]


def run(corner: Corner, python: str, workers: int) -> dict[str, Any]:
    """Run the tests of a corner and return its row."""
    binary = environment(corner, python)
    report = ENVIRONMENTS / "report.xml"
    report.unlink(missing_ok=True)
    command = [str(binary), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--numprocesses={workers}"]
    command += ["--dist=worksteal", f"--junitxml={report}", *tests_of(corner)]
    offline = {"PYTHONPATH": "src", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, check=False)
    took = time.perf_counter() - began
    if not report.exists():
        raise SystemExit(f"{corner.name}: pytest ended with {done.returncode} and wrote no report")
    return {
        **_installed(binary),
        "tests": _kind(corner),
        **_counted(report),
        "seconds": round(took),
        "commit": commit(),
    }


def _installed(binary: Path) -> dict[str, Any]:
    script = (
        "import json, platform, sys; from importlib.metadata import PackageNotFoundError, version\n"
        "def of(name):\n"
        "    try: return version(name)\n"
        "    except PackageNotFoundError: return ''\n"
        "found = {name: of(name) for name in sys.argv[1:]}\n"
        "import torch\n"
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'libraries': found}))"
    )
    text = subprocess.check_output([binary, "-c", script, *LIBRARIES], text=True)
    return dict(json.loads(text))


def _counted(report: Path) -> dict[str, Any]:
    suite = ElementTree.parse(report).getroot()
    cases = list(suite.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    names = sorted(f"{c.get('classname')}::{c.get('name')}" for c in failed)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": names,
    }


def matrix_table(report: Mapping[str, Any]) -> str:
    """Return what was run under which versions."""
    if not report:
        return "Not measured here."
    rows = []
    for corner in CORNERS:
        here = report["machine"]
        unknown = {"python": corner.python or here["python"], "torch": corner.torch or here["torch"]}
        unknown |= {"absent": "not run yet", "tests": _kind(corner)}
        rows.append(_line(report["rows"].get(corner.name, unknown)))
    head = ["Python", "torch", "tests", "passed", "failed", "skipped", "with"]
    said = told(*(row.get("commit", "") for row in report["rows"].values()))
    return f"`{report['command']}`, no GPU. {said}\n\n{table(head, rows)}"


def _kind(corner: Corner) -> str:
    return "integrations" if corner.libraries else "core"


def _line(row: Mapping[str, Any]) -> list[str]:
    if "absent" in row:
        return [row["python"], row["torch"], row["tests"], "-", "-", "-", row["absent"]]
    shown = {name: version for name, version in row["libraries"].items() if version and row["tests"] != "core"}
    counts = (str(row[key]) for key in ("passed", "failed", "skipped"))
    libraries = ", ".join(f"{name} {version}" for name, version in shown.items())
    return [row["python"], row["torch"], row["tests"], *counts, libraries]


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the corners; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description="Run the tests under other versions.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[c.name for c in CORNERS], help="corners to run")
    parser.add_argument("--prepare", action="store_true", help="make the environments and run no test")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default 2)")
    parser.add_argument("--json", type=Path, help="the file to write; rows of corners that do not run now are kept")
    options = parser.parse_args(None if arguments is None else list(arguments))
    chosen = [c for c in CORNERS if options.only is None or c.name in options.only]
    known = json.loads(options.json.read_text("utf-8"))["rows"] if options.json and options.json.exists() else {}
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for corner in chosen:
        print(f"--- {corner.name}", flush=True)
        python = interpreter(corner.python)
        if python is None:
            reason = f"not run: no interpreter python{corner.python}"
            absent = {"python": corner.python, "torch": corner.torch, "tests": _kind(corner), "absent": reason}
            known[corner.name] = absent
            print(reason, flush=True)
        elif options.prepare:
            environment(corner, python)
        else:
            known[corner.name] = run(corner, python, options.workers)
            failed += known[corner.name]["failed"]
        if options.json and not options.prepare:
            rows = {c.name: known[c.name] for c in CORNERS if c.name in known}
            write(options.json, {"command": "make matrix", "machine": machine(), "rows": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
