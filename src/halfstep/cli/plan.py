"""``halfstep plan``: the memory of a task's training step under policies, before training and without that memory."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import halfstep as hs
from halfstep.advise.plan import MemoryPlan, gpu_named, memory, plan_each
from halfstep.cli.options import split
from halfstep.cli.terminal import STYLES, Files, console, item, record, say, show
from halfstep.report import TONES, write_page
from halfstep.tasks import load_task
from halfstep.tasks.candidates import policy_named

ALL = ("O0", "torch", "O1", "mixed", "O2", "pure", "lean")
"""The presets that ``--policies all`` puts side by side: those for training."""

MODULES = 8
"""Rows of the table of modules, so that the answer stays on the screen."""


def carry_out(
    task: str, policy: str, policies: list[str] | None, devices: int, shard: str, replicas: int,
    units: list[str] | None, gpu: str, batch: int | None, largest: bool, device: str, json: Path | None,
    html: Path | None,
) -> int:  # fmt: skip
    """Run the command; return its exit code."""
    out, files = console(), Files(json=json, html=html)
    card = gpu_named(gpu) if gpu else None
    where = device or ("cpu" if card is None else "cuda")
    chosen = _policies(
        [policy, *split(policies)], "bf16" if card is None or "bf16" in card.formats else card.formats[0]
    )
    load_task(task)  # refuses a wrong one before a process is started for it
    given = {
        "what": task, "device": where, "devices": devices, "shard": shard or "none", "replicas": replicas,
        "units": units or None, "gpu": gpu, "batch_size": batch, "largest": largest and card is not None,
    }  # fmt: skip
    plans: list[MemoryPlan] = []
    for found in plan_each([{**given, "policy": one} for one in chosen]):
        if isinstance(found, Exception):
            raise found
        plans.append(found)
    _print(out, plans)
    files.write(
        out,
        json=record(plans=[plan.record() for plan in plans]),
        html=lambda path: write_page(memory.plan_page(plans), path),
    )
    return 0


def _policies(labels: Sequence[str], low: str) -> list[hs.Policy]:
    """Return the policies called `labels`, each once; presets without a format get `low`."""
    wanted = [name for label in labels for name in (ALL if label == "all" else (label,))]
    named = (f"{name}:{low}" if name in hs.policy.PRESETS and name != "O0" else name for name in wanted)
    found: list[hs.Policy] = []
    for policy in (policy_named(name, "cpu") for name in named):
        if policy not in found:
            found.append(policy)
    return found


def _print(out: Console, plans: Sequence[MemoryPlan]) -> None:
    plan = plans[0]
    style = "" if plan.fit is None else STYLES[TONES[plan.fit.verdict]]
    size = f", batch {plan.batch_size:,}" if plan.batch_size else ""
    groups = f" in {plan.replicas} groups" if plan.replicas > 1 else ""
    each = f", {plan.devices} devices{groups} under {plan.shard}" if plan.devices > 1 else ""
    say(out, f"{plan.name}, {memory.label(plan)}{size}{each}: {memory.verdict(plan)}", style=f"bold {style}")
    if plan.fit is None:
        say(out, f"of the GPUs that are known: {memory.gpus_line(plan)}")
    for note in plan.notes:
        item(out, note, style="yellow")
    say(out)
    show(out, memory.part_table(plan))
    say(out)
    for line in memory.drawing(plan):
        say(out, line)
    tables = [memory.module_table(plan, MODULES)]
    tables += [memory.sent_table(plan.sent)] if plan.sent else []
    tables += [memory.preset_table(plans)] if len(plans) > 1 else []
    for table in tables:
        say(out)
        show(out, table)
