"""What the commands share: consoles, tables, the files that they write, checked input, and their command lines."""

import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

import halfstep as hs
from halfstep import report as doc

PLAIN_WIDTH = 400  # columns of a table in a file or pipe
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it

STYLES = {
    "good": "green", "bad": "red", "open": "yellow", "note": "yellow", "title": "bold", "dim": "dim",
    "low": "green", "fp8": "green", "fp32": "cyan", "keep": "blue", "widest": "magenta", "banned": "red", "none": "dim",
}  # fmt: skip
"""Tone of a cell or line, or the rule in it -> style of its text."""


DASH = Path("-")
"""The file that is the standard output."""


class Files:
    """The files that a command is to write, option -> path: checked when it begins, written when it ends.

    If one is "-", the standard output is kept for it: what else the command prints goes to stderr.
    """

    def __init__(self, **paths: Path | None) -> None:
        self.paths = {name: path for name, path in paths.items() if path is not None}
        options: dict[Path, str] = {}
        for name, path in self.paths.items():
            first = options.setdefault(path.resolve(), name)
            if first != name:
                raise hs.errors.TaskError(f"--{first} and --{name} name the same file {str(path)!r}; give them two")
        self._stdout, self._redirected = sys.stdout, ExitStack()
        if DASH in self.paths.values():
            self._redirected.enter_context(redirect_stdout(sys.stderr))
        for name, path in self.paths.items():
            if path == DASH:
                continue
            new = not path.exists()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a", encoding="utf-8").close()
                if new:
                    path.unlink()
            except OSError as error:
                raise hs.errors.TaskError(f"--{name} {str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, out: Console, **writers: Callable[[Path], object]) -> None:
        """Call the writers of those that were asked for with their paths, and print these."""
        for name, write in writers.items():
            path = self.paths.get(name)
            if path == DASH:
                with TemporaryDirectory() as folder:
                    write(Path(folder, name))
                    self._stdout.write(Path(folder, name).read_text(encoding="utf-8"))
            elif path is not None:
                write(path)
                say(out, f"written: {path}")
        self._redirected.close()


def record(**facts: object) -> Callable[[Path], object]:
    """Return the writer of ``--json``: the command, the version and what was found."""
    text = doc.strict_json({"command": command_line(), "halfstep": hs.__version__, **facts})
    return lambda path: path.write_text(text, encoding="utf-8")


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


def show(out: Console, table: doc.Table, *, ends: Collection[int] = ()) -> None:
    """Print a table, in Markdown where the console is no terminal; rows `ends` have a line below them on a terminal."""
    made = rich_table.Table(box=box.ROUNDED if out.is_terminal else box.MARKDOWN)
    for place, header in enumerate(table.headers):
        made.add_column(header, justify="left" if place == 0 or place in table.words else "right")
    for number, row in enumerate(table.rows):
        cells = (Text(cell.text, style=STYLES.get(cell.tone, "")) for cell in row)
        made.add_row(*cells, end_section=out.is_terminal and number in ends)
    out.print(made)


def print_section(out: Console, section: doc.Section) -> None:
    """Print what of a page's section is text or a table; pictures, and what a page shows on demand, need a page."""
    say(out)
    say(out, section.heading, style="bold")
    for block in section.blocks:
        match block:
            case doc.Paragraph():
                say(out, block.text, "yellow" if isinstance(block, doc.Note) else None)
            case doc.Bullets():
                for line in block.items:
                    item(out, line)
            case doc.Facts():
                for fact in block.facts:
                    item(out, " ".join((f"{fact.heading}: {fact.text}", *fact.more)))
            case doc.Table():
                show(out, block)


def command_line() -> str:
    """Return the command line that this process was started with."""
    return shlex.join(["halfstep", *sys.argv[1:]])


def machine_line(about: Mapping[str, Any]) -> str:
    """Return the processor, the accelerator and the versions of `machine()` on one line."""
    on = f", {about['accelerator']}" if about["accelerator"] else ""
    return f"{about['cpu']}, {about['cores']} cores{on}; torch {about['torch']}, Python {about['python']}"
