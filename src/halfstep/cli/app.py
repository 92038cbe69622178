"""The commands and their options. The code of a command is in the file of its name, which is imported when it runs.

Help and completion need this file, `options.py` and `options.toml`, and no torch.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

import halfstep as hs
from halfstep.cli import options
from halfstep.cli.options import Device, Html, Json, Policies, PolicyLabel, Sarif, TaskName
from halfstep.schema import packaged_toml

HELPS = packaged_toml("cli/options.toml")

app = typer.Typer(name="halfstep", no_args_is_help=True, pretty_exceptions_enable=False)


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


def command(declared: Callable[..., None]) -> Callable[..., None]:
    """Make a command of its options, which `options.toml` explains: it calls `carry_out` of the file NAME with them."""
    name = declared.__name__
    helps = HELPS["all"] | HELPS.get(name, {})
    hints = inspect.get_annotations(declared, eval_str=True)
    declared.__annotations__ = {key: _with_help(hint, helps.get(key, "")) for key, hint in hints.items()}

    @app.command(name, context_settings=SETTINGS.get(name))
    @functools.wraps(declared)
    def run(**given: Any) -> None:
        try:
            code = import_module(f"halfstep.cli.{name}").carry_out(**given)
        except hs.HalfstepError as error:
            if name in SETTINGS:
                raise  # it is the script's, whose errors are shown as Python shows them
            typer.secho(" ".join(f"error: {error}".split()), fg="red", err=True)
            code = 2  # as for a wrong option
        raise typer.Exit(code)

    return run


def _with_help(hint: Any, text: str) -> Any:
    annotated: Any = Annotated
    plain, info = get_args(hint) if get_origin(hint) is annotated else (hint, typer.Option())
    info = copy.copy(info)  # several options share one
    info.help = text
    return annotated[plain, info]


SETTINGS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}
"""Of commands that pass words on to a script."""


@command
def compare(
    task: Annotated[list[str] | None, typer.Option(autocompletion=options.task)] = None,
    policies: Policies = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    seeds: Annotated[int | None, typer.Option(min=1)] = None,
    json: Json = None, html: Html = None, device: Device = "",
) -> None:  # fmt: skip
    """Train each policy from the same weights on the same batches, in turns, beside fp32 and torch.amp at its best.

    Prints what each did to the result, to the time of a step and to memory.
    """


@command
def demo(html: Html = None, json: Json = None, device: Device = "") -> None:
    """Show what low formats do on this machine: time, bytes, accuracy, and a NaN explained and cured.

    It prints how long that takes, about two minutes; a slow machine trains fewer steps.
    Ctrl-C keeps the finished parts: they are printed and written, and the exit code is 130.
    """


@command
def audit(
    task: TaskName, policy: PolicyLabel = "mixed", steps: Annotated[int, typer.Option(min=1)] = 3,
    after: Annotated[int, typer.Option(min=0)] = 0, rows: Annotated[int, typer.Option(min=1)] = 24, sort: str = "",
    module: str = "*", role: str = "*", what_if: list[str] | None = None, device: Device = "", json: Json = None,
    html: Html = None,
) -> None:  # fmt: skip
    """Run a few steps of a task under a policy and show what precision does to every operator, weight and gradient.

    Findings come first: underflow, overflow, swallowed updates, low states, large errors, each with its remedy.
    """


@command
def doctor(device: str = "", quick: Annotated[bool, typer.Option("--quick")] = False, json: Json = None) -> None:
    """Measure what this machine gains from each format, and say which preset to use, and why.

    Also: which optimizers make a step wait for the device, and which settings of this machine stand in the way.
    """


@command
def ops(
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", autocompletion=options.OPERATORS)
    ] = None,
    policy: PolicyLabel = "mixed", diff: Annotated[str, typer.Option(autocompletion=options.policy)] = "",
    model: str = "", device: Device = "", json: Json = None,
) -> None:  # fmt: skip
    """Show the rule of every operator under a policy: which part of the policy decides, why, and from which source."""


@command
def engine(name: Annotated[str, typer.Argument()], policy: PolicyLabel = "mixed", accept: str = "") -> None:
    """Write a policy as the configuration of another engine; what that does otherwise goes to stderr."""


@command
def explain(page: Annotated[str, typer.Argument()] = "") -> None:
    """Print the page on a cause that a verdict names: what shows it, what to do, and an example."""


@command
def replay(
    file: Annotated[Path, typer.Argument()], model: Annotated[str, typer.Option()], json: Json = None,
    sarif: Sarif = None, html: Html = None,
) -> None:  # fmt: skip
    """Replay a step that was not finite, from its evidence, and show its cause, its place and what to change."""


@command
def run(
    script: Annotated[Path, typer.Argument()],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    policy: Annotated[str, typer.Option(autocompletion=options.policy)] = "",
    force: Annotated[bool, typer.Option("--force")] = False, evidence: Path | None = None,
) -> None:  # fmt: skip
    """Run a script unchanged: one written for NVIDIA Apex, or with --policy one written for torch.amp.

    Without --policy, `apex`, `apex.amp` and the rest are halfstep's in it. With it, regions of torch.autocast follow
    the policy, and GradScaler is halfstep's, also in processes that the script starts.
    """


@command
def plan(
    task: TaskName, policy: PolicyLabel = "mixed", policies: Policies = None,
    devices: Annotated[int, typer.Option(min=1)] = 1,
    shard: Annotated[str, typer.Option(autocompletion=options.among(lambda: ("ddp", "fsdp2")))] = "",
    replicas: Annotated[int, typer.Option(min=1)] = 1, units: list[str] | None = None,
    gpu: Annotated[str, typer.Option(autocompletion=options.GPUS)] = "",
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    largest: Annotated[bool, typer.Option("--largest/--no-largest")] = True, device: str = "", json: Json = None,
    html: Html = None,
) -> None:  # fmt: skip
    """Plan the memory of a training step, before training and without that memory.

    Prints whether it fits a GPU, what the bytes are for, which modules weigh most, and where the peak is.
    """


@command
def tune(
    task: TaskName, output: Annotated[Path, typer.Option("--output", "-o")], target: str = "time",
    max_loss_rise: float | None = None, minutes: float = 10.0, seeds: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0, dtypes: str = "",
    compile: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    resume: Annotated[bool, typer.Option("--resume")] = False, device: Device = "", html: Html = None,
    json: Json = None,
) -> None:  # fmt: skip
    """Find the cheapest policy for a task on this machine, and test whether it trains as fp32 does.

    Measures presets, exceptions, weight strategies and compiled steps beside fp32; writes the policy with its reasons.
    Ctrl-C writes the best safe policy so far; --resume goes on from there.
    """


@command
def lint(
    targets: Annotated[list[str] | None, typer.Argument(metavar="TARGET")] = None, policy: PolicyLabel = "mixed",
    severity: Annotated[
        str, typer.Option(autocompletion=options.among(lambda: ("note", "warning", "error")))
    ] = "warning",
    ignore: str = "", explain: str = "", json: Json = None, sarif: Sarif = None,
) -> None:  # fmt: skip
    """Find mistakes of mixed precision in scripts and tasks, before they run.

    Scripts are read and not run. A line's comment `# halfstep: ignore[HS012]` silences that rule there.
    """
