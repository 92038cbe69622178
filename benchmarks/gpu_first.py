"""The first ten minutes on a machine with a GPU: everything that only a GPU can show, in the order of risk.

    make gpu-first                                          # from a bare clone, with torch, triton and pytest installed
    python -m benchmarks.gpu_first --only steps --json benchmarks/results/gpu_first.json
    python -m benchmarks.gpu_first --device cpu --dry-run   # every block, small, on a CPU

Each block is one or more processes of its own with a limit of time: one that fails, hangs or dies hides no other, and
what it reported before is kept. Blocks that measure run alone; those that only check run several at a time. Every line
of a process goes at once to the log beside the JSON, which is written after each block; with ``--only`` the other
blocks of a file that is there stay. This file imports no torch, so that it reports on a machine where torch does not
load.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from benchmarks import stamp

ROOT = Path(__file__).resolve().parent.parent
MARK = "RESULT "
"""A line of a process that begins so is a JSON object, part of what its block has found."""

GRACE = 2.0
"""Seconds a process has to end once its time is over."""

TEN_MINUTES = 570.0
"""Seconds for all blocks: some are left of ten minutes for what comes before and after."""

AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Blocks that run at a time where none measures."""

TAIL = 6000
"""Characters of a process's output that are kept in the JSON."""

