"""The commands: each has its options and its code in a file of its name, which is imported when it runs."""

from __future__ import annotations

import functools
import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import halfstep as hs
from halfstep.cli.terminal import complain

FUNCTIONS = (
    "run_compare", "run_demo", "run_audit", "run_doctor", "run_ops", "run_engine", "run_replay", "run_run", "run_plan",
    "run_tune", "run_lint",
)  # fmt: skip
"""In the order of the help."""

COMMANDS = {name.removeprefix("run_"): name for name in FUNCTIONS}
"""Command, and the file that it is in -> its function."""

SETTINGS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}
"""Of commands that pass words on to a script."""


class Commands(TyperGroup):
    """The commands by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = dict.fromkeys(COMMANDS)  # the names alone

    def get_command(self, ctx: Any, name: str) -> Any:
        """Import a command; None if there is none of this name."""
        if name not in COMMANDS:
            return None
        run = getattr(importlib.import_module(f"halfstep.cli.{name}"), COMMANDS[name])

        @functools.wraps(run)
        def ended(*args: Any, **options: Any) -> None:
            try:
                code = run(*args, **options)
            except hs.HalfstepError as error:
                if name in SETTINGS:
                    raise  # it is the script's, whose errors are shown as Python shows them
                code = complain(error)
            raise typer.Exit(code)

        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command(name, context_settings=SETTINGS.get(name))(ended)
        return typer.main.get_command(made)


app = typer.Typer(
    name="halfstep",
    cls=Commands,
    help="Mixed-precision training in which precision is data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(hs.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Mixed-precision training in which precision is data."""
