"""What the blocks of `gpu_first` do, each in a process of its own.

    python -m benchmarks.gpu_blocks waits --device cuda

A function of `BLOCKS` gets the device type and whether to run small, and reports what it finds as it goes: a line of
JSON each, so that nothing is lost if it is cut off. It raises where something is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from benchmarks import gpu_kernels, models
from benchmarks.cases import GPT124M, Case, text
from benchmarks.gpu_first import MARK, QUICK, ROOT
from benchmarks.loops import CLIP, Run, amp, graphs_on_tape, policy
from benchmarks.stages import Stages
from benchmarks.stamp import commit
from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.reference import exponents as reference
from halfstep.tasks import machine
from halfstep.timing import wait_for as wait

WARM_UP = 6  # steps: three warm-ups, a capture, two replays
AMP = "torch.amp"


def report(**found: Any) -> None:
    """Print what was found as a line that `gpu_first` collects."""
    print(MARK + json.dumps(found), flush=True)


def gpt(dtype: str, *, small: bool) -> Case:
    """Return GPT-2 at batch 4 x 512; small: one layer."""
    if small:
        return replace(GPT124M, dtype=dtype, model=lambda: models.gpt(32, 1, 2, 16, 256), batch=text(2, 16, 256))
    return replace(GPT124M, dtype=dtype, batch=text(4, 512, 50304))


def started(case: Case, device: str, **options: Any) -> Run:
    """Return a `mixed` step of hs."""
    return policy(case, seeded(case, device), "mixed", **options)


def seeded(case: Case, device: str) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(device)


def milliseconds(work: Callable[[], object], device: str, rounds: int) -> float:
    """Return the median time of `work`, which has run once before."""
    taken = []
    for _ in range(rounds):
        wait(device)
        begun = time.perf_counter()
        work()
        wait(device)
        taken.append(1e3 * (time.perf_counter() - begun))
    return round(statistics.median(taken), 4)


def mebibytes(device: str) -> float | None:
    """Return the most memory in use since `forget_peak`; None on a CPU."""
    return None if device == "cpu" else round(torch.cuda.max_memory_allocated(device) / 2**20, 1)


def forget_peak(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ------------------------------------------------------------------ blocks


def environment(device: str, small: bool) -> None:
    """Report the machine; fail without the device."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,mig.mode.current", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except OSError as error:
        driver = str(error)
    report(machine=machine(), commit=commit(), driver=driver)
    report(cuda=torch.version.cuda, compilers=[name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)])
    try:
        import triton

        report(triton=triton.__version__)
    except ImportError as error:
        report(triton=str(error))
    if device == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        report(devices=torch.cuda.device_count(), memory_free=free, memory=whole, kernels=load_kernels(device))


def failed_capture(device: str, small: bool) -> None:
    """A loss that waits: what its capture leaves behind."""
    if device == "cpu":
        graphs_on_tape()
    cuda, waits, size = device != "cpu", [True], 1 << (10 if small else 26)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        large = torch.ones(size, device=device)
        loss: Tensor = model(x).square().mean() + 0 * large.sum()
        if waits[0]:
            loss.item()
        return loss

    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = hs.TrainStep(model, optimizer, loss, policy=hs.Policy.of("mixed", dtype="bf16"), cuda_graph=True)
    x = torch.randn(8, 64, device=device)
    for _ in range(3):
        step(x)
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    try:
        step(x)
        raise AssertionError("a step that waits was captured")
    except hs.errors.StepError as error:
        report(raised=str(error)[:300])
    gc.collect()
    if cuda:
        report(default_stream=torch.cuda.current_stream(device) == torch.cuda.default_stream(device))
        torch.cuda.empty_cache()
        report(reserved_before=reserved, reserved_after=torch.cuda.memory_reserved(device))
    F.dropout(torch.ones(8, device=device))
    report(draws=True)
    waits[0] = False
    for _ in range(WARM_UP):
        assert step(x).host().updated
    graphs: Any = step._graphs
    report(captured_again=graphs.captures, replays=graphs.replays)
    assert graphs.replays, "the step was not captured again"
    assert not cuda or torch.cuda.current_stream(device) == torch.cuda.default_stream(device), (
        "another stream is current"
    )
    assert not cuda or torch.cuda.memory_reserved(device) <= reserved + (1 << 27), "memory was not given back"


