from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.cli import doctor as command
from halfstep.tasks.speed import Sizes

TINY = Sizes(product=16, small_product=8, image=(1, 4, 8), small_image=(1, 2, 4), seconds=0.0)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sizes_for", lambda device, quick: TINY)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.usefixtures("tiny")
def test_doctor_says_what_the_machine_has_and_what_to_use(tmp_path: Path) -> None:
    report = tmp_path / "new" / "doctor.json"
    done = run("--device", "cpu", "--quick", "--json", str(report))
    assert done.exit_code == 0, done.output
    assert done.stderr == "measuring ...\n" and "\x1b[" not in done.stdout
    assert f"torch {torch.__version__}" in done.stdout and hs.policy.units("cpu").reason in done.stdout
    for line in ("| matrix product 16 x 16 x 16 ", "| convolution 1 x 4 x 8 x 8, 3x3 ", "- yes, the host makes 1 read"):
        assert any(each.startswith(line) for each in done.stdout.splitlines()), line
    assert "an indication: small sizes" in done.stdout and "Use on cpu: " in done.stdout
    assert "AdamW" in done.stdout and "LBFGS" in done.stdout and "Pitfalls" in done.stdout
    data = json.loads(report.read_text(), parse_constant=no_constants)
    assert shlex.split(data["command"]) == ["halfstep", "doctor", "--device", "cpu", "--quick", "--json", str(report)]
    assert data["quick"] is True and data["machine"]["torch"] == torch.__version__
    (speed,) = data["speeds"]
    assert [work["work"] for work in speed["works"]][:2] == ["matrix product", "convolution"]
    assert speed["works"][0]["speeds"][0] | {"gflops": 0} == {
        "label": "fp32", "gflops": 0, "faster": None, "decided": False,
    }  # fmt: skip
    assert all(isinstance(row["decided"], bool) for work in speed["works"] for row in work["speeds"][1:])
    assert {row["label"] for work in speed["works"] for row in work["speeds"]} >= {"fp32", "bf16", "fp16"}
    assert data["units"][0]["device"] == "cpu" and data["advice"][0]["preset"] in hs.policy.PRESETS
    reads = {each["optimizer"]: each["later"] for each in data["optimizers"]}
    assert reads["AdamW"] == 0 and reads["RMSprop"] == 1
    assert data["cpu_kernels"] == hs.step.cpu_kernels()


@pytest.mark.usefixtures("tiny")
def test_doctor_names_the_cpu_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hs.step, "cpu_kernels", lambda: "shipped, for avx2")
    assert "\nCPU kernels: shipped, for avx2\n" in run("--device", "cpu", "--quick").stdout


@pytest.mark.usefixtures("tiny")
def test_doctor_says_why_updates_go_through_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_NATIVE", "0")
    shown = " ".join(run("--device", "cpu", "--quick").stdout.split())
    assert "updates AdamW through torch's operators: the environment variable HALFSTEP_NATIVE is 0" in shown


@pytest.mark.usefixtures("tiny")
def test_doctor_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 64.0, 64.0))
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    done = run()
    assert done.exit_code == 0 and "other programs kept this machine busy (load average 64.0" in done.stdout
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


@pytest.mark.usefixtures("tiny")
def test_without_quick_it_is_no_indication(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.carry_out("cpu", quick=False, json=None) == 0
    shown = capsys.readouterr().out
    assert "16 x 16 x 16" in shown and "an indication" not in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "cdua"], "error: device 'cdua' is not here"),
        (["--device", "cpuu"], "did you mean 'cpu'?"),
        (["--json", "."], "--json '.' cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_named_and_nothing_is_measured(words: list[str], complaint: str) -> None:
    done = run(*words)
    assert done.exit_code == 2 and done.stdout == ""
    assert complaint in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["extra"], ["--devic", "cpu"], ["--json"]])
def test_options_are_checked(words: list[str]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.usefixtures("tiny")
def test_on_a_terminal_it_has_colours_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(
        command, "console", lambda stderr=False: Console(file=file, force_terminal=True, width=100, stderr=stderr)
    )
    assert command.carry_out("cpu", quick=False, json=None) == 0
    assert "╭" in file.getvalue() and "\x1b[1;32mUse on cpu" in file.getvalue()
