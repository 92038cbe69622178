"""The command line, ``halfstep``: `app` lists its commands."""

import sys
from typing import TYPE_CHECKING

from halfstep.lazy import lazy

if TYPE_CHECKING:
    from halfstep.cli.app import app as app

__all__ = ["app", "main"]


__getattr__ = lazy(__name__, {"app": "app"})  # which imports typer


def main() -> None:
    """Run the command line; ``halfstep lint FILE...`` without options starts without typer and rich."""
    if sys.argv[1:2] == ["lint"]:
        from halfstep.advise.lint.__main__ import is_plain
        from halfstep.advise.lint.__main__ import main as lint

        if is_plain(sys.argv[2:]):
            raise SystemExit(lint(sys.argv[2:]))
    from halfstep.cli.app import app

    app(prog_name="halfstep")