def waits(device: str, small: bool) -> None:
    """Steps of a GPT-2 under torch's sync debug mode, and the gaps between them."""
    if device == "cpu":
        graphs_on_tape()
    failed = []
    for dtype in ("bf16", "fp16"):
        case = gpt(dtype, small=small)
        for label in (AMP, "hs", "hs, scheduler", "hs, captured", "hs, captured, scheduler"):
            if label == AMP:
                run = amp(case, seeded(case, device))
            else:
                run = started(case, device, **({"cuda_graph": True} if "captured" in label else {}))
            if "scheduler" in label:
                train: Any = run.holds[0]
                train.scheduler = torch.optim.lr_scheduler.LambdaLR(train.optimizer, lambda n: 0.5 + 0.5**n)
            batches = [tuple(t.to(device) for t in case.batch(n)) for n in range(4)]
            for n in range(WARM_UP):
                run.step(batches[n % 4])
            wait(device)
            found: dict[str, Any] = {"wait": _first_wait(run, batches, 3 if small else 30, device)}
            found |= _gaps(run, batches, 2 if small else 10, device)
            found["ms"] = milliseconds(partial(run.step, batches[0]), device, 3 if small else 20)
            report(**{f"{dtype}, {label}": found})
            if label != AMP and found["wait"]:
                failed.append(f"{dtype}, {label}")
            del run
            gc.collect()
    if failed:
        raise AssertionError(f"a step waits for the device: {failed}")


