"""The door of the command line: which commands there are and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import halfstep as hs

__all__ = ["app"]

app = typer.Typer(
    name="halfstep",
    help="Mixed-precision training in which precision is data.",
    no_args_is_help=True,
    add_completion=False,
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


@app.command()
def compare(
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="lenet5, gpt or path/to/file.py:function; again for more. Default: both."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="Presets, torch.amp or policy files (.toml), each with :bf16 or :fp16 for another format; with commas "
            "between them, or the option again. fp32 and torch.amp always run.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the task's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each policy. Default: 5, the fewest for a verdict.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    excerpt: Annotated[
        bool, typer.Option("--excerpt", help="Three seeds and few steps: a look, in a minute or two.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device type. Default: the accelerator, if there is one, else cpu.")] = "",
) -> None:
    """Train each policy from the same weights on the same batches, in turns, beside fp32 and torch.amp at its best.

    Prints what each did to the result, to the time of a step and to memory.
    """
    from halfstep.cli.compare import run_compare

    labels = [label for group in policies or () for label in group.split(",") if label.strip()]
    raise typer.Exit(
        run_compare(
            tasks=task or (),
            labels=labels,
            steps=steps,
            seeds=seeds,
            json_path=json,
            excerpt=excerpt,
            device=device,
        )
    )
