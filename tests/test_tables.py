"""Numbers in README and docs are what the committed JSON files and the code say."""

from __future__ import annotations

import sys

import pytest

from benchmarks.markdown import complete, fill, names
from benchmarks.tables import main


def test_documents_say_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    assert main() == 0, capsys.readouterr().err


def test_a_number_changed_by_hand_is_replaced_and_a_long_table_is_only_in_the_complete_page() -> None:
    page, made = "<!-- a b -->\n| 65505 |\n<!-- end -->\n\n{{ c }}\n", {"a b": "| 65504 |", "c": "| 1 |"}
    assert names(page) == {"a b", "c"}
    assert fill(page, made) == page.replace("65505", "65504")
    assert complete(page, made) == page.replace("{{ c }}", "| 1 |")
