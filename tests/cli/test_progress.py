from __future__ import annotations

import io
from typing import Any

import torch
from rich.console import Console

from halfstep.cli.progress import SECONDS, Live, _numbers
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import compare
from tests.tasks.small import small_task

Step = tuple[Any, ...]  # what `compare` gives its `on_step`


def told(policy: str = "mixed:fp16") -> list[Step]:
    found: list[Step] = []

    def on_step(*step: Any) -> None:
        found.append(step)

    compare(small_task(clip_norm=1.0), candidates([policy], "cpu"), steps=3, seeds=2, on_step=on_step)
    return found


def test_the_numbers_are_those_of_the_loop_that_made_the_step() -> None:
    training, label, number, seconds = next(step for step in told()[::-1] if step[1] == "mixed fp16")
    loop = training.loops[label]
    record = _numbers(loop, number + 1, training.batch, seconds)
    assert record.step == number + 1 and record.scale == loop.scale() == 2.0**16 and record.skipped == 0
    assert record.loss == float(loop.loss) and record.grad_norm == float(loop.grad_norm) > 0


def test_without_a_terminal_there_is_one_plain_line_a_seed() -> None:
    file = io.StringIO()
    found = told()
    with Live(Console(file=file, width=400), "small", runs=4, steps=3, seeds=2) as live:
        for step in found:
            live.step(*step)
    first, *rest = file.getvalue().splitlines()
    assert first == "small: 4 runs of 3 steps, 2 seeds ..."
    assert len(rest) == 2 and rest[1].startswith("small: seed 2 of 2, loss after 3 steps: fp32 ")
    assert "mixed fp16 " in rest[0] and "torch.amp bf16 again" in rest[0] and "\x1b" not in file.getvalue()


def test_on_a_terminal_the_line_shows_the_numbers_and_reads_them_rarely() -> None:
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, force_terminal=True, width=300, color_system=None)
    found = [step for step in told() if step[1] == "mixed fp16"]
    with Live(console, "small", runs=1, steps=3, seeds=2, clock=lambda: now[0]) as live:
        live.step(*found[0])
        found[1][0].loops["mixed fp16"].loss = torch.tensor(123.5)  # all moments of a run share its loop
        live.step(*found[1])  # too early: what is shown stays
        assert "123.5" not in shown(live)
        now[0] += SECONDS
        live.step(*found[2])
        assert "seed 1/2, mixed fp16, step 3: loss 123.5, scale 65536, 0 skipped, gradient norm" in shown(live)
        assert "samples/s" in shown(live)


def shown(live: Live) -> str:
    return str(live.tasks[0].description)
