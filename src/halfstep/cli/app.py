"""The commands and their options. The code of a command is in the file of its name, which is imported when it runs.

Help and completion need this file alone, and no torch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

import halfstep as hs
from halfstep.cli import options
from halfstep.cli.options import TASK, Device, Html, Json, Policies, PolicyLabel, Sarif, TaskName

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
    """Make a command of its options, which its docstring explains: it calls `carry_out` of the file NAME with them."""
    name = declared.__name__
    about, _, section = (inspect.getdoc(declared) or "").partition("\n\nOptions:\n")
    helps = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.M))
    hints = inspect.get_annotations(declared, eval_str=True)
    declared.__annotations__ = {key: _with_help(hint, helps.get(key, "")) for key, hint in hints.items()}

    @app.command(name, help=about, context_settings=SETTINGS.get(name))
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
    info.help = " ".join(text.split()) or info.help
    return annotated[plain, info]


SETTINGS = {"run": {"allow_interspersed_args": False, "ignore_unknown_options": True}}
"""Of commands that pass words on to a script."""


@command
def compare(
    task: Annotated[
        list[str] | None, typer.Option(help=f"{TASK} Again for more. Default: all three.", autocompletion=options.task)
    ] = None,
    policies: Policies = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    seeds: Annotated[int | None, typer.Option(min=1)] = None,
    json: Json = None, html: Html = None, device: Device = "",
) -> None:  # fmt: skip
    """Train each policy from the same weights on the same batches, in turns, beside fp32 and torch.amp at its best.

    Prints what each did to the result, to the time of a step and to memory.

    Options:
        policies: Presets, torch.amp or policy files (.toml), each with :bf16 or :fp16 for another format; with commas
            between them, or the option again. fp32 and torch.amp always run.
        steps: Training steps. Default: the task's.
        seeds: Runs of each policy. Default: 5, the fewest for a verdict.
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

    Options:
        steps: Steps to look at.
        after: Training steps before them.
        rows: Rows to print.
        sort: error, accumulated, headroom, time, bytes, ... Default: what loses most.
        module: Pattern of the modules to print.
        role: activation, 'activation gradient', weight, 'weight gradient', update, state.
        what_if: A format, such as fp16 or fp8_e4m3:1024 (loss scale): what it would lose.
    """


@command
def doctor(device: str = "", quick: Annotated[bool, typer.Option("--quick")] = False, json: Json = None) -> None:
    """Measure what this machine gains from each format, and say which preset to use, and why.

    Also: which optimizers make a step wait for the device, and which settings of this machine stand in the way.

    Options:
        device: The only device type to look at. Default: the accelerator, if any, and the CPU.
        quick: Small sizes and few rounds: an indication.
    """


@command
def ops(
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", autocompletion=options.OPERATORS)
    ] = None,
    policy: PolicyLabel = "mixed", diff: Annotated[str, typer.Option(autocompletion=options.policy)] = "",
    model: str = "", device: Device = "", json: Json = None,
) -> None:  # fmt: skip
    """Show the rule of every operator under a policy: which part of the policy decides, why, and from which source.

    Options:
        patterns: Operators, such as softmax or 'conv*'. Default: all with a rule.
        diff: Show what differs from this policy instead.
        model: path/to/file.py:function, which returns an hs.Task or a torch.nn.Module: show its plan.
    """


@command
def engine(name: Annotated[str, typer.Argument()], policy: PolicyLabel = "mixed", accept: str = "") -> None:
    """Write a policy as the configuration of another engine; what that does otherwise goes to stderr.

    Options:
        name: deepspeed, megatron or torchtitan.
        accept: Fields of the policy that the engine may leave out, with commas.
    """


@command
def explain(page: Annotated[str, typer.Argument()] = "") -> None:
    """Print the page on a cause that a verdict names: what shows it, what to do, and an example.

    Options:
        page: precision, scale, data, model, divergence, loop or unknown. Default: list them.
    """


@command
def replay(
    file: Annotated[Path, typer.Argument()], model: Annotated[str, typer.Option()], json: Json = None,
    sarif: Sarif = None, html: Html = None,
) -> None:  # fmt: skip
    """Replay a step that was not finite, from its evidence, and show its cause, its place and what to change.

    Options:
        file: A halfstep-blackbox-STEP.pt.
        model: path/to/file.py:function, which returns the hs.Task of that run.
    """


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

    Options:
        script: A Python file; with --policy also a program, such as torchrun.
        args: Its arguments.
        policy: Run a script of torch.amp under this policy: a preset or a policy file (.toml), with :bf16 or :fp16 for
            another format. Before the script.
        force: Use halfstep even if an apex with amp is installed. Before the script.
        evidence: A folder: each step that is not finite is explained and written there. Before the script.
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

    Options:
        policies: More of them, side by side, with commas between; 'all': every preset.
        devices: How many devices train together.
        shard: How they share the work: ddp or fsdp2.
        replicas: fsdp2: how many groups of devices hold the whole model each (HSDP).
        units: fsdp2: pattern of modules that are gathered one after the other. As hs.shard.
        gpu: h200, h100, a100-80, 4090, t4, ... or a size as 96GiB: does it fit?
        batch: Batch of a device. Default: the task's.
        largest: With --gpu: look for the largest batch that fits.
        device: cpu or cuda: whose operators are planned.
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

    Options:
        output: Write the policy to this file (.toml).
        target: time, memory, or the weights of both, such as 0.7:0.3.
        max_loss_rise: How much higher than fp32's the loss may end, as a fraction (0.01: one per cent). Default: the
            spread of fp32 from seed to seed.
        minutes: Time for measuring.
        seeds: Pairs of trainings of the test at the end, at least. Default: what it takes.
        seed: Of weights, batches and orders.
        dtypes: Low formats to try: bf16, fp16, or both with a comma. Default: the device's.
        compile: Whether compiled steps are tried.
        resume: Go on with what an earlier search for this file measured.
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

    Options:
        targets: A .py file, a folder, path/to/file.py:function, which returns an hs.Task (its file is read, and one
            step of it traced), or lenet5, resnet, gpt.
        severity: The least severity for exit code 1: note, warning or error.
        ignore: Codes of rules to leave out, with commas.
        explain: Show a rule with an example, such as HS001.
    """
