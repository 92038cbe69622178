"""Every Python snippet in the README runs, from top to bottom, in one namespace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.snippets import run_page, snippets

README = Path(__file__).resolve().parent.parent / "README.md"


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert len(snippets(README)) == 6
    run_page(README)
    saved = torch.load(tmp_path / "weights.pt")
    assert all(value.dtype is torch.float32 for value in saved.values())
    printed = capsys.readouterr().out
    assert "HostStepResult(" in printed and "softmax" in printed


def test_the_first_screen_has_the_two_commands() -> None:
    first = README.read_text(encoding="utf-8").splitlines()[:25]
    assert any(line.startswith("make demo") for line in first) and any(line.startswith("make test") for line in first)
