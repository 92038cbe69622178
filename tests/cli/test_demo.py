from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.cli import demo as command
from halfstep.cli.demo import TIMED, Demo, carry_out, conclusions
from halfstep.cli.progress import Watch
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import Cost, Pace, Probe, pace
from halfstep.tasks.demo import Rescue, Workload, workloads
from halfstep.timing import Ratio
from tests.report.reader import Page
from tests.tasks.small import loss_fn, small_task

TINY = {"SECONDS": (0.0, 0.0, 0.0), "ENOUGH_SEEDS": 1, "STEPS": {"gpt": 1}, "BROKEN_STEPS": 24}
BF16 = hs.policy.Units("cpu", bf16=True, fp16=False, reason="this CPU has bf16 units")
NONE = hs.policy.Units("cpu", bf16=False, fp16=False, reason="this CPU has no bf16 units")
QUIET = Ratio(median=1.0, low=0.99, high=1.01, rounds=20)


def workload(bound_by: str = "matrix products") -> Workload:
    return Workload(task=small_task(), bound_by=bound_by, lesson="a lesson")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the models and the tasks of the demo by one of microseconds."""
    for name, value in TINY.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(
        command, "workloads", lambda device, units: tuple(map(workload, ("products", "its tail", "nothing")))
    )
    monkeypatch.setattr(command, "load_task", lambda name: small_task(name=name))


def ratio(median: float) -> Ratio:
    return Ratio(median=median, low=median - 0.02, high=median + 0.02, rounds=20)


def row(label: str, median: float | None, **changes: Any) -> Cost:
    to_fp32 = None if median is None else ratio(median)
    fields = {"to_amp": None, "slow": 0.0, "state_bytes": 2000, "saved_bytes": 900}
    return Cost(**{"label": label, "milliseconds": 3.0, "to_fp32": to_fp32, **fields, **changes})


def demo(found: list[tuple[Workload, Pace]], units: hs.policy.Units) -> Demo:
    return Demo(device="cpu", units=units, paces=found)


def paces(*rows: Cost, control: Ratio = QUIET) -> list[tuple[Workload, Pace]]:
    made = Pace(
        task="products", about="a GPT", parameters=7, device="cpu", control=control, rows=(row("fp32", None), *rows)
    )
    return [(workload(), made)]


def said(found: list[tuple[Workload, Pace]], units: hs.policy.Units = BF16) -> str:
    first = conclusions(demo(found, units))[0]
    return " ".join((first.text, *first.more))


@pytest.mark.usefixtures("small")
def test_the_demo_ends_with_its_conclusions_and_the_page_begins_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, record = tmp_path / "new" / "report.html", tmp_path / "demo.json"
    assert carry_out(html, record, "cpu") == 0
    shown = capsys.readouterr()
    last = shown.out[shown.out.index("\nConclusions\n") :]
    assert last.count("\n- ") == 7 and last.endswith(f"written: {html}\n") and "\x1b" not in shown.out
    for words in ("- Bound by its tail; ", "Bytes, counted", "Accuracy of gpt", "step 19", "There is no GPU here"):
        assert words.lower() in last.lower(), words
    assert "matmul in module 1, demo.py:" in last and "Cure, verified by training on: matmul in fp32" in last
    assert "halfstep black box, step 19: overflow of float16" in shown.out  # the verdict as it is printed
    assert shown.err.startswith("5 parts, about 1 minute\n")
    assert "[0 %] 1/5 time and bytes of a model bound by products ..." in shown.err and "Traceback" not in shown.err
    page = Page(html.read_text(encoding="utf-8"))
    assert page.problems == [] and page.fetches() == [] and len(page.pictures()) == 9
    texts = " ".join(page.texts)
    assert texts.index("Conclusions") < texts.index("Time of a step") < texts.index("How it was measured")
    data = json.loads(record.read_text())
    assert data["missing"] == [] and data["rescue"]["broken_at"] == 19 and len(data["paces"]) == 3
    assert data["paces"][0]["rows"][0]["label"] == "fp32" and data["tasks"][0]["task"] == "gpt"


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 50), (0.5, 10), (0.04, 20)])
def test_a_slow_machine_trains_fewer_steps(monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int) -> None:
    asked: dict[str, Any] = {}

    def compared(*given: Any, **options: Any) -> None:
        asked.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_task", lambda name: small_task(name=name))
    monkeypatch.setattr(command, "probed", lambda *given: Probe(0, 0, seconds))
    monkeypatch.setattr(command, "compare", compared)
    with pytest.raises(KeyboardInterrupt):
        command._train(demo([], BF16), "gpt", 50, lambda share: None)
    assert asked["steps"] == steps


@pytest.mark.usefixtures("small")
def test_ctrl_c_keeps_the_finished_parts_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**options: Any) -> Rescue:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "rescue", interrupted)
    html, record = tmp_path / "report.html", tmp_path / "demo.json"
    assert carry_out(html, record, "cpu") == 130
    shown = capsys.readouterr()
    assert "Not finished: a run in fp16 that goes NaN (interrupted) and accuracy of gpt beside fp32" in shown.out
    assert "Bound by its tail" in shown.out and "Traceback" not in shown.out + shown.err
    texts = " ".join(Page(html.read_text(encoding="utf-8")).texts)
    assert (
        "that goes NaN (interrupted) and accuracy of gpt beside fp32." in texts and "explained and cured" not in texts
    )
    data = json.loads(record.read_text())
    assert len(data["paces"]) == 3 and data["rescue"] is None and data["tasks"] == [] and len(data["missing"]) == 2


@pytest.mark.usefixtures("small")
def test_ctrl_c_before_anything_is_measured_leaves_a_report_without_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Pace:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "pace", interrupted)
    assert carry_out(tmp_path / "r.html", None, "cpu") == 130
    assert "Not finished: time and bytes of a model bound by products (interrupted)" in capsys.readouterr().out
    assert Page((tmp_path / "r.html").read_text(encoding="utf-8")).pictures() == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "cdua"], "error: device 'cdua' is not here"),
        (["--html", "."], "--html '.' cannot be written: Is a directory"),
        (["--json", "one", "--html", "./one"], "--json and --html name the same file 'one'"),
    ],
)
def test_bad_input_is_named_and_nothing_runs(words: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["demo", *words], catch_exceptions=False)
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert complaint in done.stderr


def test_where_a_low_format_is_faster_it_is_said_with_its_interval() -> None:
    words = said(paces(row("torch.amp bf16", 0.8), row("pure bf16", 0.6), row("O0", 1.001)))
    assert words.startswith("Fastest: pure bf16, 0.60 [0.58, 0.62] of fp32's time. torch.amp bf16: 0.80 [0.78, 0.82].")
    assert "halfstep's step in fp32 (O0): undecided (1.00 [0.98, 1.02])." in words


def test_where_fp32_is_faster_it_is_said_plainly() -> None:
    words = said(paces(row("torch.amp bf16", 1.6), row("mixed bf16", 1.4), row("O0", 0.7)))
    assert words.startswith("fp32 is fastest. The nearest low format is mixed bf16: 1.40 [1.38, 1.42] of fp32's time.")
    assert "halfstep's step in fp32 (O0): 0.70 [0.68, 0.72]" in words


def test_what_the_machine_does_not_resolve_is_undecided() -> None:
    noisy = Ratio(median=1.0, low=0.5, high=1.5, rounds=5)
    words = said(paces(row("torch.amp bf16", 0.9), row("mixed bf16", 0.8), control=noisy))
    assert words.startswith("Undecided: mixed bf16 comes first with 0.80 [0.78, 0.82] of fp32's time,")
    found = paces(row("torch.amp bf16", 0.9), row("mixed bf16", 0.8), control=noisy)
    assert conclusions(demo(found, BF16))[0].tone == "open"


def test_without_units_what_was_left_out_is_named_with_its_reason() -> None:
    slow = [row(f"{name} bf16", None, slow=40.0) for name in ("torch.amp", "mixed")]
    found = paces(*slow, row("O0", 0.9))
    words = said(found, NONE)
    assert "also without units for bf16, as here" in " ".join(conclusions(demo(found, NONE))[1].more)
    begin = "fp32 is fastest. A step of each low format took over 40 times as long: this CPU has no bf16 units."
    assert words.startswith(f"{begin} halfstep's step in fp32 (O0): 0.90")
    some = said(paces(slow[0], row("mixed bf16", 1.5)), NONE)
    assert "A step took over 40 times fp32's, and was left out: torch.amp bf16: this CPU has no bf16 units." in some


def test_a_candidate_that_is_far_slower_has_its_bytes_but_no_turns() -> None:
    now = [0.0]

    def timed_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        now[0] += 9.0 if torch.is_autocast_enabled("cpu") else 0.1  # torch.amp alone opens torch's own region
        return loss_fn(model, x, y)

    compared = candidates(("O0",), "cpu")
    made = pace(small_task(loss_fn=timed_loss), compared, device="cpu", seconds=0.0, clock=lambda: now[0])
    fp32, amp, o0 = made.rows
    assert amp.slow == pytest.approx(90) and amp.to_fp32 is None and amp.state_bytes == fp32.state_bytes
    assert o0.slow == 0.0 and o0.to_fp32 is not None and o0.to_fp32.median == pytest.approx(1) and o0.to_amp is None
    assert made.control.rounds == o0.to_fp32.rounds == 5 and o0.saved_bytes == fp32.saved_bytes > 0


def test_bytes_are_those_of_the_strategies() -> None:
    compared = candidates(("mixed", "lean"), "cpu")
    made = pace(workload().task, compared, device="cpu", seconds=0.0)
    fp32, _, _, lean = made.rows
    weights = 8 * 16 + 16 + 16 + 1
    assert made.parameters == weights and fp32.state_bytes - 3 * 4 * weights in range(64)
    assert lean.state_bytes < 0.6 * fp32.state_bytes


def test_on_a_terminal_there_is_a_bar_and_notes_stay() -> None:
    file = io.StringIO()
    with Watch(Console(file=file, force_terminal=True, width=80)) as watch:
        watch.see(0.5, "1/2 a part")
        watch.see(0.7, note="a result")
    assert "1/2 a part" in file.getvalue() and "a result" in file.getvalue()


def test_the_workloads_are_smaller_without_units() -> None:
    with_units, without = (workloads("cpu", units=units) for units in (True, False))
    assert "batch 8 x 128" in with_units[0].task.about and "batch 1 x 64" in without[0].task.about
    x, y = without[0].task.batches(0, 0)
    assert x.shape == y.shape == (1, 64)


def test_the_tiny_workload_trains_under_every_policy_of_the_demo() -> None:
    task = workloads("cpu", units=True)[2].task
    found = pace(task, candidates(TIMED, "cpu"), device="cpu", seconds=0.0)
    assert [row.label for row in found.rows] == [
        "fp32", "torch.amp bf16", "mixed bf16", "lean bf16", "pure bf16", "O0",
    ]  # fmt: skip
    assert all(row.to_fp32 is not None for row in found.rows[1:])
