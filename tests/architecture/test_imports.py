"""Imports point one way, siblings are blind to each other, and importing halfstep is light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from tests.architecture.imports import EXCEPTIONS, LAYERS, used_exceptions, violations

ROOT = Path(halfstep.__file__).parent


def test_imports_point_to_lower_layers() -> None:
    assert violations(ROOT) == []


def test_every_exception_is_needed_and_has_its_reason() -> None:
    assert used_exceptions(ROOT) == set(EXCEPTIONS)
    assert all(EXCEPTIONS.values())


def test_every_part_has_a_layer() -> None:
    parts = {p.stem for p in ROOT.iterdir() if p.is_dir() or p.suffix == ".py"}
    assert parts - {"__init__", "__main__", "__pycache__", "py"} <= set(LAYERS)


@pytest.mark.parametrize(
    ("place", "line", "complaint"),
    [
        ("policy/x.py", "from halfstep.step import TrainStep", "layer 1 must not see layer 5"),
        (
            "scale/x.py",
            "import halfstep.cast.regions.autocast",
            "scale and cast are siblings of layer 2 and blind to each other",
        ),
        ("scale/x.py", "from halfstep import cast", "scale and cast are siblings of layer 2 and blind to each other"),
        ("scale/x.py", "from ..cast import region", "scale and cast are siblings of layer 2 and blind to each other"),
        ("cast/__init__.py", "from ..scale import scaler", "cast and scale are siblings of layer 2"),
        ("weights/x.py", "def f():\n    from halfstep.binding import prepare", "layer 2 must not see layer 3"),
        ("kernels/x.py", "from halfstep import Policy", "must not import the package itself"),
        ("kernels/x.py", "import halfstep as hs", "must not import the package itself"),
        (
            "cli/x.py",
            "from halfstep.policy.presets import PRESETS",
            "uses halfstep.policy.presets.PRESETS: cli is a user",
        ),
        ("cli/x.py", "import halfstep.policy.presets", "uses halfstep.policy.presets: cli is a user"),
        ("cli/x.py", "from halfstep.policy import operators", "uses halfstep.policy.operators: cli is a user"),
        ("cli/x.py", "from halfstep import PRESETS", "uses halfstep.PRESETS: cli is a user"),
        ("cli/x.py", "import halfstep as hs\nhs.units('cpu')", "uses halfstep.units: cli is a user"),
        ("cli/x.py", "import halfstep as hs\nhs.policy.match.NORMS", "uses halfstep.policy.match: cli is a user"),
        ("compat/x.py", "from halfstep.tasks import Task", "compat is a user of the package"),
        ("tasks/x.py", "from halfstep.step.train_step import TrainStep", "tasks is a user of the package"),
        ("__init__.py", "from halfstep.report import html", "the package re-exports"),
        ("gadgets/x.py", "from halfstep.errors import HalfstepError", "gadgets has no layer"),
    ],
)
def test_the_checker_catches(tmp_path: Path, place: str, line: str, complaint: str) -> None:
    for part in ("cast", "scale"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "region.py").write_text("")
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(line + "\n")
    found = violations(tmp_path)
    assert len(found) == 1 and complaint in found[0], found
    module = ".".join(["halfstep", *Path(place).with_suffix("").parts]).removesuffix(".__init__")
    assert found[0].startswith(f"{module}:")


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("step/x.py", "from halfstep.cast.regions.autocast import autocast"),
        ("step/x.py", "from . import tail"),
        ("lens/x.py", "from halfstep.report import page"),
        ("formats.py", "from halfstep.errors import FormatError"),
        ("cli/x.py", "import halfstep as hs\nfrom halfstep.tasks import Task"),
        ("cli/x.py", "from halfstep import Policy, policy\nfrom halfstep.policy import PRESETS"),
        ("cli/x.py", "import halfstep as hs\nhs.policy.PRESETS['O1'].name, hs.Policy.of, hs.__version__"),
        ("scale/x.py", "import torch\nfrom collections import abc"),
    ],
)
def test_the_checker_allows(tmp_path: Path, place: str, line: str) -> None:
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text(line + "\n")
    assert violations(tmp_path) == []


def test_an_unused_exception_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "x.py").write_text("from halfstep.step import TrainStep\n")
    used, unused = ("halfstep.policy.x", "step"), ("halfstep.policy.y", "step")
    table = {used: "on purpose", unused: "forgotten"}
    assert violations(tmp_path, table) == []
    assert used_exceptions(tmp_path, table) == {used}


def test_importing_halfstep_imports_torch_and_nothing_else_that_is_installed() -> None:
    """Neither a first region: Dynamo would take seconds."""
    script = (
        "import json, sys, torch; before = set(sys.modules); import halfstep as hs; new = set(sys.modules) - before\n"
        "hs.prepare(torch.nn.Linear(2, 2), policy=hs.Policy.of('mixed', dtype='bf16'))(torch.ones(1, 2))\n"
        "print(json.dumps([sorted(new), 'torch._dynamo' in set(sys.modules) - before]))"
    )
    path = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=path)
    modules, dynamo = json.loads(done.stdout)
    new = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert new <= {"halfstep", "torch", "__mp_main__"}, new
    assert not [name for name in modules if name.startswith("halfstep.compat")]
    assert not dynamo
