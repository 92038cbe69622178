from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from halfstep.cli.comparison import comparison_section
from halfstep.cli.terminal import print_section
from halfstep.tasks.compare import Comparison
from tests.cli.small_comparison import comparison


def shown(what: Comparison, *, terminal: bool = False) -> str:
    file = io.StringIO()
    print_section(Console(file=file, force_terminal=terminal, width=200), comparison_section(what))
    return file.getvalue()


def cells(text: str, label: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith(f"| {label} ")]


def test_a_row() -> None:
    text = shown(comparison(5))
    result, cost = cells(text, "O2 fp16")
    assert result == ["O2 fp16", "90.00", "−7.00 [−7.00, −7.00]", "worse", "0 to 4", "65536"]
    assert cost == ["O2 fp16", "12.3", "0.700", "0.700", "2.50", "1.00"]
    assert cells(text, "torch.amp bf16")[1][2:4] == ["undecided (1.008)", ""]
    assert cells(text, "fp32")[0][2:4] == ["", ""]
    assert "inside ±1, fixed beforehand" in text and "indication" not in text
    assert "torch.amp twice = 1.002 [0.990, 1.012] (the same result, bit for bit)" in text
    assert "O2 fp16: fp16 is emulated" in text


def test_few_seeds_are_only_an_indication() -> None:
    assert "An indication, not a verdict: 2 runs of each policy. A verdict takes 5." in shown(comparison(2))
    text = shown(comparison(1))
    assert "1 seed," in text and cells(text, "O2 fp16")[0][2:4] == ["−7.00", "undecided"]


def test_runs_that_do_not_repeat_are_not_passed_over() -> None:
    assert "NOT the same result" in shown(dataclasses.replace(comparison(5), repeatable=False))


def test_on_a_terminal_it_has_colours_and_lines() -> None:
    text = shown(comparison(5), terminal=True)
    assert "\x1b[31m" in text and "╭" in text


def test_without_times_the_column_still_names_torch_amp() -> None:
    short = comparison(5)
    short = dataclasses.replace(
        short, control=None, rows=tuple(dataclasses.replace(r, to_fp32=None, to_amp=None) for r in short.rows)
    )
    assert "time / torch.amp bf16" in shown(short) and "No times: a run is too short" in shown(short)
