"""The command line, ``halfstep``: `app` lists its commands."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.cli.app import app as app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """Return `app`, which imports typer when it is first used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()["app"] = import_module("halfstep.cli.app").app
    return found


def main() -> None:
    """Run the command line; ``halfstep lint FILE...`` without options starts without typer and rich."""
    if sys.argv[1:2] == ["lint"]:
        from halfstep.advise.lint.__main__ import is_plain
        from halfstep.advise.lint.__main__ import main as lint

        if is_plain(sys.argv[2:]):
            raise SystemExit(lint(sys.argv[2:]))
    from halfstep.cli.app import app

    app(prog_name="halfstep")
