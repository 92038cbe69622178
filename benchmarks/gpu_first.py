"""The first minutes on a machine with a GPU: everything that only a GPU can show, in the order of risk.

    make gpu-first                                          # from a bare clone, with torch, triton and pytest installed
    python -m benchmarks.gpu_first --only 2 --only 3 --json benchmarks/results/gpu_first.json
    python -m benchmarks.gpu_first --device cpu --dry-run   # every block, small, on a CPU

Each block is one or more processes of its own with a limit of time: one that fails, hangs or dies hides no other, and
what it reported before is kept. The JSON is written after each block; with ``--only`` the other blocks of a file that
is there stay. This file imports no torch, so that it reports on a machine where torch does not load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stamp

ROOT = Path(__file__).resolve().parent.parent
MARK = "RESULT "
"""A line of a process that begins so is a JSON object, part of what its block has found."""

GRACE = 5.0
"""Seconds a process has to end once its time is over."""

TAIL = 6000
"""Characters of a process's output that are kept."""

DEFAULTS = {
    "OMP_NUM_THREADS": "8",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment variables of processes, unless they are set."""

REPORT = ROOT / "benchmarks" / "results" / "gpu_first.json"
PYTHON = sys.executable
QUICK = ROOT / "out" / "gpu_quick.json"
"""What `benchmarks.run` writes in a block; `make bench-gpu` measures in full."""

BENCHMARK = (PYTHON, "-m", "benchmarks.run", "--json", str(QUICK))
PYTEST = (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block.

    Attributes:
        title: what it does.
        look: what its result should be.
        seconds: its limit.
        commands: argument lists; "DEVICE" becomes the device type.
        small: those of a dry run; () for the same.
    """

    title: str
    look: str
    seconds: int
    commands: tuple[tuple[str, ...], ...]
    small: tuple[tuple[str, ...], ...] = ()


def own(name: str) -> tuple[str, ...]:
    """Return the command of a function of `gpu_blocks`."""
    return (PYTHON, "-m", "benchmarks.gpu_blocks", name, "--device", "DEVICE")


SAMPLE = "waits or captured or thousands or norms or exponents or bad_step"
BLOCKS: Mapping[str, Block] = {
    "0": Block(
        title="the machine",
        look="a driver from 545 (CUDA 12.3) on loads modules inside a capture; Triton needs a C compiler",
        seconds=30,
        commands=(own("environment"),),
    ),
    "1": Block(
        title="tests of the kernels",
        look="bits that differ (contraction, powers in fp64); a wait under sync debug mode",
        seconds=180,
        commands=(
            (*PYTEST, "tests/kernels/test_triton_gpu.py", "-k", SAMPLE),
            (*PYTEST, "tests/kernels/test_triton_gpu.py", "-k", f"adam and not ({SAMPLE})"),
            (*PYTEST, "tests/kernels/test_triton_gpu.py", "-k", f"not adam and not ({SAMPLE})"),
        ),
    ),
    "2": Block(
        title="tests of capture",
        look="'operation not permitted when stream is capturing': a kernel that is first loaded in a capture",
        seconds=120,
        commands=((*PYTEST, "tests/step/test_capture_gpu.py"),),
    ),
    "3": Block(
        title="a capture that fails",
        look="it leaves nothing: the default stream, generators that draw, memory given back, a step that works",
        seconds=60,
        commands=(own("failed_capture"),),
    ),
    "4": Block(
        title="waits and gaps of a GPT-2's steps",
        look="no wait and no gap, also with a scheduler",
        seconds=120,
        commands=(own("waits"),),
    ),
    "5": Block(
        title="tail of GPT-2 and ResNet-50",
        look="above 85 % of a copy's speed; host time below torch.amp's",
        seconds=120,
        commands=(own("kernels"), own("tails")),
    ),
    "6": Block(
        title="losses",
        look="odd row strides as fast as even ones; linear_cross_entropy below torch.amp's pair",
        seconds=90,
        commands=(own("losses"),),
    ),
    "7": Block(
        title="exponent counts and the monitor",
        look="bytes a second near a copy's; few milliseconds added",
        seconds=60,
        commands=(own("exponents"),),
    ),
    "8": Block(
        title="memory of windows with large batches",
        look="no batches held beyond the window; a bad step does not end training",
        seconds=60,
        commands=(own("memory"),),
    ),
    "9": Block(
        title="compiled steps",
        look="losses of eager training; no copies of weights inside the graph",
        seconds=120,
        commands=(own("compiled"),),
    ),
    "10": Block(
        title="benchmarks",
        look="the goals of docs/tables/goals.md",
        seconds=240,
        commands=(
            (PYTHON, "-m", "halfstep", "doctor"),
            (*BENCHMARK, "--quick", "--device", "DEVICE", "--only", "lenet5"),
            own("ratios"),
            (*BENCHMARK, "--quick", "--device", "DEVICE", "--only", "gpt124m"),
            own("ratios"),
        ),
        small=((PYTHON, "-m", "halfstep", "doctor", "--quick"), (*BENCHMARK, "--dry-run"), own("ratios")),
    ),
    "11": Block(
        title="no compiler, two devices, two ranks",
        look="a step without C compiler; a model on a device that is not the current one",
        seconds=180,
        commands=(own("no_compiler"), own("two_devices"), own("two_ranks")),
    ),
}


def commands_of(chosen: Block, device: str, *, small: bool) -> list[list[str]]:
    """Return the processes of a block on a device."""
    commands = (chosen.small if small else ()) or chosen.commands
    found = [[device if word == "DEVICE" else word for word in words] for words in commands]
    if not small:
        return found
    return [[*words, "--small"] if "benchmarks.gpu_blocks" in words else words for words in found]


def run(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a process with all that it starts for so many seconds; return what became of it."""
    begun = time.perf_counter()
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**DEFAULTS, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
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
        output.seek(0)
        text = output.read()
    found, kept = {}, []
    for line in text.splitlines():
        try:
            if not line.startswith(MARK):
                raise ValueError
            found.update(json.loads(line.removeprefix(MARK)))
        except ValueError:  # also a line that was cut off
            kept.append(line)
    return {
        "command": " ".join(["python", *command[1:]]).replace(f"{ROOT}/", ""),
        "seconds": round(time.perf_counter() - begun, 1),
        "exit": process.returncode,
        "timed_out": late,
        "found": found,
        "output": "\n".join(kept)[-TAIL:],
    }


def block(chosen: Block, device: str, *, small: bool, left: float) -> dict[str, Any]:
    """Run one block within its limit and the seconds that are left."""
    ends, runs = time.perf_counter() + min(chosen.seconds, left), []
    for command in commands_of(chosen, device, small=small):
        rest = ends - time.perf_counter()
        if rest < 1:
            runs.append({"command": " ".join(command[1:]), "exit": None, "timed_out": True, "output": "no time left"})
        else:
            runs.append(run(command, rest))
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
        blocks: by number.
        wanted: numbers of those to run.
        path: a file whose other blocks stay, or None.
        device: its type.
        small: whether to run each block small.
        seconds: for all together; blocks that do not begin within them are noted as not run.
    """
    ends = time.perf_counter() + seconds
    report: dict[str, Any] = {"device": device, "dry_run": small, "machine": {}, "blocks": {}}
    if path is not None and path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        report |= {"machine": known["machine"], "blocks": known["blocks"]}
    for number in wanted:
        chosen, left = blocks[number], ends - time.perf_counter()
        print(f"{number}. {chosen.title}", end=": ", flush=True)
        if left < 1:
            found: dict[str, Any] = {"title": chosen.title, "passed": False, "processes": []}
            print("not run, no time left")
        else:
            found = block(chosen, device, small=small, left=left)
            taken = sum(done.get("seconds", 0) for done in found["processes"])
            print(f"{'passed' if found['passed'] else 'FAILED'}, {taken:.0f} s", flush=True)
        report["blocks"][number] = found
        for done in found["processes"]:
            for name, value in done.get("found", {}).items():
                print(f"   {name}: {json.dumps(value)[:300]}")
            if number == "0":
                report["machine"] = done.get("found", {})
            if done["exit"] != 0:
                print("   " + done["output"][-1500:].replace("\n", "\n   "))
        if path is not None:
            report["blocks"] = {n: report["blocks"][n] for n in blocks if n in report["blocks"]}
            write(path, report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="every block small, to see that it runs")
    parser.add_argument("--only", action="append", choices=tuple(BLOCKS), help="a block; may be given several times")
    parser.add_argument("--json", type=Path, help=f"where to write; make gpu-first: {REPORT.relative_to(ROOT)}")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all blocks together")
    chosen = parser.parse_args()
    if chosen.device == "cpu" and not chosen.dry_run:
        parser.error("on a CPU there is only --dry-run: what is measured here is what a GPU does")
    report = measure(
        BLOCKS,
        chosen.only or tuple(BLOCKS),
        chosen.json,
        device=chosen.device,
        small=chosen.dry_run,
        seconds=chosen.seconds,
    )
    failed = [number for number in chosen.only or BLOCKS if not report["blocks"][number]["passed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
