"""``halfstep plan``: the memory of a task's training step under policies, before training and without that memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

import halfstep as hs
from halfstep.advise.plan import Largest, MemoryPlan, gpu_named, largest_batch
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
from halfstep.tasks import Task, TaskError, load_task
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
        low = "bf16" if card is None or "bf16" in card.formats else card.formats[0]
        chosen = _policies([policy, *policies], low)
        loaded = load_task(task)
        given: dict[str, Any] = {
            "devices": devices, "shard": shard or "none", "gpu": gpu, "device": device, "units": list(units) or None,
        }  # fmt: skip
        plans, most = [], []
        for one in chosen:
            plans.append(hs.plan(loaded, policy=one, batch_size=batch, **given))
            most.append(_largest(loaded, one, plans[-1], given) if card is not None and largest else None)
    except hs.HalfstepError as error:
        return complain(error)
    _print(out, plans, most)
    words = command_line(
        "plan", task, policy=policy, policies=",".join(policies), devices=devices if devices > 1 else None,
        shard=shard, gpu=gpu, batch=batch, device=device,
    )  # fmt: skip
    rows = [
        {**plan.record(), "largest_batch": None if found is None else asdict(found)}
        for plan, found in zip(plans, most, strict=True)
    ]
    write_json(out, json_path, {"command": words, "halfstep": hs.__version__, "plans": rows})
    if html_path is not None:
        html_path.write_text(render(plan_page(plans, most)), encoding="utf-8")
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


def _largest(task: Task, policy: hs.Policy, first: MemoryPlan, given: dict[str, Any]) -> Largest | None:
    """Return the largest batch that fits; None if the batch has no size to change."""
    if not first.batch_size:
        return None
    return largest_batch(
        lambda size: hs.plan(task, policy=policy, batch_size=size, **given), first, first.batch_size, given["gpu"]
    )


def _print(out: Any, plans: Sequence[MemoryPlan], largest: Sequence[Largest | None]) -> None:
    plan = plans[0]
    style = "bold" if plan.fit is None else STYLES[plan.fit.verdict]
    size = f", batch {plan.batch_size:,}" if plan.batch_size else ""
    each = f", {plan.devices} devices under {plan.shard}" if plan.devices > 1 else ""
    say(out, f"{plan.name}, {label(plan)}{size}{each}: {verdict(plan, largest[0])}", style=style)
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
        _table(out, headers, preset_rows(plans, largest))


def _table(out: Any, headers: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    made = table(out, *headers, right=tuple(n for n in range(len(headers)) if n not in left))
    for row in rows:
        made.add_row(*map(Text, row))
    out.print(made)
