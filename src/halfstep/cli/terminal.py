"""What the commands share: consoles, tables, checked input, their command lines, and strict JSON."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from halfstep.errors import did_you_mean
from halfstep.report import strict_json
from halfstep.tasks import TaskError

__all__ = [
    "INTERRUPTED", "WRONG_USE", "command_line", "complain", "console", "device_type", "item", "say", "table",
    "writable", "write_json",
]  # fmt: skip

PLAIN_WIDTH = 400  # columns of a table in a file or pipe
WRONG_USE = 2  # exit code for bad input
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def console(*, stderr: bool = False) -> Console:
    """Return a console; where it is no terminal, lines are not cut."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH, soft_wrap=True)


def say(out: Console, line: str = "", style: str | None = None) -> None:
    """Print one line as it is."""
    out.print(line, style=style, markup=False, highlight=False)


def item(out: Console, line: str, style: str | None = None) -> None:
    """Print one entry of a list; on a terminal its further lines are indented."""
    width = out.width if out.is_terminal else PLAIN_WIDTH * 10
    for part in textwrap.wrap(f"- {line}", width, subsequent_indent="  ", break_on_hyphens=False):
        say(out, part, style)


def complain(error: BaseException) -> int:
    """Print an error in red, on one line of stderr; return the exit code for bad input."""
    words = " ".join(f"error: {error}".split())
    console(stderr=True).print(words, style="red", markup=False, highlight=False)
    return WRONG_USE


def command_line(*words: str, **options: object) -> str:
    """Return the command line of ``halfstep *words``, with the options that are set; True is a flag."""
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items() if value]
    parts = [part for name, value in given for part in ([name] if value is True else [name, str(value)])]
    return shlex.join(["halfstep", *words, *parts])


def table(out: Console, *headers: str, right: tuple[int, ...] = ()) -> Table:
    """Return an empty table, in Markdown where the console is no terminal; columns `right` are flush right."""
    made = Table(box=box.ROUNDED if out.is_terminal else box.MARKDOWN)
    for place, header in enumerate(headers):
        made.add_column(header, justify="right" if place in right else "left")
    return made


def device_type(wanted: str) -> str:
    """Return `wanted` if this machine has it; for "" the accelerator, if there is one, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = ("cpu",) if accelerator is None else (accelerator.type, "cpu")
    if not wanted:
        return there[0]
    if wanted not in there:
        raise TaskError(f"device {wanted!r} is not here{did_you_mean(wanted, there)}; there is {' and '.join(there)}")
    return wanted


def writable(path: Path | None, option: str = "--json") -> None:
    """Make sure that a report can be written to `path`, the value of `option`; a new file is removed again."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()
    except OSError as error:
        raise TaskError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def write_json(out: Console, path: Path | None, report: dict[str, Any]) -> None:
    """Write `report` to `path`, if there is one, and print its path."""
    if path is not None:
        path.write_text(strict_json(report), encoding="utf-8")
        say(out, f"written: {path}")
