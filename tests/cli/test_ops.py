from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.cli import ops as command
from halfstep.cli.ops import carry_out

SOURCE = """
import dataclasses
import torch
from torch import nn
from tests.tasks.small import small_task

def task():
    return small_task()

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))

def bad_batch():
    return dataclasses.replace(small_task(), batches=lambda seed, step: (torch.ones(2, 7), torch.ones(2, 1)))

def number():
    return 3

def broken():
    raise RuntimeError("no data")
"""

POLICY = """
preset = "O2"
ops = [["softmax", "fp32"]]
modules = [["2", "fp32"]]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("import nothing_here\n")
    (tmp_path / "mine.toml").write_text(POLICY)
    (tmp_path / "wrong.toml").write_text(POLICY.replace('"2"', '"head"'))
    return tmp_path / "mine.py"


@pytest.fixture(autouse=True)
def no_custom_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other test files register when they are imported."""
    monkeypatch.setattr("halfstep.policy.operators._registered", {})


def run(*words: str) -> Any:
    device = [] if "--device" in words else ["--device", "cpu"]
    return CliRunner().invoke(app, ["ops", *words, *device], catch_exceptions=False)


def cells(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables in `text` by their first cell."""
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_every_operator_with_a_rule_has_a_row_with_its_reason() -> None:
    done = run()
    assert done.exit_code == 0 and done.stderr == "" and "\x1b[" not in done.stdout
    assert done.stdout.startswith("mixed bf16 on cpu\nlow format bf16, parameters fp32,")
    rows = cells(done.stdout)
    rules = dict(hs.resolve(hs.Policy.of("mixed"), nn.Identity(), "cpu").operators)
    assert rows.keys() - {"operator"} == rules.keys()
    assert all(rows[name] == [rule.rule, "table mixed", rule.reason] for name, rule in rules.items())
    assert f"{len(rules)} of {len(hs.policy.operator_names('*'))} operators have a rule" in done.stdout


def test_patterns_choose_operators_also_those_without_a_rule() -> None:
    rows = cells(run("F.softmax", "conv?d", "gelu", "--policy", "mixed:fp16").stdout)
    assert list(rows) == ["operator", "conv1d", "conv2d", "conv3d", "softmax", "gelu"]
    assert rows["softmax"][:2] == ["keep", "table mixed"]
    assert rows["gelu"] == ["-", "-", "no rule: runs in its inputs' format"]


def test_fields_decide_too_and_a_policy_file_goes_by_its_own_name(source: Path) -> None:
    done = run("--policy", f"{source.with_suffix('.toml')}:fp16", "softmax", "add", "--device", "cpu")
    assert done.stdout.startswith("mine.toml fp16 on cpu")
    rows = cells(done.stdout)
    assert rows["softmax"] == ["fp32", "field ops", "ops: 'softmax' = 'fp32'"]
    assert rows["add"][:2] == ["keep", "field residual"]
    assert "the policy has rules for modules too" in done.stdout


def test_a_policy_that_lowers_nothing_says_so() -> None:
    assert "no operator has a rule (table 'none')" in run("--policy", "O0").stdout
    assert "the low format is fp32, so no rule changes anything" in run("--policy", "mixed:fp32", "gelu").stdout


def test_a_policy_that_cannot_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fp8.toml"
    file.write_text('preset = "fp8"')
    done = run("--policy", str(file), "linear")
    assert done.exit_code == 2 and "preset 'fp8' cannot run yet" in done.stderr.replace("\n", " ")


def test_the_list_of_torch_is_that_of_the_device() -> None:
    assert cells(run("--policy", "torch", "softmax", "--device", "cpu").stdout)["softmax"][0] == "-"
    cuda = run("--policy", "torch", "softmax", "--device", "cuda")
    assert cells(cuda.stdout)["softmax"][:2] == ["fp32", "table torch"]
    assert "a region uses those of the torch that runs it" in cuda.stdout


def test_diff_shows_the_fields_and_operators_that_policy_diff_names() -> None:
    done = run("--policy", "mixed:bf16", "--diff", "torch:bf16", "--device", "cpu")
    rows = cells(done.stdout)
    assert rows["table"] == ["mixed", "torch"] and rows["loss"] == ["fp32", "keep"]
    text = hs.Policy.of("mixed", dtype="bf16").diff(hs.Policy.of("torch", dtype="bf16"))
    named = set()
    for line in text.splitlines():
        if line.split(" -> ")[0] in {"low", "fp32", "keep", "widest", "banned", "input"}:
            names = line.partition(": ")[2].split(", ")
            named |= {name.removesuffix(" on cpu") for name in names if not name.endswith(" on cuda")}
    assert rows.keys() - {"field", "operator", "table", "loss"} == named
    assert rows["softmax"][:2] == ["keep", "-"]


def test_diff_of_equal_policies_and_of_some_operators() -> None:
    same = run("--diff", "mixed").stdout
    assert "all fields are the same" in same and "no rule differs" in same
    rows = cells(run("--diff", "O2", "add", "linear").stdout)
    assert rows["add"][:2] == ["-", "keep"] and "linear" not in rows and rows["params"] == ["fp32", "low"]


def test_a_task_shows_its_plan_and_the_operators_it_calls(source: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "ops.json"
    words = ["--policy", "O2:fp16", "--model", f"{source}:task", "--device", "cpu", "--json", str(report)]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Sequential under O2 fp16 on cpu")
    assert "Modules: none of 5 has a rule of its own" in done.stdout
    assert "Parameters: 161 in 4 tensors" in done.stdout
    rows = cells(done.stdout)
    assert rows["fp16"][:3] == ["4", "161", "0.000"] and "their fp32 masters" in rows["fp32"]
    assert rows["linear"][:3] == ["2", "low", "fp16"] and rows["mse_loss"][:3] == ["1", "fp32", "fp32"]
    assert rows["relu"][:3] == ["1", "-", "fp16"] and "matmul" not in rows
    data = json.loads(report.read_text())
    assert shlex.split(data["command"]) == ["halfstep", "ops", *words]
    assert hs.Policy.from_toml(data["policy"]).name == "O2" and len(data["parameters"]) == 4
    linear = next(row for row in data["operators"] if row["operator"] == "linear")
    assert linear["calls"] == 2 and linear["gives"] == [["low", 2]]


def test_patterns_choose_among_the_operators_a_task_calls(source: Path) -> None:
    rows = cells(run("--model", f"{source}:task", "lin*", "matmul").stdout)
    assert "linear" in rows and "matmul" not in rows and "relu" not in rows
    assert "the model calls none of these operators" in run("--model", f"{source}:task", "softmax").stdout


def test_a_module_shows_its_plan_without_counts(source: Path) -> None:
    done = run("--policy", str(source.with_suffix(".toml")), "--model", f"{source}:net", "linear")
    assert "Modules: 1 of 4 have a rule, which wins over those of operators" in done.stdout
    assert "| fp32 | fp32        | 2 (Linear) | modules: '2' = 'fp32' |" in done.stdout
    assert "norms='fp32': it belongs to a normalisation layer" in done.stdout
    assert "counted if the function returns an hs.Task" in done.stdout
    assert cells(done.stdout)["linear"][0] == "low"


def test_a_model_that_cannot_run_is_no_reason_to_hide_its_plan(source: Path) -> None:
    done = run("--model", f"{source}:bad_batch", "linear")
    assert done.exit_code == 0
    assert re.search(r"operators are not counted: the first step raised RuntimeError: .*mat1 and mat2", done.stdout)
    assert "Parameters: 161" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sofmax"], "unknown operator 'sofmax'; name it as you call it, e.g. 'softmax' or 'linalg.inv'; did you mean"),
        (["zzz*"], "operator pattern 'zzz*' matches no operator"),
        (["my::op"], "no custom operator 'my::op' is registered"),
        (["--policy", "mixd"], "unknown policy 'mixd'; did you mean 'mixed'?"),
        (["--policy", "mixed:bf61"], "unknown format 'bf61'; did you mean 'bf16'?"),
        (["--policy", "none.toml"], "cannot read the policy file 'none.toml'"),
        (["--policy", "fp32"], "has no policy; preset 'O0' keeps everything in fp32"),
        (["--diff", "torch.amp"], "has no policy; preset 'O0' keeps everything in fp32, preset 'torch' has its lists"),
        (["--diff", "O22"], "unknown policy 'O22'"),
        (["--diff", "O2", "--model", "gpt"], "leave one of them out"),
        (["--model", "gtp"], "unknown task 'gtp'; did you mean 'gpt'?"),
        (["--model", "missing.py:task"], "file 'missing.py' does not exist"),
        (["--model", "{mine}"], "names no function; write"),
        (["--model", "{mine}:tsk"], "has no function 'tsk'; did you mean 'task'?"),
        (["--model", "{mine}:number"], "must return an hs.Task or a torch.nn.Module and returned int"),
        (["--model", "{mine}:broken"], "mine.py:20 raised RuntimeError: no data"),
        (["--model", "{bad}:task"], "bad.py:1 raised ModuleNotFoundError: No module named 'nothing_here'"),
        (["--model", "{mine}:task", "--policy", "{wrong}"], "module pattern 'head' matches no module"),
        (["--device", "cdua"], "device type 'cdua' has no torch.autocast"),
        (["--device", "cuda:0"], "rules are the same for every index; write 'cuda'"),
        (["--json", "."], "--json '.' cannot be written"),
    ],
)
def test_bad_input_is_named_in_one_line(source: Path, words: list[str], complaint: str) -> None:
    places = {"mine": source, "bad": source.with_name("bad.py"), "wrong": source.with_name("wrong.toml")}
    done = run(*(word.format(**places) for word in words))
    assert done.exit_code == 2 and done.stdout == ""
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_on_a_terminal_operators_of_one_reason_share_a_row(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    file = io.StringIO()
    monkeypatch.setattr(command, "console", lambda: Console(file=file, force_terminal=True, width=200))
    words = {"policy": "mixed", "patterns": (), "diff": "", "model": "", "device": "cpu", "json": None}
    assert carry_out(**words) == 0  # type: ignore[arg-type]
    assert "addbmm, addmm, baddbmm, bmm, conv1d" in file.getvalue() and "╭" in file.getvalue()
    assert carry_out(**{**words, "diff": "torch"}) == 0  # type: ignore[arg-type]
    assert "operators with another rule on cpu" in file.getvalue()
