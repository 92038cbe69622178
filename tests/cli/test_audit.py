"""halfstep audit: findings, rows and answers on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep.cli import app

SOURCE = """
import torch
from tests.tasks.small import small_task

def task():
    return small_task()

def faint():
    return small_task(loss_fn=lambda model, x, y: 1e-7 * (model(x).float() - y).square().mean())
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", *words])
    return result.exit_code, result.output


def test_a_healthy_task_has_rows_and_no_findings(tasks: Path) -> None:
    code, text = run(f"{tasks}:task", "--policy", "mixed:bf16", "--rows", "5")
    assert code == 0
    assert "audit of Sequential under mixed bf16 on cpu: 3 steps" in text and "no findings" in text
    assert "| linear" in text and "more rows; --rows" in text


def test_findings_come_with_their_remedy(tasks: Path, tmp_path: Path) -> None:
    policy = tmp_path / "static.toml"
    policy.write_text('preset = "mixed"\ndtype = "fp16"\nscale = "none"\n', encoding="utf-8")
    code, text = run(f"{tasks}:faint", "--policy", str(policy))
    assert code == 0 and "underflow: " in text
    assert "remedy: scale the loss" in text and "scale: 'none' -> 'halfstep'" in text


def test_rows_can_be_chosen_sorted_and_asked_about(tasks: Path) -> None:
    code, text = run(f"{tasks}:task", "--module", "0", "--role", "activation", "--sort", "time", "--after", "2",
                     "--what-if", "fp8_e4m3:4096", "--what-if", "fp16")  # fmt: skip
    assert code == 0
    assert text.count("| activation ") == 1 and "what if fp8_e4m3:4096: " in text and "what if fp16: " in text
    assert "e+" not in text.partition("what if")[2]


def test_everything_is_written_as_json_and_as_a_page(tasks: Path, tmp_path: Path) -> None:
    code, text = run(f"{tasks}:task", "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    assert code == 0 and text.count("written: ") == 2
    report = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("halfstep audit ") and report["findings"] == []
    assert {"module", "op", "role", "error", "sketch"} <= set(report["rows"][0])
    assert (tmp_path / "a.html").read_text(encoding="utf-8").count("<figure>") == 4


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("nothing",), "unknown task 'nothing'"),
        (("gpt", "--policy", "mixd"), "did you mean 'mixed'"),
        (("gpt", "--policy", "torch.amp"), "is a training loop without halfstep"),
        (("gpt", "--what-if", "fp16:much"), "'much' is no loss scale; write fp16 or fp16:1024"),
        (("gpt", "--device", "tpu"), "device 'tpu' is not here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...], answer: str) -> None:
    code, text = run(*words)
    assert code == 2 and answer in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--sort", "eror"), "rows cannot be sorted by 'eror'; did you mean 'error'"),
        (("--what-if", "fp17"), "unknown number format 'fp17'"),
        (("--role", "grad"), "no role 'grad'"),
    ],
)
def test_questions_that_make_no_sense_are_answered(tasks: Path, words: tuple[str, ...], answer: str) -> None:
    code, text = run(f"{tasks}:task", *words)
    assert code == 2 and answer in text
