"""``halfstep doctor``: what this machine can do for mixed precision, measured, and what to use."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.cli.terminal import Files, console, item, record, say, show
from halfstep.report import Cell, counted, table
from halfstep.tasks import machine
from halfstep.tasks.machine import cores_granted, device_type, pitfalls, threads_here, threads_of_torch
from halfstep.tasks.speed import Advice, DeviceSpeed, Speed, advise, measure_speed, sizes_for


def carry_out(device: str, quick: bool, json: Path | None) -> int:
    """Run the command; return its exit code."""
    out, err = console(), console(stderr=True)
    main, files = device_type(device), Files(json=json)
    threads, load = threads_here()
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    versions = {"cuda": torch.version.cuda or "", "hip": torch.version.hip or "", "cudnn": cudnn or ""}
    about = {**machine(), **versions}
    devices = [main] if device or main == "cpu" else [main, "cpu"]
    _print_machine(out, about)
    units = [hs.policy.units(each) for each in devices]
    headers = ("device", "bf16 units", "fp16 units", "fp8 units", "how this is known")
    there = {True: Cell("yes", "good"), False: Cell("no", "open")}
    rows = ((u.device, there[u.bf16], there[u.fp16], there[u.fp8], u.reason) for u in units)
    show(out, table("", headers, rows, words=(1, 2, 3, 4)))
    if not err.is_terminal:
        say(err, "measuring ...")
    with threads_of_torch(threads), err.status("measuring", spinner="line", refresh_per_second=1) as status:
        on_step = lambda what: status.update(f"measuring: {what}")  # noqa: E731
        speeds = [measure_speed(each, sizes_for(each, quick=quick), on_step=on_step) for each in devices]
        status.update("measuring: optimizers")
        reads = [host_reads(main, kind) for kind in optimizer_classes()]
    advice = [advise(there, speed) for there, speed in zip(units, speeds, strict=True)]
    found = tuple(pitfalls(speeds, load=load, granted=cores_granted(), environ=os.environ))
    for speed in speeds:
        _print_speeds(out, speed, threads)
    if quick:
        say(out, "an indication: small sizes, few rounds; 10 seconds without --quick")
    for each in advice:
        _print_advice(out, each)
    _print_reads(out, reads, main)
    say(out)
    say(out, "Pitfalls" if found else "Pitfalls: none found", style="bold")
    for line in found:
        item(out, line, style="yellow")
    facts = {"quick": quick, "machine": about, "cpu_kernels": hs.step.cpu_kernels(), "threads": threads}
    measured = {"units": units, "advice": advice, "optimizers": reads, "speeds": speeds}
    files.write(out, json=record(**facts, pitfalls=found, **measured))
    return 0


def _print_machine(out: Console, about: dict[str, Any]) -> None:
    threads = counted(about["torch_threads"], "thread")
    on = f"; {about['accelerator']}" if about["accelerator"] else ""
    say(out, f"{about['cpu']}, {about['cores']} cores, {threads} of torch{on}; {platform.system()}")
    build = [f"CUDA {about['cuda']}"] if about["cuda"] else [f"HIP {about['hip']}"] if about["hip"] else []
    build += [f"cuDNN {about['cudnn']}"] if about["cudnn"] else []
    versions = [f"torch {about['torch']}", *(build or ["built for CPUs"]), f"Python {about['python']}"]
    say(out, ", ".join([*versions, f"halfstep {hs.__version__}"]))
    say(out, f"CPU kernels: {hs.step.cpu_kernels()}")


def _print_speeds(out: Console, speed: DeviceSpeed, threads: int) -> None:
    on = f"cpu, {counted(threads, 'thread')}" if speed.device == "cpu" else speed.device
    say(out)
    say(out, f"Speed on {on}, forward and backward", style="bold")
    rows: list[tuple[str | Cell, ...]] = []
    ends = set()
    for work in speed.works:
        for each in work.speeds:
            name = f"{work.work} {work.size}" if each.faster is None or not out.is_terminal else ""
            gflops = f"{each.gflops:,.0f}" if each.gflops >= 10 else f"{each.gflops:.2g}"
            rows.append((name, each.label, gflops, _ratio(each)))
        ends.add(len(rows) - 1)
    show(out, table("", ("work", "format", "GFLOP/s", "speed / fp32, 90 %"), rows, words=(1,)), ends=ends)
    say(out, "medians of paired ratios; undecided: finer than fp32 run twice differs")
    there = hs.policy.units(speed.device)
    lacking = [name for name, has in (("bf16", there.bf16), ("fp16", there.fp16)) if not has]
    if lacking:
        say(out, f"{' and '.join(lacking)} has no units (torch's own kernels): a small size, beside fp32 in it")
    if speed.device == "cuda":
        say(out, "fp32 is IEEE fp32; unless told, torch runs convolutions in tf32 and matrix products in fp32")


def _ratio(speed: Speed) -> Cell:
    ratio = speed.faster
    if ratio is None:
        return Cell("")
    if not speed.decided:
        return Cell(f"undecided [{ratio.low:.2f}, {ratio.high:.2f}]", "open")
    return Cell(f"{ratio:.2f}", "good" if ratio.median > 1 else "bad")


def _print_advice(out: Console, advice: Advice) -> None:
    say(out)
    what = "stay in fp32, preset `O0`" if advice.dtype == "fp32" else f"`{advice.preset}` in {advice.dtype}"
    say(out, f"Use on {advice.device}: {what}", style="bold green")
    say(out, f"    step = hs.TrainStep(model, optimizer, loss_fn, {advice.code})")
    for line in advice.why:
        item(out, line)
    for case, what in advice.also:
        item(out, f"if {case}: {what}")


def _print_reads(out: Console, reads: Sequence["HostReads"], device: str) -> None:
    """Print the optimizers that behave alike on one row."""
    groups: dict[tuple[int, int, str], list[str]] = {}
    for each in reads:
        groups.setdefault((each.later, each.first, each.problem), []).append(each.optimizer)
    say(out)
    say(out, f"Does a step under a loss scale (fp16) wait for the device? Tried on {device}", "bold")
    for key, names in sorted(groups.items(), key=lambda group: (bool(group[0][2]), group[0])):
        item(out, f"{_meaning(*key)}: {', '.join(names)}")
    reason = next((each.generic for each in reads if each.optimizer == "AdamW"), "")
    fused = "fuses Adam and its like by itself" if not reason else f"updates AdamW through torch's operators: {reason}"
    item(out, f"hs.TrainStep {fused}; a loop of your own needs fused=True for 0 reads")
    item(out, "without a loss scale (bf16, fp32) there is no read")


def _meaning(later: int, first: int, problem: str) -> str:
    if problem:
        return f"cannot step under a loss scale ({problem})"
    if later == 0:
        return "no, 0 reads a step" + (f" ({first} in the first)" if first else "")
    return f"yes, the host makes {counted(later, 'read')} a step"


# ------------------------------------------------------------------ how often an optimizer waits for the device

READ_STEPS = 3
WIDTH = 4
SCALE = 2.0**8  # small enough that no step overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReads:
    """What one optimizer costs in waiting."""

    optimizer: str  # its class and the options it was made with
    first: int = 0  # reads of a device value by the host in the first step
    later: int = 0  # the same in each later step; 0: the optimizer checks the flag on the device
    generic: str = ""  # why its update goes through torch's operators, "" if halfstep's own make it
    problem: str = ""  # why it cannot be stepped with a loss scale, "" if it can


def optimizer_classes() -> Iterator[type[Optimizer]]:
    """Yield the optimizers that torch.optim offers, by name."""
    for _, kind in sorted(vars(torch.optim).items(), key=lambda item: item[0].lower()):
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield kind


def host_reads(device: str, kind: type[Optimizer]) -> HostReads:
    """Step an optimizer of class `kind` on `device` and count its reads."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}  # usual, and it changes the answer
    name = ", ".join([kind.__name__, *(f"{key}={value}" for key, value in options.items())])
    sparse = "Sparse" in kind.__name__
    model: nn.Module = nn.Embedding(WIDTH, WIDTH, sparse=True) if sparse else nn.Linear(WIDTH, WIDTH, bias=False)
    batch = torch.arange(WIDTH) if sparse else torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
    policy = hs.Policy.of("mixed", dtype="fp16", scale=SCALE)
    counts = []
    try:
        optimizer: Any = kind
        model = model.to(device)
        made = optimizer(model.parameters(), **options)
        step = hs.TrainStep(model, made, lambda model, x: model(x).float().square().mean(), policy=policy)
        for _ in range(READ_STEPS):
            before = step.host_reads + step.scaler.host_reads
            step(batch.to(device))
            counts.append(step.host_reads + step.scaler.host_reads - before)
    except Exception as error:  # the optimizer's objection is the result
        return HostReads(optimizer=name, problem=_problem(error))
    return HostReads(optimizer=name, first=counts[0], later=max(counts[1:]), generic=step.generic)


def _problem(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "closure" in text:
        return "it needs a closure, whose backward runs inside the optimizer"
    return f"{type(error).__name__}: {text}"
