"""halfstep plan: verdict, parts, drawing and policies side by side, as text, JSON and a page."""

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

def reading():
    return small_task(loss_fn=lambda model, x, y: model(x).sum() if model(x).sum().item() > 0 else model(x).mean())

def broken():
    return small_task(loss_fn=lambda model, x, y: model(x) @ y.nothing)
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_the_verdict_comes_first_then_parts_drawing_modules_and_policies(tasks: Path, tmp_path: Path) -> None:
    code, text = run(f"{tasks}:task", "--policies", "pure", "--gpu", "t4", "--device", "cpu", "--no-largest",
                     "--json", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html"))  # fmt: skip
    assert code == 0, text
    first, *rest = text.splitlines()
    assert ", mixed fp16, batch " in first and ": fits a t4 with 14.0 GiB to spare: peak " in first
    assert "- planned with the operators of a CPU" in text and "- planned in bf16, which has the size of fp16" in text
    assert "| parameters " in text and "^ peak: " in text and "| policy     |" in text and "| pure fp16  |" in text
    assert text.index("| parameters ") < text.index("^ peak: ") < text.index("| modules ") < text.index("| pure fp16 ")
    report = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert (
        report["command"].startswith("halfstep plan ")
        and [p["fit"]["verdict"] for p in report["plans"]] == ["fits"] * 2
    )
    assert report["plans"][0]["summary"]["peak_bytes"] == report["plans"][0]["fit"]["need"]
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 2 and "Fits a t4 with" in page and "<script" not in page


def test_without_a_gpu_those_that_it_fits_are_named(tasks: Path) -> None:
    code, text = run(f"{tasks}:task", "--batch", "3")
    assert code == 0
    assert ", batch 3: needs " in text and "of the GPUs that are known: fits: h200, h100," in text


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("nothing",), "unknown task 'nothing'"),
        (("gpt", "--gpu", "h20"), "unknown GPU 'h20'; did you mean 'h200'?"),
        (("gpt", "--policy", "mixd"), "did you mean 'mixed'"),
        (("gpt", "--policy", "torch.amp"), "is a training loop without halfstep"),
        (("gpt", "--devices", "8"), "devices=8 need a way to share the work: shard='ddp' or shard='fsdp2'"),
        (("gpt", "--shard", "fsdp2"), "shard='fsdp2' needs devices=2 or more"),
        (("gpt", "--devices", "8", "--shard", "zero"), "and is 'zero'"),
        (("gpt", "--device", "tpu"), "device must be one of 'cpu', 'cuda' and is 'tpu'"),
        (("gpt", "--json", "/dev/null/p.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...], answer: str) -> None:
    code, text = run(*words)
    assert code == 2 and answer in text and text.startswith("error: ") and text.count("\n") == 1, text


@pytest.mark.parametrize(("task", "answer"), [("reading", "value"), ("broken", "nothing")])
def test_a_step_that_cannot_be_traced_names_its_line(tasks: Path, task: str, answer: str) -> None:
    code, text = run(f"{tasks}:{task}")
    assert code == 2 and answer in text and "mine.py:" in text, text
