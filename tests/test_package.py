"""The wheel: built from this tree, installed into a folder, imported from there (`make release-check` does more)."""

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
from halfstep.lens.verdict import CAUSES, Verdict
from tests.release import archives

ROOT = Path(__file__).parent.parent


def pip(*words: str) -> None:
    """Run pip without the network; a wheel has no compiled kernels, which take long."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    environment = {**os.environ, "HALFSTEP_WHEEL": "pure"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the tree stays clean."""
    place = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "docs" / "verdicts", place / "docs" / "verdicts")
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place / "dist"), str(place))
    (built,) = (place / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_says_what_it_is(wheel: Path) -> None:
    assert list(archives.in_wheel(wheel, ROOT, native=False)) == []


def test_what_is_wrong_in_a_wheel_is_found(wheel: Path, tmp_path: Path) -> None:
    wrong = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(wrong, "w") as other:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("/METADATA"):
                data = data.replace(b"Version: 0", b"Version: 9").replace(b"Dist: rich>", b"Dist: poor>")
                data = data.replace(b"Keywords:", b"Project-URL: home, here\nKeywords:")
            if name != "halfstep/py.typed":
                other.writestr(name, data)
        other.writestr("halfstep/kernels/native/portable-avx2-0.so", b"")
        other.writestr("halfstep/left_behind.py", b"")
    assert list(archives.in_wheel(wrong, ROOT, native=False)) == [
        f"METADATA has Version: 9{hs.__version__[1:]}, not {hs.__version__}",
        "METADATA has Project-URL: home, here",
        "METADATA requires jinja2, poor, tomli, torch, typer",
        f"{wheel.name} has 1 compiled libraries",
        f"{wheel.name} lacks halfstep/py.typed",
        f"{wheel.name} has halfstep/left_behind.py, which is not in the tree",
    ]


def test_changelog_and_citation_have_the_version(tmp_path: Path) -> None:
    assert archives.version_of(ROOT) == hs.__version__
    assert list(archives.in_documents(ROOT, final=False)) == []
    for name in ("CHANGELOG.md", "CITATION.cff", "src/halfstep/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace(f'__version__ = "{hs.__version__}"', '__version__ = "9.9.9"'))
    assert list(archives.in_documents(tmp_path, final=True)) == [
        "CHANGELOG.md has no heading ## [9.9.9] - YYYY-MM-DD",
        "CITATION.cff does not have version: 9.9.9",
    ]


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
    for page in CAUSES:
        command = [sys.executable, "-m", "halfstep", *Verdict(kind="overflow", cause=page).page.split()[1:]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.stdout.startswith(f"# Cause: {page}"), done.stderr
