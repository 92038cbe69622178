"""``halfstep plan``: the memory of a task's training step under policies, before training and without that memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

import halfstep as hs
from halfstep.advise.plan import MemoryPlan, gpu_named, plan_each
from halfstep.advise.plan.drawing import drawing
from halfstep.advise.plan.page import plan_page
from halfstep.advise.plan.words import (
    MODULE_HEADERS,
    PART_HEADERS,
    PRESET_HEADERS,
    SENT_HEADERS,
    gpus_line,
    label,
    module_rows,
    part_rows,
    preset_rows,
    sent_rows,
    verdict,
)
from halfstep.cli.terminal import command_line, complain, console, item, say, table, writable, write_json
from halfstep.report import render, require_extra
from halfstep.tasks import TaskError, load_task
from halfstep.tasks.candidates import policy_candidate

__all__ = ["run_plan"]

ALL = ("O0", "torch", "O1", "mixed", "O2", "pure", "lean")
"""The presets that ``--policies all`` puts side by side: those for training."""

STYLES = {"fits": "bold green", "undecided": "bold yellow", "does not fit": "bold red"}
MODULES = 8


def run_plan(
    *, task: str, policy: str, policies: Sequence[str], devices: int, shard: str, units: Sequence[str], gpu: str,
    batch: int | None, largest: bool, device: str, json_path: Path | None, html_path: Path | None,
) -> int:  # fmt: skip
    """Run the command, whose options the arguments are; return its exit code: 0, or 2 for bad input."""
    out = console()
    try:
        writable(json_path)
        if html_path is not None:
            require_extra("--html")
            writable(html_path, "--html")
        card = gpu_named(gpu) if gpu else None
        # fully_shard needs streams, which the fake GPU does not have
        where = device or ("cpu" if card is None or shard == "fsdp2" else "cuda")
        low = "bf16" if card is None or "bf16" in card.formats else card.formats[0]
        chosen = _policies([policy, *policies], low)
        load_task(task)  # refuses a wrong one before a process is started for it
        given = {
            "what": task, "device": where, "devices": devices,
            "shard": shard or "none", "units": list(units) or None, "gpu": gpu, "batch_size": batch,
            "largest": largest and card is not None,
        }  # fmt: skip
        plans: list[MemoryPlan] = []
        for found in plan_each([{**given, "policy": one} for one in chosen]):
            if isinstance(found, Exception):
                raise found
            plans.append(found)
    except hs.HalfstepError as error:
        return complain(error)
    _print(out, plans)
    words = command_line(
        "plan", task, policy=policy, policies=",".join(policies), devices=devices if devices > 1 else None,
        shard=shard, gpu=gpu, batch=batch, device=device,
    )  # fmt: skip
    write_json(
        out, json_path, {"command": words, "halfstep": hs.__version__, "plans": [plan.record() for plan in plans]}
    )
    if html_path is not None:
        html_path.write_text(render(plan_page(plans)), encoding="utf-8")
        say(out, f"written: {html_path}")
    return 0


def _policies(labels: Sequence[str], low: str) -> list[hs.Policy]:
    """Return the policies called `labels`, each once; presets without a format get `low`."""
    wanted = [name for label_ in labels for name in (ALL if label_ == "all" else (label_,))]
    found: list[hs.Policy] = []
    for name in wanted:
        candidate = policy_candidate(f"{name}:{low}" if name in hs.policy.PRESETS and name != "O0" else name, "cpu")
        if candidate is None or candidate.policy is None:
            raise TaskError(
                f"{name!r} is a loop without halfstep; plan a preset: 'O0' is fp32, 'torch' torch.amp's lists"
            )
        if candidate.policy not in found:
            found.append(candidate.policy)
    return found


def _print(out: Any, plans: Sequence[MemoryPlan]) -> None:
    plan = plans[0]
    style = "bold" if plan.fit is None else STYLES[plan.fit.verdict]
    size = f", batch {plan.batch_size:,}" if plan.batch_size else ""
    each = f", {plan.devices} devices under {plan.shard}" if plan.devices > 1 else ""
    say(out, f"{plan.name}, {label(plan)}{size}{each}: {verdict(plan)}", style=style)
    if plan.fit is None:
        say(out, f"of the GPUs that are known: {gpus_line(plan)}")
    for note in plan.notes:
        item(out, note, style="yellow")
    say(out)
    _table(out, PART_HEADERS, part_rows(plan))
    say(out)
    for line in drawing(plan):
        say(out, line)
    say(out)
    _table(out, MODULE_HEADERS, module_rows(plan, MODULES), left=(0, 2))
    if plan.sent:
        say(out)
        _table(out, SENT_HEADERS, sent_rows(plan.sent))
    if len(plans) > 1:
        say(out)
        headers = PRESET_HEADERS if plan.fit is not None else PRESET_HEADERS[:7]
        _table(out, headers, preset_rows(plans))


def _table(out: Any, headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    made = table(out, *headers, right=tuple(n for n in range(len(headers)) if n not in left))
    for row in rows:
        made.add_row(*map(Text, row))
    out.print(made)
