"""The table of killed runs."""

from __future__ import annotations

from benchmarks.kills import CASES
from benchmarks.kills_tables import kills_table


def test_the_table_has_a_row_for_each_case_and_one_for_the_disk() -> None:
    row = {"runs": 9, "killed": 8, "cut_off": 3, "restarts": 10, "damaged": 0, "equal": 9}
    report = {"command": "c", "torch": "2.13", "updates": 24, "every": 3}
    cases = {name: {"title": case.title, **row} for name, case in CASES.items()}
    text = kills_table({**report, "cases": cases, "disk": {"runs": 5, "refused": 5, "equal": 5}})
    assert text.count("| 9 | 8 | 3 | 10 | 0 | 9 |") == len(CASES)
    assert "| one process, disk full at a random byte | 5 | - | - | - | - | 5 |" in text
    assert kills_table({}) == "Not measured here."
