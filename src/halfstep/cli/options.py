"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli import completion

__all__ = ["TASK", "Device", "Html", "Json", "PolicyLabel", "Sarif", "TaskName", "split"]

TASK = "lenet5, resnet, gpt or path/to/file.py:function, which returns an hs.Task."

Device = Annotated[
    str,
    typer.Option(
        help="Device type. Default: the accelerator, if there is one, else cpu.", autocompletion=completion.devices
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a report with pictures: one file, to look at and to send.")
]
Sarif = Annotated[
    Path | None, typer.Option("--sarif", help="Write what was found to this file as editors and code hosts read it.")
]
PolicyLabel = Annotated[
    str,
    typer.Option(
        "--policy",
        help="A preset or a policy file (.toml), with :bf16 or :fp16 for another format.",
        autocompletion=completion.policy,
    ),
]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help=TASK, autocompletion=completion.task)]


def split(groups: str | Iterable[str] | None) -> list[str]:
    """Return the words of an option that has commas between them and may be given again."""
    given = [groups] if isinstance(groups, str) else groups or ()
    return [word.strip() for group in given for word in group.split(",") if word.strip()]