def _first_wait(run: Run, batches: list[Any], steps: int, device: str) -> str:
    """Return where a step first waits for the device, "" if none does."""
    if device == "cpu":
        for n in range(steps):
            run.step(batches[n % 4])
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(steps):
            run.step(batches[n % 4])
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        places = traceback.extract_tb(error.__traceback__)
        return f"{str(error)[:100]} at " + " < ".join(f"{p.filename}:{p.lineno}" for p in reversed(places[-6:]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _gaps(run: Run, batches: list[Any], steps: int, device: str) -> dict[str, Any]:
    """Return how long the device was idle in a step, and how long the host waited, in milliseconds."""
    cuda = device != "cpu"
    wait(device)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True
    ) as seen:
        for n in range(steps):
            run.step(batches[n % 4])
        wait(device)
    waited = {e.key: round(e.cpu_time_total / 1e3 / steps, 4) for e in seen.key_averages() if "Synchronize" in e.key}
    work = [e for e in seen.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    kernels = sorted((e.time_range.start, e.time_range.end) for e in work)
    if not kernels:
        return {"host_waits_ms": waited}
    busy, until = 0.0, kernels[0][0]
    for start, end in kernels:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - kernels[0][0]
    return {
        "host_waits_ms": waited,
        "device_ms": round(span / 1e3 / steps, 4),
        "idle_ms": round((span - busy) / 1e3 / steps, 4),
    }


def kernels(device: str, small: bool) -> None:
    """Bytes a second of the tail's kernels."""
    shapes = [(64, 64), (64,)] if small else gpu_kernels.shapes()
    for name, found in gpu_kernels.measured(device, shapes, 2 if small else gpu_kernels.ROUNDS).items():
        report(**{f"GPT-2: {name}": found})


class Tensors(nn.Module):
    """Parameters of given shapes, and a loss that gives each a gradient."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(1e-2 * torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        parts = [value.float().flatten()[:64].square().sum() for value in self.values]
        return x * torch.stack(parts).sum()


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of the 161 parameters of a ResNet-50."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for n in range(blocks):
            found += [(width, before, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            found += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if n == 0:
                found += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*found, (1000, 2048), (1000,)]


POLICIES = {
    "mixed": hs.Policy.of("mixed", dtype="bf16"),
    "O2, split": hs.Policy.of("O2", dtype="bf16", master="split"),
    "pure, stochastic": hs.Policy.of("pure", dtype="bf16", master="stochastic", state="low"),
}


def tails(device: str, small: bool) -> None:
    """The tail of a step in turns with torch's: on whole tensors, and on as many of one element: the host's time."""
    for title, shapes in (("GPT-2", gpu_kernels.shapes()), ("ResNet-50", resnet50())):
        ones: list[tuple[int, ...]] = [(1,)] * len(shapes)
        for size, those in (("whole", shapes), ("one element each", ones)):
            if small and size == "whole":
                continue
            runs: dict[str, tuple[Stages, Callable[[], object]]] = {}
            for label in (AMP, *POLICIES):
                model, stages = Tensors(those).to(device), Stages(device)
                loss_fn = stages.watched(lambda model, x: model(x))
                x = torch.ones((), device=device)
                if label == AMP:
                    runs[label] = (stages, _amp_step(model, loss_fn, x))
                else:
                    adam = torch.optim.AdamW(model.parameters(), 1e-4)
                    train = hs.TrainStep(model, adam, loss_fn, policy=POLICIES[label], clip_norm=CLIP)
                    runs[label] = (stages, lambda train=train, x=x: train(x))  # type: ignore[misc]
            taken: dict[str, list[float]] = {label: [] for label in runs}
            for n in range(3 if small else 25):
                for label, (stages, step) in runs.items():
                    tail = stages.run(step)[2]
                    if n >= 2:
                        taken[label].append(1e6 * tail)
            found = {label: round(statistics.median(times), 1) for label, times in taken.items()}
            report(**{f"{title}, {len(shapes)} tensors, {size}: tail, us": found})


def _amp_step(model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor) -> Callable[[], object]:
    optimizer, parameters = torch.optim.AdamW(model.parameters(), 1e-4, fused=True), list(model.parameters())

    def step() -> None:
        loss_fn(model, x).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def losses(device: str, small: bool) -> None:
    """Cross entropy at even and odd numbers of classes, and with its product."""
    rows, rounds = (16, 2) if small else (8192, 20)
    for classes in (10, 11) if small else (1000, 32000, 50257, 50304, 128256):
        torch.manual_seed(0)
        logits = torch.randn(rows, classes, device=device, dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, classes, (rows,), device=device)
        moved, found = 3 * logits.numel() * logits.element_size(), {}
        for label, region in _regions(device).items():

            def both(region: Any = region, logits: Tensor = logits, target: Tensor = target) -> None:
                with region():
                    loss = F.cross_entropy(logits, target)
                torch.autograd.grad(loss, logits)

            both()
            taken = milliseconds(both, device, rounds)
            found[label] = {"ms": taken, "GB/s": round(moved / taken / 1e6, 1)}
        report(**{f"{rows} x {classes}": found})
    rows, width, classes = (32, 16, 64) if small else (16384, 768, 50257)
    hidden = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(classes, width, device=device)).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)
    ways: dict[str, Callable[[], Tensor]] = {
        AMP: lambda: F.cross_entropy(F.linear(hidden, weight), target),
        "hs.linear_cross_entropy": lambda: hs.linear_cross_entropy(hidden, weight, target),
    }
    for (label, loss_of), region in zip(ways.items(), _regions(device).values(), strict=True):

        def whole(loss_of: Callable[[], Tensor] = loss_of, region: Any = region) -> None:
            with region():
                loss = loss_of()
            torch.autograd.grad(loss, (hidden, weight))

        whole()
        forget_peak(device)
        taken = milliseconds(whole, device, 2 if small else 5)
        report(**{f"{rows} x {width} x {classes}, {label}": {"ms": taken, "peak_MiB": mebibytes(device)}})


def _regions(device: str) -> dict[str, Callable[[], Any]]:
    mixed = hs.Policy.of("mixed", dtype="bf16")
    return {
        AMP: lambda: torch.autocast(device, dtype=torch.bfloat16),
        "mixed": lambda: hs.autocast(device, policy=mixed),
    }


def exponents(device: str, small: bool) -> None:
    """Exponent counts of one large tensor, and what a monitor adds to every step."""
    x = torch.randn(1 << (12 if small else 28), device=device).to(torch.bfloat16)
    load_kernels(device)
    rows, expected, part = reference.rows(1, device), reference.rows(1, "cpu"), x[: 1 << 16]
    ops.exponents_(rows, [part])
    reference.count_(expected, [part.cpu()])
    assert torch.equal(rows.cpu(), expected), "exponents are counted as the reference does not"
    ops.exponents_(rows, [x])
    taken = milliseconds(partial(ops.exponents_, rows, [x]), device, 2 if small else 10)
    report(exponents={"ms": taken, "GB/s": round(2 * x.numel() / taken / 1e6, 1)})
    case = gpt("bf16", small=small)
    batch, found = tuple(t.to(device) for t in case.batch(0)), {}
    for label in ("no monitor", "monitor, every=1"):
        run = started(case, device)
        train: Any = run.holds[0]
        monitor = hs.Monitor(train, every=1) if label != "no monitor" else None

        def step(run: Run = run, monitor: Any = monitor) -> None:
            run.step(batch)
            if monitor is not None:
                monitor.poll()

        for _ in range(3):
            step()
        found[label] = milliseconds(step, device, 2 if small else 10)
    report(step_ms=found)


def memory(device: str, small: bool) -> None:
    """The most memory of 20 micro-batches of 64 MiB in windows of 8, one of them bad; training goes on."""
    accumulate, width = 8, 1 << (6 if small else 20)

    def batch(n: int) -> Tensor:
        x = torch.full((16, width), 1e-3, device=device)
        return x * math.inf if n == 11 else x

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]  # module calls are Any

    for label, box in (("hs", True), ("hs, no black box", False), (AMP, None)):
        torch.manual_seed(0)
        model = nn.Linear(width, 1).to(device)
        adam = torch.optim.AdamW(model.parameters(), 1e-4)
        forget_peak(device)
        skipped = 0
        if box is None:
            for n in range(20):
                with torch.autocast(device, dtype=torch.bfloat16):
                    value = loss(model, batch(n)) / accumulate
                value.backward()
                if n % accumulate == accumulate - 1:
                    adam.step()
                    adam.zero_grad()
        else:
            rule = hs.Policy.of("mixed", dtype="bf16")
            train = hs.TrainStep(model, adam, loss, policy=rule, accumulate=accumulate, blackbox=box)
            for n in range(20):
                result = train(batch(n))
                skipped += n == 15 and result.host().skipped
            assert skipped == 1, "the bad window was applied"
            train.flush()
            assert all(bool(p.isfinite().all()) for p in model.parameters())
        report(**{f"peak, {label}": {"MiB": mebibytes(device), "batch_MiB": 16 * width * 4 / 2**20}})


def compiled(device: str, small: bool) -> None:
    """Compiled steps beside the eager one: losses and times."""
    case = gpt("bf16", small=small)
    ways: dict[str, Any] = {"eager": {}, "compile=True": {"compile": True}}
    ways["reduce-overhead"] = {"compile": {"mode": "reduce-overhead"}}
    if small:
        ways = {"eager": {}, "aot_eager": {"compile": {"backend": "aot_eager"}}}
    curves: dict[str, list[float]] = {}
    for label, options in ways.items():
        torch._dynamo.reset()
        run = started(case, device, **options)
        batches = [tuple(t.to(device) for t in case.batch(n)) for n in range(4)]
        curves[label] = [float(run.step(batches[n % 4])) for n in range(3 if small else 20)]
        taken = milliseconds(partial(run.step, batches[0]), device, 2 if small else 10)
        apart = max(abs(a - b) / abs(b) for a, b in zip(curves[label], curves["eager"], strict=True))
        report(**{label: {"ms": taken, "apart_from_eager": float(f"{apart:.3g}"), "last": curves[label][-1]}})
        assert apart < 0.05, f"{label}: losses differ from eager ones by {apart:.3g}"


def ratios(device: str, small: bool) -> None:
    """What the last quick run of the benchmarks has measured: milliseconds, and times torch.amp's."""
    for name, case in json.loads(QUICK.read_text(encoding="utf-8"))["cases"].items():
        rows = {k: [round(row["ms"], 3), row.get("to_amp", {}).get("median")] for k, row in case["rows"].items()}
        report(**{name: {"rows": rows, "absent": case["absent"]}})


STEP = """
import torch, halfstep as hs
device = {device!r}
model = torch.nn.Linear(64, 64).to(device)
step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3), lambda m, x: m(x).square().mean())
losses = [step(torch.ones(8, 64, device=device)).loss.item() for _ in range(4)]
assert losses[-1] < losses[0], losses
print("trains; updated by", step.generic or "halfstep's operators")
"""


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return "\n".join([*done.stdout.strip().splitlines()[-1:], *done.stderr.strip().splitlines()[-3:]])


def no_compiler(device: str, small: bool) -> None:
    """A step on a machine without C compiler, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        empty = {"PATH": folder, "CC": "", "CXX": "", "TRITON_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
        report(without_compiler=_python(STEP.format(device=device), **empty))


def two_devices(device: str, small: bool) -> None:
    """A model on the second device while the first is current."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        report(two_devices="not here: there is one")
        return
    report(two_devices=_python(STEP.format(device="cuda:1")))


def two_ranks(device: str, small: bool) -> None:
    """Two ranks with a device each, over NCCL; one where there is one device. On a CPU two over gloo."""
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    for way in ("ddp", "pure"):
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            words += ["examples/at_scale.py", "--way", way, "--updates", "4" if small else "60", "--folder", folder]
            done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        report(**{f"{ranks} ranks, {way}": {"exit": done.returncode, "output": (done.stdout + done.stderr)[-800:]}})
        assert done.returncode == 0


BLOCKS: Mapping[str, Callable[[str, bool], None]] = {
    function.__name__: function
    for function in (
        *(environment, failed_capture, waits, kernels, tails, losses, exponents, memory, compiled),
        *(ratios, no_compiler, two_devices, two_ranks),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(BLOCKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu_blocks: torch sees no CUDA device here")
    BLOCKS[chosen.name](chosen.device, chosen.small)


if __name__ == "__main__":
    main()