DEFAULTS = {
    "OMP_NUM_THREADS": "8",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment variables of processes, unless they are set."""

REPORT = ROOT / "benchmarks" / "results" / "gpu_first.json"
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")
SPREAD = ("-p", "xdist", "-n", "8") if find_spec("xdist") else ()
"""Options with which pytest compiles on several cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block.

    Attributes:
        title: what it does.
        look: what is measured, in which unit, and what should be seen.
        seconds: its limit.
        commands: argument lists; "DEVICE" becomes the device type.
        small: those of a dry run; () for the same.
        alone: whether no other block may run meanwhile, because it measures time.
    """

    title: str
    look: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    small: tuple[tuple[str, ...], ...] = ()
    alone: bool = False


TEXTS = {
    node.name: (ast.get_docstring(node) or "").partition("\n")
    for node in ast.parse((ROOT / "benchmarks" / "gpu_blocks.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
"""Docstrings of functions of `gpu_blocks`: the first line is the title of a block."""


def own(name: str, seconds: int, *, alone: bool = False) -> Block:
    """Return the block of a function of `gpu_blocks`."""
    title, _, look = TEXTS[name]
    command = (PYTHON, "-m", "benchmarks.gpu_blocks", name, "--device", "DEVICE")
    return Block(
        title=title.rstrip("."), look=" ".join(look.split()), seconds=seconds, commands=(command,), alone=alone
    )


def tests(title: str, look: str, seconds: int, *words: str) -> Block:
    """Return the block of tests that need a GPU."""
    return Block(
        title=title, look=look, seconds=seconds, commands=((*PYTEST, *SPREAD, *words),), small=((*PYTEST, *words),)
    )


FORMS = (0, 9, 16, 20, 28, 32, 39, 46, 51)
"""Numbers in `COMBINATIONS` of tests/kernels/cases.py: each form, format of gradients and format of states."""

SAMPLE = " or ".join(
    [
        *("waits", "captured", "thousands", "norms", "exponents", "bad_step", "equal_rows", "low32-"),
        f"(adam0 and ({' or '.join(f'low{n}-' for n in FORMS)}))",
    ]
)
"""Tests of the kernels for which few kernels are compiled; there is one for each combination and optimizer."""

KERNEL_TESTS = ("tests/kernels/test_triton_gpu.py", "-k")
BLOCKS: Mapping[str, Block] = {
    "environment": own("environment", 20, alone=True),
    "kernel_tests": tests(
        "tests of the kernels: a sample of forms, compiled for the first time",
        "bits that differ (contraction, powers in fp64); a wait under sync debug mode",
        70,
        *(*KERNEL_TESTS, SAMPLE),
    ),
    "capture_tests": tests(
        "tests of capture",
        "'operation not permitted when stream is capturing': a kernel that is first loaded in a capture",
        70,
        *("tests/step/test_capture_gpu.py", "tests/scale/test_gpu.py", "tests/lens/test_bad_loss.py"),
    ),
    **{
        name: own(name, 70)
        for name in (
            *("failed_capture", "replay_without_memory", "two_ranks", "side_stream", "default_device", "large"),
            *("reruns", "engine", "no_compiler", "two_devices"),
        )
    },
    "steps": own("steps", 100, alone=True),
    "kernels": own("kernels", 45, alone=True),
    "losses": own("losses", 30, alone=True),
    "memory": own("memory", 20, alone=True),
    "channels_last": own("channels_last", 30, alone=True),
    "first_step": own("first_step", 45, alone=True),
    "compiled": own("compiled", 90, alone=True),
    "doctor": Block(
        title="halfstep doctor",
        look="its opinion of this machine",
        seconds=20,
        commands=((PYTHON, "-m", "halfstep", "doctor"),),
        small=((PYTHON, "-m", "halfstep", "doctor", "--quick"),),
        alone=True,
    ),
    "all_kernel_tests": tests(
        "tests of the kernels: all other forms, as far as there is time",
        "bits that differ",
        240,
        *(*KERNEL_TESTS, f"not ({SAMPLE})"),
    ),
}


def commands_of(chosen: Block, device: str, *, small: bool) -> list[list[str]]:
    """Return the processes of a block on a device."""
    commands = (chosen.small if small else ()) or chosen.commands
    found = [[device if word == "DEVICE" else word for word in words] for words in commands]
    if not small:
        return found
    return [[*words, "--small"] if "benchmarks.gpu_blocks" in words else words for words in found]


def run(command: Sequence[str], seconds: float, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run a process with all that it starts for so many seconds; return what became of it; log each line at once."""
    begun = time.perf_counter()
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**DEFAULTS, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    found: dict[str, Any] = {}
    kept: list[str] = []

    def read(lines: IO[str]) -> None:
        with lines:
            for line in map(str.rstrip, lines):
                log(line)
                try:
                    found.update(json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {})
                except ValueError:  # a line that was cut off
                    kept.append(line)
                else:
                    kept.extend([] if line.startswith(MARK) else [line])

    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    late = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGINT)  # pytest prints what has failed, Python where it is
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:  # also on Ctrl-C, and for what a process has left behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(GRACE)  # not for ever: a process in a session of its own may hold the pipe
    return {
        "command": " ".join(["python", *command[1:]]).replace(f"{ROOT}/", ""),
        "seconds": round(time.perf_counter() - begun, 1),
        "exit": process.returncode,
        "timed_out": late,
        "found": dict(found),
        "output": "\n".join(kept)[-TAIL:],
    }


