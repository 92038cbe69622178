"""``halfstep engine``: a policy as the configuration of DeepSpeed, Megatron-LM or torchtitan."""

import typer

import halfstep as hs
from halfstep.cli.options import split
from halfstep.errors import did_you_mean
from halfstep.tasks import TaskError
from halfstep.tasks.candidates import policy_named

WRITERS = {
    "deepspeed": hs.Policy.to_deepspeed,
    "megatron": hs.Policy.to_megatron,
    "torchtitan": hs.Policy.to_torchtitan,
}


def carry_out(name: str, policy: str, accept: str) -> int:
    """Run the command; return its exit code."""
    try:
        if name not in WRITERS:
            raise TaskError(f"unknown engine {name!r}{did_you_mean(name, WRITERS)}; there are {', '.join(WRITERS)}")
        made = WRITERS[name](policy_named(policy, "cpu"), accept=split(accept))
    except hs.errors.PolicyError as error:
        typer.echo(f"error: {error}", err=True)  # a line for each field
        return 2
    typer.echo(str(made))
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    return 0
