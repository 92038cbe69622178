"""The README: every Python snippet runs, its numbers are those of the committed files, and it is short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lens_tables import named
from tests.snippets import programs, run_programs, snippets

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = " ".join(README.read_text(encoding="utf-8").split())
LINES = 150


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_each_snippet_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(programs(README)) == 3 == len(snippets(README))
    run_programs(README)


def test_it_is_short_and_its_first_screen_states_that_no_gpu_was_measured() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES
    assert "No number on this page is from a GPU" in " ".join(lines[:10])


def test_it_has_the_two_commands() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("make demo ") for line in lines) and any(line.startswith("make test ") for line in lines)


def test_its_numbers_of_time_and_bytes_are_those_of_the_committed_files() -> None:
    cases = [case["rows"] for name, case in results("cpu")["cases"].items() if not name.endswith("_fp16")]
    mixed, pure = ([rows[name]["to_amp"]["median"] for rows in cases] for name in ("mixed", "pure"))
    assert len(cases) == 10 and "On ten models" in TEXT
    assert f"takes {min(mixed):.2f} to {max(mixed):.2f} of `torch.amp`'s time" in TEXT
    assert f"Under `pure` a step takes {min(pure):.2f} to {max(pure):.2f} of torch.amp's time" in TEXT
    least, *others = sorted(
        rows["mixed"]["counts"]["peak_bytes"] / rows["torch.amp"]["counts"]["peak_bytes"] for rows in cases
    )
    assert f"{least:.2f} of torch.amp's on a GPT and {others[0]:.2f} to {others[-1]:.2f} on the nine other" in TEXT
    saved = {name: row["counts"] for name, row in results("cpu")["cases"]["gpt256"]["rows"].items()}
    share = saved["mixed"]["saved_bytes"] / saved["torch.amp"]["saved_bytes"]
    assert f"{share:.2f} of torch.amp's bytes for backward" in TEXT
    state = {row["label"]: row["bytes"] for row in results("lean")["programs"]["gpt"]["rows"]}
    assert f"in {state['lean']:.0f} bytes a parameter instead of {state['torch.amp']:.0f}" in TEXT


def test_its_numbers_of_instruments_and_decisions_are_those_of_the_committed_files() -> None:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in named(results("lens")["faults"]).splitlines()
    ]
    named_first = {row[1]: [int(cell) for cell in row[2:5]] for row in cells if row[0].startswith("first")}
    faults = int(re.findall(r"\d+", next(row[0] for row in cells if row[0].startswith("first")))[0])
    assert named_first.pop("hs.TrainStep") == [faults] * 3 and f"names all three right for {faults}" in TEXT
    operator = max(named_first.values())
    assert f"four other instruments names the operator of {operator[0]} and the module of none" in TEXT
    assert len(named_first) == 4 and operator[1] == 0
    tune = results("tune")["goals"]
    assert f"trained as fp32 did on {len(tune['equivalent'])} of {tune['tasks']} models" in TEXT
    sets = [results(name)["stories"].values() for name in ("stories_first", "stories_fourth_first")]
    first, later = ([story for story in stories if "died" not in story] for stories in sets)
    right = [
        [sum(story[name] is True for story in stories) for stories in (first, later)] for name in ("cause", "place")
    ]
    (cause, later_cause), (place, later_place) = right
    assert f"root cause of {cause} of {len(first)}, and of {later_cause} of {len(later)} in a later set" in TEXT
    assert f"of {place} of {len(first)}, and of {later_place} of {len(later)} (" in TEXT
    plan = results("plan")["largest_error"]
    assert f"({plan['persistent']:.1%} off" in TEXT.replace(" %", "%")
    assert f"{plan['peak']:.1%} at the peak" in TEXT.replace(" %", "%")