def block(
    chosen: Block, device: str, *, small: bool, left: float, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run one block within its limit and the seconds that are left."""
    ends, runs = time.perf_counter() + min(chosen.seconds, left), []
    for command in commands_of(chosen, device, small=small):
        rest = ends - time.perf_counter()
        if rest < 1:
            runs.append({"command": " ".join(command[1:]), "exit": None, "timed_out": True, "output": "no time left"})
        else:
            runs.append(run(command, rest, log))
    return {
        "title": chosen.title,
        "look": chosen.look,
        "passed": all(done["exit"] == 0 for done in runs),
        "processes": runs,
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report beside and rename it: what is there is whole if the machine goes."""
    beside = path.with_name(path.name + ".part")
    stamp.write(beside, dict(report))
    beside.replace(path)


def measure(
    blocks: Mapping[str, Block], wanted: Sequence[str], path: Path | None, *, device: str, small: bool, seconds: float
) -> dict[str, Any]:
    """Run blocks in their order; return the report, and write it to `path` after each.

    Args:
        blocks: by name; neighbours that need not run alone run at the same time.
        wanted: names of those to run.
        path: a file whose other blocks stay, with a log beside it (".log") that is written anew, or None.
        device: its type.
        small: whether to run each block small.
        seconds: for all together; blocks that do not begin within them are noted as not run.
    """
    ends, lock = time.perf_counter() + seconds, Lock()
    report: dict[str, Any] = {"device": device, "dry_run": small, "machine": {}, "blocks": {}}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".log").write_text("", encoding="utf-8")
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            report |= {"machine": known["machine"], "blocks": known["blocks"]}

    def log(line: str) -> None:
        if path is not None:
            with lock, path.with_suffix(".log").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def measure_one(name: str) -> None:
        left = ends - time.perf_counter()
        found: dict[str, Any] = {"title": blocks[name].title, "passed": False, "processes": []}
        if left >= 1:
            found = block(blocks[name], device, small=small, left=left, log=lambda line: log(f"{name}: {line}"))
        with lock:
            report["blocks"][name] = found
            report["machine"] |= first_of(found) if name == next(iter(blocks)) else {}
            say(name, found)
            if path is not None:
                write(path, {**report, "blocks": {n: report["blocks"][n] for n in blocks if n in report["blocks"]}})

    for alone, names in groupby(wanted, lambda name: blocks[name].alone):
        with ThreadPoolExecutor(1 if alone else AT_ONCE) as pool:
            list(pool.map(measure_one, names))
    report["blocks"] = {name: report["blocks"][name] for name in blocks if name in report["blocks"]}
    return report


def first_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the first process of a block has found; {} if none ran."""
    return next((done.get("found", {}) for done in found["processes"]), {})


def say(name: str, found: Mapping[str, Any]) -> None:
    """Print what a block has found."""
    taken = sum(done.get("seconds", 0) for done in found["processes"])
    print(f"{name}, {found['title']}: {'passed' if found['passed'] else 'FAILED'}, {taken:.0f} s", flush=True)
    for done in found["processes"]:
        for key, value in done.get("found", {}).items():
            print(f"   {key}: {json.dumps(value)[:300]}", flush=True)


def summary(report: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Return what failed, in the lines of one screen: of each process how it ended, and its last error."""
    lines = []
    for name in wanted:
        found = report["blocks"][name]
        if found["passed"]:
            continue
        for done in found["processes"] or [{"exit": None, "output": "not run: no time was left"}]:
            if done["exit"] == 0:
                continue
            text = [line.strip() for line in done["output"].splitlines() if line.strip()]
            errors = [line for line in text if "Error" in line or line.startswith("FAILED")] or text[-1:]
            ended = "out of time" if done.get("timed_out") else f"exit {done['exit']}"
            lines.append(f"{name} ({ended}): {errors[-1][:200] if errors else ''}")
    passed = sum(report["blocks"][name]["passed"] for name in wanted)
    return [f"{passed} of {len(wanted)} blocks passed" + (", failed:" if lines else ""), *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="every block small, to see that it runs")
    parser.add_argument("--only", action="append", choices=tuple(BLOCKS), help="a block; may be given several times")
    parser.add_argument("--json", type=Path, help=f"where to write; make gpu-first: {REPORT.relative_to(ROOT)}")
    parser.add_argument("--seconds", type=float, default=TEN_MINUTES, help=f"for all blocks (default {TEN_MINUTES:g})")
    chosen = parser.parse_args()
    if chosen.device == "cpu" and not chosen.dry_run:
        parser.error("on a CPU there is only --dry-run: what is measured here is what a GPU does")
    wanted = chosen.only or tuple(BLOCKS)
    report = measure(BLOCKS, wanted, chosen.json, device=chosen.device, small=chosen.dry_run, seconds=chosen.seconds)
    print("\n".join(summary(report, wanted)))
    return 0 if all(report["blocks"][name]["passed"] for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
