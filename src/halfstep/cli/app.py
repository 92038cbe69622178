"""The commands and their options. The code of a command is in the file of its name, which is imported when it runs.

Help and completion need this file alone, and no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import halfstep as hs
from halfstep.cli import options
from halfstep.cli.options import TASK, Device, Html, Json, PolicyLabel, Sarif, TaskName

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
    """Make a command of its options: it calls `carry_out` of the file NAME with them."""
    name = declared.__name__

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


SETTINGS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}
"""Of commands that pass words on to a script."""


@command
def compare(
    task: Annotated[
        list[str] | None, typer.Option(help=f"{TASK} Again for more. Default: all three.", autocompletion=options.task)
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="Presets, torch.amp or policy files (.toml), each with :bf16 or :fp16 for another format; with commas "
            "between them, or the option again. fp32 and torch.amp always run.",
            autocompletion=options.policies,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the task's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each policy. Default: 5, the fewest for a verdict.")
    ] = None,
    json: Json = None,
    html: Html = None,
    device: Device = "",
) -> None:
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
    task: TaskName,
    policy: PolicyLabel = "mixed",
    steps: Annotated[int, typer.Option(min=1, help="Steps to look at.")] = 3,
    after: Annotated[int, typer.Option(min=0, help="Training steps before them.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 24,
    sort: Annotated[
        str, typer.Option(help="error, accumulated, headroom, time, bytes, ... Default: what loses most.")
    ] = "",
    module: Annotated[str, typer.Option(help="Pattern of the modules to print.")] = "*",
    role: Annotated[
        str, typer.Option(help="activation, 'activation gradient', weight, 'weight gradient', update, state.")
    ] = "*",
    what_if: Annotated[
        list[str] | None, typer.Option(help="A format, such as fp16 or fp8_e4m3:1024 (loss scale): what it would lose.")
    ] = None,
    device: Device = "",
    json: Json = None,
    html: Html = None,
) -> None:
    """Run a few steps of a task under a policy and show what precision does to every operator, weight and gradient.

    Findings come first: underflow, overflow, swallowed updates, low states, large errors, each with its remedy.
    """


@command
def doctor(
    device: Annotated[
        str, typer.Option(help="The only device type to look at. Default: the accelerator, if any, and the CPU.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds: an indication.")] = False,
    json: Json = None,
) -> None:
    """Measure what this machine gains from each format, and say which preset to use, and why.

    Also: which optimizers make a step wait for the device, and which settings of this machine stand in the way.
    """


@command
def ops(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN",
            help="Operators, such as softmax or 'conv*'. Default: all with a rule.",
            autocompletion=options.OPERATORS,
        ),
    ] = None,
    policy: PolicyLabel = "mixed",
    diff: Annotated[
        str, typer.Option(help="Show what differs from this policy instead.", autocompletion=options.policy)
    ] = "",
    model: Annotated[
        str,
        typer.Option(help="path/to/file.py:function, which returns an hs.Task or a torch.nn.Module: show its plan."),
    ] = "",
    device: Device = "",
    json: Json = None,
) -> None:
    """Show the rule of every operator under a policy: which part of the policy decides, why, and from which source."""


@command
def engine(
    name: Annotated[str, typer.Argument(help="deepspeed, megatron or torchtitan.")],
    policy: PolicyLabel = "mixed",
    accept: Annotated[str, typer.Option(help="Fields of the policy that the engine may leave out, with commas.")] = "",
) -> None:
    """Write a policy as the configuration of another engine; what that does otherwise goes to stderr."""


@command
def explain(
    page: Annotated[
        str, typer.Argument(help="precision, scale, data, model, divergence, loop or unknown. Default: list them.")
    ] = "",
) -> None:
    """Print the page on a cause that a verdict names: what shows it, what to do, and an example."""


@command
def replay(
    file: Annotated[Path, typer.Argument(help="A halfstep-blackbox-STEP.pt.")],
    model: Annotated[str, typer.Option(help="path/to/file.py:function, which returns the hs.Task of that run.")],
    json: Json = None,
    sarif: Sarif = None,
    html: Html = None,
) -> None:
    """Replay a step that was not finite, from its evidence, and show its cause, its place and what to change."""


@command
def run(
    script: Annotated[Path, typer.Argument(help="A Python file; with --policy also a program, such as torchrun.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Run a script of torch.amp under this policy: a preset or a policy file (.toml), with :bf16 or :fp16 "
            "for another format. Before the script.",
            autocompletion=options.policy,
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Use halfstep even if an apex with amp is installed. Before the script.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option(help="A folder: each step that is not finite is explained and written there. Before the script."),
    ] = None,
) -> None:
    """Run a script unchanged: one written for NVIDIA Apex, or with --policy one written for torch.amp.

    Without --policy, `apex`, `apex.amp` and the rest are halfstep's in it. With it, regions of torch.autocast follow
    the policy, and GradScaler is halfstep's, also in processes that the script starts.
    """


@command
def plan(
    task: TaskName,
    policy: PolicyLabel = "mixed",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="More of them, side by side, with commas between; 'all': every preset.",
            autocompletion=options.policies,
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many devices train together.")] = 1,
    shard: Annotated[
        str,
        typer.Option(
            help="How they share the work: ddp or fsdp2.", autocompletion=options.among(lambda: ("ddp", "fsdp2"))
        ),
    ] = "",
    units: Annotated[
        list[str] | None,
        typer.Option(help="fsdp2: pattern of modules that are gathered one after the other. As hs.shard."),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="h200, h100, a100-80, 4090, t4, ... or a size as 96GiB: does it fit?", autocompletion=options.GPUS
        ),
    ] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch of a device. Default: the task's.")] = None,
    largest: Annotated[
        bool, typer.Option("--largest/--no-largest", help="With --gpu: look for the largest batch that fits.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda: whose operators are planned.")] = "",
    json: Json = None,
    html: Html = None,
) -> None:
    """Plan the memory of a training step, before training and without that memory.

    Prints whether it fits a GPU, what the bytes are for, which modules weigh most, and where the peak is.
    """


@command
def tune(
    task: TaskName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the policy to this file (.toml).")],
    target: Annotated[str, typer.Option(help="time, memory, or the weights of both, such as 0.7:0.3.")] = "time",
    max_loss_rise: Annotated[
        float | None,
        typer.Option(
            help="How much higher than fp32's the loss may end, as a fraction (0.01: one per cent). Default: the "
            "spread of fp32 from seed to seed."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for measuring.")] = 10.0,
    seeds: Annotated[
        int, typer.Option(min=0, help="Pairs of trainings of the test at the end, at least. Default: what it takes.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and orders.")] = 0,
    dtypes: Annotated[
        str, typer.Option(help="Low formats to try: bf16, fp16, or both with a comma. Default: the device's.")
    ] = "",
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether compiled steps are tried.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an earlier search for this file measured.")
    ] = False,
    device: Device = "",
    html: Html = None,
    json: Json = None,
) -> None:
    """Find the cheapest policy for a task on this machine, and test whether it trains as fp32 does.

    Measures presets, exceptions, weight strategies and compiled steps beside fp32; writes the policy with its reasons.
    Ctrl-C writes the best safe policy so far; --resume goes on from there.
    """


@command
def lint(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="A .py file, a folder, path/to/file.py:function, which returns an hs.Task (its file is read, and one "
            "step of it traced), or lenet5, resnet, gpt.",
        ),
    ] = None,
    policy: PolicyLabel = "mixed",
    severity: Annotated[
        str,
        typer.Option(
            help="The least severity for exit code 1: note, warning or error.",
            autocompletion=options.among(lambda: ("note", "warning", "error")),
        ),
    ] = "warning",
    ignore: Annotated[str, typer.Option(help="Codes of rules to leave out, with commas.")] = "",
    explain: Annotated[str, typer.Option(help="Show a rule with an example, such as HS001.")] = "",
    json: Json = None,
    sarif: Sarif = None,
) -> None:
    """Find mistakes of mixed precision in scripts and tasks, before they run.

    Scripts are read and not run. A line's comment `# halfstep: ignore[HS012]` silences that rule there.
    """
