"""``halfstep engine``: a policy as the configuration of DeepSpeed, Megatron-LM or torchtitan."""

from __future__ import annotations

import typer

from halfstep.cli.options import split
from halfstep.errors import PolicyError, TaskError, did_you_mean
from halfstep.policy.engines import ENGINES, configured
from halfstep.tasks.candidates import policy_named


def carry_out(name: str, policy: str, accept: str) -> int:
    """Run the command; return its exit code."""
    try:
        if name not in ENGINES:
            raise TaskError(f"unknown engine {name!r}{did_you_mean(name, ENGINES)}; there are {', '.join(ENGINES)}")
        made = configured(ENGINES[name], policy_named(policy, "cpu"), split(accept))
    except PolicyError as error:
        typer.echo(f"error: {error}", err=True)  # a line for each field
        return 2
    typer.echo(str(made))
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    return 0
