"""The commands of `halfstep` with all their arguments and options, for docs/reference/command-line.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from benchmarks.markdown import table
from halfstep.cli import app


def described_all() -> str:
    """Return a table of the commands, and a section for each."""
    group: Any = typer.main.get_command(app)
    context = Any  # no command asks for it
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    rows = [[f"[`{name}`](#halfstep-{name})", first_sentence(command.help)] for name, command in commands.items()]
    parts = [table(["command", "what it does"], rows)]
    for name, command in commands.items():
        parts += [f"## halfstep {name}", *described(name, command)]
    return "\n\n".join(parts)


def described(name: str, command: Any) -> Iterator[str]:
    """Yield the paragraphs of one command: its call, its text, its arguments and its options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    yield f"```text\nhalfstep {' '.join([name, *(['[OPTIONS]'] if options else []), *map(argument, arguments)])}\n```"
    yield escaped(inspect.cleandoc(command.help or "").replace("\b\n", ""))
    if arguments:
        rows = [[f"`{argument(p)}`", escaped(getattr(p, "help", None) or "")] for p in arguments]
        yield table(["argument", "what it is"], rows)
    if options:
        yield table(["option", "default", "what it does"], [option(p) for p in options])


def argument(parameter: Any) -> str:
    """Return an argument as a call shows it."""
    name = parameter.name.upper() + ("" if parameter.nargs == 1 else "...")
    return name if parameter.required else f"[{name}]"


def option(parameter: Any) -> list[str]:
    """Return the row of an option."""
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = f"`{default}`" if isinstance(default, (str, int, float)) and default not in ("", False) else ""
    if default is True:
        shown = f"`{parameter.opts[0]}`"
    return [names, shown, escaped(parameter.help or "")]


def escaped(text: str) -> str:
    """Return the text of a help page as Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def first_sentence(text: str | None) -> str:
    """Return the first paragraph of a help page in one line."""
    return escaped(" ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split()))
