"""Numbers in README and docs are what the committed JSON files and the code say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.markdown import complete, fill, names

ROOT = Path(__file__).resolve().parent.parent


def test_documents_say_what_was_measured() -> None:
    check = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_a_number_changed_by_hand_is_replaced_and_a_long_table_is_only_in_the_complete_page() -> None:
    page, made = "<!-- a b -->\n| 65505 |\n<!-- end -->\n\n{{ c }}\n", {"a b": "| 65504 |", "c": "| 1 |"}
    assert names(page) == {"a b", "c"}
    assert fill(page, made) == page.replace("65505", "65504")
    assert complete(page, made) == page.replace("{{ c }}", "| 1 |")
