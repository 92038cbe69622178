"""The commands and their options; each command imports its code when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import halfstep as hs
from halfstep.cli import completion

__all__ = ["app"]

app = typer.Typer(
    name="halfstep",
    help="Mixed-precision training in which precision is data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


Device = Annotated[
    str,
    typer.Option(
        help="Device type. Default: the accelerator, if there is one, else cpu.", autocompletion=completion.devices
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")]
PolicyLabel = Annotated[
    str,
    typer.Option(
        "--policy",
        help="A preset or a policy file (.toml), with :bf16 or :fp16 for another format.",
        autocompletion=completion.policy,
    ),
]


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
        typer.Option(
            "--task",
            help="lenet5, resnet, gpt or path/to/file.py:function; again for more. Default: all three.",
            autocompletion=completion.task,
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="Presets, torch.amp or policy files (.toml), each with :bf16 or :fp16 for another format; with commas "
            "between them, or the option again. fp32 and torch.amp always run.",
            autocompletion=completion.policies,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the task's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each policy. Default: 5, the fewest for a verdict.")
    ] = None,
    json: Json = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report with pictures: one file, to look at and to send.")
    ] = None,
    device: Device = "",
) -> None:
    """Train each policy from the same weights on the same batches, in turns, beside fp32 and torch.amp at its best.

    Prints what each did to the result, to the time of a step and to memory.
    """
    from halfstep.cli.compare import run_compare

    labels = [label for group in policies or () for label in group.split(",") if label.strip()]
    code = run_compare(
        tasks=task or (), labels=labels, steps=steps, seeds=seeds, json_path=json, html_path=html, device=device,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def demo(
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a report with pictures: one file, to look at and to send.")
    ] = None,
    json: Json = None,
    device: Device = "",
) -> None:
    """Show what low formats do on this machine, in two minutes: time, bytes, accuracy, and a NaN explained and cured.

    Ctrl-C keeps the finished parts: they are printed and written, and the exit code is 130.
    """
    from halfstep.cli.demo import run_demo

    raise typer.Exit(run_demo(html_path=html, json_path=json, device=device))


@app.command()
def audit(
    task: Annotated[
        str,
        typer.Argument(
            help="lenet5, resnet, gpt or path/to/file.py:function, which returns an hs.Task.",
            autocompletion=completion.task,
        ),
    ],
    policy: PolicyLabel = "mixed",
    steps: Annotated[int, typer.Option(min=1, help="Steps to look at.")] = 3,
    after: Annotated[int, typer.Option(min=0, help="Training steps before them.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 24,
    sort: Annotated[
        str, typer.Option("--sort", help="error, accumulated, headroom, time, bytes, ... Default: what loses most.")
    ] = "",
    module: Annotated[str, typer.Option("--module", help="Pattern of the modules to print.")] = "*",
    role: Annotated[
        str, typer.Option("--role", help="activation, 'activation gradient', weight, 'weight gradient', update, state.")
    ] = "*",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="A format, such as fp16 or fp8_e4m3:1024 (loss scale): what it would lose."),
    ] = None,
    device: Device = "",
    json: Json = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures: one file.")] = None,
) -> None:
    """Run a few steps of a task under a policy and show what precision does to every operator, weight and gradient.

    Findings come first: underflow, overflow, swallowed updates, low states, large errors, each with its remedy.
    """
    from halfstep.cli.audit import run_audit

    code = run_audit(
        task=task, policy=policy, steps=steps, after=after, rows=rows, sort=sort, module=module, role=role,
        what_if=what_if or (), device=device, json_path=json, html_path=html,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
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
    from halfstep.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(device=device, json_path=json, quick=quick))


@app.command()
def ops(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN",
            help="Operators, such as softmax or 'conv*'. Default: all with a rule.",
            autocompletion=completion.operators,
        ),
    ] = None,
    policy: PolicyLabel = "mixed",
    diff: Annotated[
        str,
        typer.Option("--diff", help="Show what differs from this policy instead.", autocompletion=completion.policy),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="path/to/file.py:function, which returns an hs.Task or a torch.nn.Module: show its plan.",
        ),
    ] = "",
    device: Device = "",
    json: Json = None,
) -> None:
    """Show the rule of every operator under a policy: which part of the policy decides, why, and from which source."""
    from halfstep.cli.ops import run_ops

    raise typer.Exit(
        run_ops(policy=policy, patterns=patterns or (), diff=diff, model=model, device=device, json_path=json)
    )


@app.command()
def engine(
    name: Annotated[str, typer.Argument(help="deepspeed, megatron or torchtitan.")],
    policy: PolicyLabel = "mixed",
    accept: Annotated[
        str, typer.Option("--accept", help="Fields of the policy that the engine may leave out, with commas.")
    ] = "",
) -> None:
    """Write a policy as the configuration of another engine; what that does otherwise goes to stderr."""
    from halfstep.cli.engine import run_engine

    raise typer.Exit(run_engine(name, policy, [field.strip() for field in accept.split(",") if field.strip()]))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A halfstep-blackbox-STEP.pt.")],
    model: Annotated[
        str, typer.Option("--model", help="path/to/file.py:function, which returns the hs.Task of that run.")
    ],
    json: Json = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", help="Write the verdict to this file as editors and code hosts read it.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures: one file.")] = None,
) -> None:
    """Replay a step that was not finite, from its evidence, and show its cause, its place and what to change."""
    from halfstep.cli.replay import run_replay

    raise typer.Exit(run_replay(file, model, json_path=json, sarif_path=sarif, html_path=html))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(help="A Python file; with --policy also a program, such as torchrun.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="Run a script of torch.amp under this policy: a preset or a policy file (.toml), with :bf16 or :fp16 "
            "for another format. Before the script.",
            autocompletion=completion.policy,
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Use halfstep even if an apex with amp is installed. Before the script.")
    ] = False,
) -> None:
    """Run a script unchanged: one written for NVIDIA Apex, or with --policy one written for torch.amp.

    Without --policy, `apex`, `apex.amp` and the rest are halfstep's in it. With it, regions of torch.autocast follow
    the policy, and GradScaler is halfstep's, also in processes that the script starts.
    """
    from halfstep.cli.run import run_script, run_under_policy

    if policy and force:
        raise typer.BadParameter("--force is about Apex; leave it out with --policy")
    raise typer.Exit(
        run_under_policy(policy, script, args or ()) if policy else run_script(script, args or (), force=force)
    )


@app.command()
def plan(
    task: Annotated[
        str,
        typer.Argument(
            help="lenet5, resnet, gpt or path/to/file.py:function, which returns an hs.Task.",
            autocompletion=completion.task,
        ),
    ],
    policy: PolicyLabel = "mixed",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="More of them, side by side, with commas between; 'all': every preset.",
            autocompletion=completion.policies,
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many devices train together.")] = 1,
    shard: Annotated[
        str,
        typer.Option("--shard", help="How they share the work: ddp or fsdp2.", autocompletion=completion.workings),
    ] = "",
    units: Annotated[
        list[str] | None,
        typer.Option("--units", help="fsdp2: pattern of modules that are gathered one after the other. As hs.shard."),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            help="h200, h100, a100-80, 4090, t4, ... or a size as 96GiB: does it fit?",
            autocompletion=completion.gpus,
        ),
    ] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch of a device. Default: the task's.")] = None,
    largest: Annotated[
        bool, typer.Option("--largest/--no-largest", help="With --gpu: look for the largest batch that fits.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda: whose operators are planned.")] = "",
    json: Json = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures: one file.")] = None,
) -> None:
    """Plan the memory of a training step, before training and without that memory.

    Prints whether it fits a GPU, what the bytes are for, which modules weigh most, and where the peak is.
    """
    from halfstep.cli.plan import run_plan

    labels = [label for group in policies or () for label in group.split(",") if label.strip()]
    code = run_plan(
        task=task, policy=policy, policies=labels, devices=devices, shard=shard, units=units or (), gpu=gpu,
        batch=batch, largest=largest, device=device, json_path=json, html_path=html,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def tune(
    task: Annotated[
        str,
        typer.Argument(
            help="lenet5, resnet, gpt or path/to/file.py:function, which returns an hs.Task.",
            autocompletion=completion.task,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the policy to this file (.toml).")],
    target: Annotated[
        str, typer.Option("--target", help="time, memory, or the weights of both, such as 0.7:0.3.")
    ] = "time",
    max_loss_rise: Annotated[
        float | None,
        typer.Option(
            "--max-loss-rise",
            help="How much higher than fp32's the loss may end, as a fraction (0.01: one per cent). Default: the "
            "spread of fp32 from seed to seed.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="Time for measuring.")] = 10.0,
    seeds: Annotated[
        int, typer.Option(min=0, help="Pairs of trainings of the test at the end, at least. Default: what it takes.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and orders.")] = 0,
    dtypes: Annotated[
        str,
        typer.Option("--dtypes", help="Low formats to try: bf16, fp16, or both with a comma. Default: the device's."),
    ] = "",
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether compiled steps are tried.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an earlier search for this file measured.")
    ] = False,
    device: Device = "",
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with pictures: one file.")] = None,
    json: Json = None,
) -> None:
    """Find the cheapest policy for a task on this machine, and test whether it trains as fp32 does.

    Measures presets, exceptions, weight strategies and compiled steps beside fp32; writes the policy with its reasons.
    Ctrl-C writes the best safe policy so far; --resume goes on from there.
    """
    from halfstep.cli.tune import run_tune

    formats = [name.strip() for name in dtypes.split(",") if name.strip()]
    code = run_tune(
        task=task, output=output, target=target, max_loss_rise=max_loss_rise, minutes=minutes, seeds=seeds, seed=seed,
        dtypes=formats, compile=compile, resume=resume, device=device, html_path=html, json_path=json,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
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
            "--severity",
            help="The least severity for exit code 1: note, warning or error.",
            autocompletion=completion.severities,
        ),
    ] = "warning",
    ignore: Annotated[str, typer.Option("--ignore", help="Codes of rules to leave out, with commas.")] = "",
    explain: Annotated[str, typer.Option("--explain", help="Show a rule with an example, such as HS001.")] = "",
    json: Json = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", help="Write the findings to this file as editors and code hosts read it.")
    ] = None,
) -> None:
    """Find mistakes of mixed precision in scripts and tasks, before they run.

    Scripts are read and not run. A line's comment `# halfstep: ignore[HS012]` silences that rule there.
    """
    from halfstep.cli.lint import run_lint

    codes = [code.strip() for code in ignore.split(",") if code.strip()]
    code = run_lint(
        targets or (), policy=policy, severity=severity, ignore=codes, explain=explain, json_path=json,
        sarif_path=sarif,
    )  # fmt: skip
    raise typer.Exit(code)
