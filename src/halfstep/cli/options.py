"""Options that several commands have, and shell completion: the values that an option or argument may have.

`halfstep --install-completion` sets completion up in bash, zsh, fish and PowerShell.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

import halfstep as hs
from halfstep.schema import packaged_toml

FORMATS = ("bf16", "fp16")

Completion = Callable[[str], list[str]]


def among(values: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion that offers some of `values`."""

    def offered(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return offered


def policy(incomplete: str) -> list[str]:
    """Return presets, policy files (.toml) and folders; behind a colon the formats."""
    name, colon, _ = incomplete.partition(":")
    presets = packaged_toml("policy/tables/presets.toml")
    if colon and name in presets:
        return among(lambda: (f"{name}:{each}" for each in FORMATS))(incomplete)
    return among(lambda: presets)(incomplete) + _paths(incomplete, ".toml")


def policies(incomplete: str) -> list[str]:
    """Return the same for the last of several policies with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{each}" for each in policy(last)]


def task(incomplete: str) -> list[str]:
    """Return the tasks that halfstep brings, Python files and folders."""
    return among(lambda: TASKS)(incomplete) + _paths(incomplete, ".py")


def _devices() -> Iterable[str]:
    from halfstep.tasks.machine import device_types

    return device_types()


GPUS = among(lambda: packaged_toml("advise/plan/gpus.toml"))
DEVICES, OPERATORS = among(_devices), among(lambda: hs.policy.operator_names("*"))


def _paths(incomplete: str, suffix: str) -> list[str]:
    """Return files with a suffix, and folders with a slash, that begin with what was typed."""
    folder, slash, _ = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return []
    shown = [e for e in entries if not e.name.startswith(".") and (e.is_dir() or e.suffix == suffix)]
    return among(lambda: (f"{folder}{slash}{e.name}{'/' if e.is_dir() else ''}" for e in shown))(incomplete)


TASKS = ("lenet5", "resnet", "gpt")

Device = Annotated[str, typer.Option(autocompletion=DEVICES)]
Json = Annotated[Path | None, typer.Option("--json")]
Html = Annotated[Path | None, typer.Option("--html")]
Sarif = Annotated[Path | None, typer.Option("--sarif")]
PolicyLabel = Annotated[str, typer.Option("--policy", autocompletion=policy)]
Policies = Annotated[list[str] | None, typer.Option(autocompletion=policies)]
TaskName = Annotated[str, typer.Argument(metavar="TASK", autocompletion=task)]


def split(groups: str | Iterable[str] | None) -> list[str]:
    """Return the words of an option that has commas between them and may be given again."""
    given = [groups] if isinstance(groups, str) else groups or ()
    return [word.strip() for group in given for word in group.split(",") if word.strip()]
