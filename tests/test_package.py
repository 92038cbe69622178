"""The wheel: built from this tree, installed into an empty folder, imported from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import halfstep as hs

ROOT = Path(__file__).parent.parent


def pip(*words: str) -> None:
    """Run pip without the network."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the tree stays clean."""
    place = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place / "dist"), str(place))
    (built,) = (place / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if n.startswith("halfstep/")}
    files = (p for p in (ROOT / "src" / "halfstep").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert inside == {p.relative_to(ROOT / "src").as_posix() for p in files}
    assert "halfstep/py.typed" in inside and any(n.endswith(".toml") for n in inside)


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n}
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert any(n.endswith("LICENSE") for n in archive.namelist())
    assert f"Version: {hs.__version__}\n" in metadata and "License-Expression: Apache-2.0" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert {line.split()[1].split(">")[0] for line in needed} == {"torch", "rich", "typer", "tomli"}
    assert "halfstep = halfstep.cli:app" in scripts


def test_the_installed_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    script = (
        "import json, halfstep as hs, torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).mean(), "
        "policy=hs.Policy.of('O1', dtype='bf16'))\n"
        "print(json.dumps([hs.__file__, step(torch.ones(3, 4)).host().updated]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    place, updated = json.loads(done.stdout)
    assert Path(place) == target / "halfstep" / "__init__.py" and updated is True
