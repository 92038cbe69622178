"""The zoo: its bounds and reasons on rows written by hand, and some architectures where transformers is installed."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import zoo, zoo_tables
from benchmarks.zoo_tables import bound, deviations, zoo_table
from tests.two_processes import as_script

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."]), "OMP_NUM_THREADS": "1"}
TWO = ("llama", "vit")
EIGHT = ("bert", "gpt2", "t5", "mixtral", "resnet", "clip", "opt", "distilbert")
ROW: dict[str, Any] = {
    "name": "model",
    "parameters": 10,
    "amp": {"bf16": {"loss": 0.01, "out": 0.02, "skipped": 0}},
    "control": {},
    "presets": {"mixed:bf16": {"loss": 0.01, "out": 0.02, "skipped": 0, "generate": {}}},
}


def row(**changed: Any) -> dict[str, Any]:
    made = copy.deepcopy(ROW)
    made["presets"]["mixed:bf16"] |= changed
    return made


def test_a_row_within_its_bounds_has_no_deviation() -> None:
    assert not list(deviations(row(loss=bound("mixed", "bf16", 0.01))))


def test_each_kind_of_fault_is_a_deviation_without_a_reason() -> None:
    far = bound("mixed", "bf16", 0.02) * 1.01
    tie = {"step": 1, "margin": 0.3, "moved": 0.2}
    faults: dict[str, dict[str, Any]] = {
        "loss": {"loss": float("nan")},
        "out": {"out": far},
        "raises": {"raises": "ValueError"},
        "tokens": {"generate": tie},
        "copies": {"copies": {"state_dict": "weight has other values"}},
    }
    for kind, fault in faults.items():
        assert [(one.kind, one.reason) for one in deviations(row(**fault))] == [(kind, "")], kind


def test_what_the_report_shows_is_the_reason() -> None:
    chaotic = row(loss=0.5)
    chaotic["control"] = {"bf16": {"loss": 0.4, "out": 0.0}}
    near = row(generate={"step": 1, "margin": 0.01, "moved": 0.02})
    alike = row(raises="ValueError")
    alike["amp"]["bf16"] = {"raises": "TypeError: no kernel"}
    route = row(out=0.5, positions=[1, 32]) | {"chooses": ["topk"]}
    words = ("1 of 32 positions", "ill-conditioned: fp32 gets 0.4 away", "a near tie", "torch.amp raises too")
    for made, start in zip((route, chaotic, near, alike), words, strict=True):
        (found,) = deviations(made)
        assert found.reason.startswith(start)


def test_the_table_counts_and_names_what_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {
        "command": "zoo",
        "machine": {"cpu": "a processor"},
        "torch": "2",
        "transformers": "5",
        "names": 5,
        "rows": [row(), row(loss=0.9), {"name": "other", "failed": "build", "reason": "needs a library"}],
    }
    text = zoo_table(report)
    assert "2 architectures" in text and "1 more" in text and "2 names" in text
    assert "| `mixed:bf16` | 1 of 2 | 2 of 2 | 2 of 2 | 1 |" in text
    assert "| `model` | loss curve | mixed:bf16 | 0.9 | 0.028 | **unexplained** |" in text
    monkeypatch.setitem(vars(zoo_tables), "REASONS", {"model loss": "found"})
    assert "| 0.9 | 0.028 | found |" in zoo_table(report)


def test_a_report_is_written_with_one_line_for_each_row(tmp_path: Path) -> None:
    report = {"command": "zoo", "rows": [row(), row(loss=0.9)]}
    zoo.save(tmp_path / "zoo.json", report)
    text = (tmp_path / "zoo.json").read_text()
    assert json.loads(text) == report and len(text.splitlines()) == 7


def test_a_bound_is_that_of_its_file() -> None:
    for name, dtype in zoo.FORMATS.items():
        assert zoo_tables.EPS[name] == torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("architectures", [TWO, pytest.param(EIGHT, marks=pytest.mark.hours)], ids=["two", "eight"])
def test_architectures_train_and_speak_as_under_torch_amp(architectures: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "zoo.json"
    names = [part for name in architectures for part in ("--only", name)]
    words = ["-m", "benchmarks.zoo", "--presets", "torch,mixed,pure", "--json", str(file), *names]
    as_script(words, ROOT, PYTHONPATH=ENVIRONMENT["PYTHONPATH"]).check_returncode()
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == list(architectures)
    for found in rows:
        assert "failed" not in found, found
        assert found["presets"]["torch:bf16"]["as_amp"], found["name"]
        assert not [one for one in deviations(found) if not one.reason]
