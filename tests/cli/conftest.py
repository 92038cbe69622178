"""Commands of the command line that run in the process of the tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def words_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command that is invoked find its words where a process of its own has them."""
    invoke = CliRunner.invoke

    def noted(self: CliRunner, app: Any, args: Any = None, **options: Any) -> Any:
        monkeypatch.setattr(sys, "argv", ["halfstep", *(args or ())])
        return invoke(self, app, args, **options)

    monkeypatch.setattr(CliRunner, "invoke", noted)
