"""`halfstep run`, `install`, and the scripts and documents of the time."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfstep.cli.run import run_script
from halfstep.compat import apex
from halfstep.errors import HalfstepError

ROOT = Path(__file__).parents[3]
LEGACY = ROOT / "examples" / "legacy"
SEEDS = ROOT / "examples" / "seeds"


def losses(out: str) -> list[float]:
    return [float(value) for value in re.findall(r"\tLoss ([\d.]+)", out)]


@pytest.mark.parametrize(
    "options",
    [
        ["--opt-level", "O0"],
        ["--opt-level", "O1"],
        ["--opt-level", "O2"],
        ["--opt-level", "O2", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "True"],
        ["--opt-level", "O3", "--keep-batchnorm-fp32", "True"],
        ["--opt-level=O1", "--loss-scale=dynamic"],
    ],
    ids=" ".join,
)
def test_the_imagenet_script_runs_unmodified_with_options_as_text(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(LEGACY / "main_amp.py", ["--iterations", "8", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"opt_level = {options[0].partition('=')[2] or options[1]}\n")
    assert losses(out)[-1] < 0.75 * losses(out)[0]


def test_the_imagenet_script_resumes_with_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--opt-level", "O2", "--iterations", "6", "--epochs", "4"]
    run_script(LEGACY / "main_amp.py", common)
    through = capsys.readouterr().out
    file = str(tmp_path / "checkpoint.pt")
    stop = ["--opt-level", "O2", "--iterations", "6", "--epochs", "2", "--save", file]
    run_script(LEGACY / "main_amp.py", stop)
    capsys.readouterr()
    run_script(LEGACY / "main_amp.py", [*common, "--resume", file])
    assert capsys.readouterr().out.splitlines()[-4:] == through.splitlines()[-4:]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_dcgan_script_keeps_three_scales(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(LEGACY / "dcgan.py", ["--opt_level", level, "--niter", "12"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    scales = [float(scale) for scale in re.findall(r"[\d.]+", last)]
    assert len(scales) == 3 and (level == "O0") == (scales == [1.0] * 3)


def test_the_command_passes_arguments_output_and_exit_status_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, helper\nfrom apex import amp\nimport apex.amp._amp_state, apex.parallel as p\n"
        "from apex.optimizers import FusedAdam\nfrom apex.fp16_utils import FP16_Optimizer\n"
        "print(sys.argv[1:], __name__, amp.__name__, helper.__name__)\nsys.exit(3)\n"
    )
    (tmp_path / "helper.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "halfstep", "run", str(script), "--help", "-x", "1", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "['--help', '-x', '1', '--force'] __main__ halfstep.compat.apex.amp helper"


def test_processes_that_a_script_starts_find_apex_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, subprocess, sys\nfrom apex import amp\nfrom apex.amp import scale_loss\n"
        "def work():\n    print('worker', amp.__name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
        "    code = 'from apex.parallel import LARC; print(LARC.__module__)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "halfstep", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["worker", "halfstep.compat.apex.amp", "halfstep.compat.apex.parallel"]


def test_a_script_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(Path("missing.py"), []) == 2
    assert run_script(Path("--polcy"), ["mixed", "missing.py"]) == 2
    said = capsys.readouterr().err
    assert "there is no file 'missing.py'" in said and "there is no option '--polcy'" in said
    assert "apex" not in sys.modules


# ---------------------------------------------------------------------- install


def test_install_registers_the_names_and_uninstall_takes_them_off() -> None:
    assert importlib.util.find_spec("apex") is None and apex.install() and apex.install()
    import apex as theirs
    from apex.amp import scale_loss
    from apex.amp._amp_state import _amp_state
    from apex.amp.scaler import LossScaler
    from apex.parallel import LARC

    from halfstep.compat.apex import amp

    assert theirs.amp is amp and scale_loss is amp.scale_loss and _amp_state is amp._amp_state
    assert LossScaler("dynamic").loss_scale() == 2.0**16 and LARC is apex.parallel.LARC
    assert issubclass(theirs.DeprecatedFeatureWarning, FutureWarning)
    apex.uninstall()
    assert not [name for name in sys.modules if name == "apex" or name.startswith("apex.")]
    apex.uninstall()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("fp16_utils.fp16_optimizer", "FP16_Optimizer"),
        ("fp16_utils.fp16util", "network_to_half"),
        ("fp16_utils.loss_scaler", "DynamicLossScaler"),
        ("fp16_utils.loss_scaler", "to_python_float"),
        ("optimizers.fused_lamb", "FusedLAMB"),
        ("parallel.distributed", "DistributedDataParallel"),
    ],
)
def test_a_file_of_apexs_has_the_names_of_its_package_and_no_copies_of_them(file: str, name: str) -> None:
    apex.install()
    try:
        package = getattr(apex, file.partition(".")[0])
        assert getattr(importlib.import_module(f"apex.{file}"), name) is getattr(package, name)
    finally:
        apex.uninstall()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an installed package named apex."""

    def make(*modules: str) -> None:
        package = tmp_path / "apex"
        package.mkdir()
        for name in ("__init__", *modules):
            (package / f"{name}.py").write_text("real = True\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    apex.uninstall()
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        del sys.modules[name]


def test_an_apex_with_amp_stays_unless_it_is_forced_away(elsewhere: Any, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere("amp")
    assert not apex.install()
    from apex import amp

    assert amp.real
    assert not apex.install()
    assert apex.install(force=True)
    from apex import amp as ours

    assert not hasattr(ours, "real")
    apex.uninstall()
    from apex import amp as again

    assert again.real
    run_script(LEGACY / "dcgan.py", ["--niter", "1"], force=True)
    assert "scales" in capsys.readouterr().out


def test_an_apex_without_amp_gives_its_place(elsewhere: Any) -> None:
    elsewhere("optimizers")
    assert apex.install()
    from apex import amp

    assert amp.initialize


def test_an_apex_that_was_imported_already_is_not_replaced_silently(elsewhere: Any) -> None:
    elsewhere("optimizers")
    import apex as other

    assert other.real
    with pytest.raises(HalfstepError, match=r"imported already.*install\(force=True\)"):
        apex.install()


# ---------------------------------------------------------------------- the documents


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"seed_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["001_apex_overview.py", "004_ascend_apex.py"])
def test_the_documents_programs_learn_in_every_way_they_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for way, (first, last) in load(SEEDS / name).main().items():
        assert last < 0.9 * first, way
    assert "Selected optimization level" in capsys.readouterr().out
    assert torch.get_default_dtype() is torch.float32
