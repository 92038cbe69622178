"""What the blocks of `gpu_first` do, each in a process of its own.

    python -m benchmarks.gpu_blocks steps --device cuda
    python -m benchmarks.gpu_blocks steps --device cpu --small   # on the stand-ins of `gpu_dry`

A function of `BLOCKS` gets the device and whether to run small, and reports what it finds as it goes: a line of JSON
each, so that nothing is lost if it is cut off. It raises where something is wrong. Its docstring says what is measured,
in which unit, and what should be seen; `gpu_first` writes it beside the result.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from benchmarks import gpu_kernels, models
from benchmarks.cases import AMP, CHAINS, GPT124M, LENET, Batch, Case, images, text
from benchmarks.gpu_first import MARK, ROOT
from benchmarks.gpu_kernels import of_rated, rated, seconds
from benchmarks.loops import Run, amp, policy
from benchmarks.stamp import commit
from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.reference import exponents as reference
from halfstep.step.graphs import WARM_UPS
from halfstep.tasks import machine
from halfstep.timing import wait_for as wait

WARM_UP = WARM_UPS + 3  # steps: warm-ups, a capture, replays
FORMS = ("mixed", "mixed, captured", "O2", "pure")
MIXED = hs.Policy.of("mixed", dtype="bf16")
LAUNCHES = ("Launch", "Memcpy", "Memset")
"""Parts of the names of CUDA's calls that give the device work: a kernel, a graph, a copy, a fill."""

ENOUGH = 1 << 50
"""Bytes that no device has."""


def report(**found: Any) -> None:
    """Print what was found as a line that `gpu_first` collects."""
    print(MARK + json.dumps(found), flush=True)


# ------------------------------------------------------------------ runs


def gpt(dtype: str, *, small: bool, layers: int = 12) -> Case:
    """Return GPT-2 at batch 4 x 512; small: one layer."""
    width, heads, length, words, rows = (32, 2, 16, 256, 2) if small else (768, 12, 512, 50304, 4)

    def model() -> nn.Module:
        made = models.gpt(width, 1 if small else layers, heads, length, words)
        made.head.weight = made.tokens.weight
        return made

    return replace(GPT124M, dtype=dtype, model=model, batch=text(rows, length, words))


def seeded(case: Case, device: str) -> nn.Module:
    """Return the case's model on the device; the same weights each time."""
    torch.manual_seed(0)
    return case.model().to(device)


def started(case: Case, device: str, label: str) -> Run:
    """Return a run by its label: torch.amp, or a policy and words after commas: captured, scheduler, monitor."""
    if label == AMP:
        return amp(case, seeded(case, device))
    preset, *words = label.split(", ")
    run = policy(case, seeded(case, device), preset, **({"cuda_graph": True} if "captured" in words else {}))
    train: Any = run.holds[0]
    if "scheduler" in words:
        train.scheduler = torch.optim.lr_scheduler.LambdaLR(train.optimizer, lambda n: 0.5 + 0.5**n)
    monitor = hs.Monitor(train, every=1) if "monitor" in words else None

    def step(batch: Batch) -> Tensor:
        loss = run.step(batch)
        if monitor is not None:
            monitor.poll()
        return loss

    return replace(run, step=step)


def batches_of(case: Case, device: str) -> list[Batch]:
    """Return four batches on the device."""
    return [tuple(t.to(device) for t in case.batch(n)) for n in range(4)]


def net(device: str) -> nn.Module:
    """Return a small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)


def square(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean square of what a model returns."""
    return model(x).square().mean()  # type: ignore[no-any-return]  # module calls are Any


def train_step(model: nn.Module, loss_fn: Callable[..., Tensor] = square, **options: Any) -> hs.TrainStep:
    """Return a `mixed` step in bf16 under AdamW."""
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_fn, **{"policy": MIXED, **options})


# ------------------------------------------------------------------ measures


def forget_peak(device: str) -> None:
    """Give back what memory is free, and begin to note the most in use."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def mebibytes(device: str) -> float:
    """Return the most memory in use since `forget_peak`."""
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)


def milliseconds(work: Callable[[], object], device: str, rounds: int) -> tuple[float, float]:
    """Return the median times of `work` until it returns, and until the device has done it."""
    host, whole = [], []
    for _ in range(rounds):
        wait(device)
        begun = time.perf_counter()
        work()
        host.append(1e3 * (time.perf_counter() - begun))
        wait(device)
        whole.append(1e3 * (time.perf_counter() - begun))
    return round(statistics.median(host), 4), round(statistics.median(whole), 4)


def row(run: Run, batches: list[Batch], device: str, *, small: bool) -> dict[str, Any]:
    """Return what a step takes.

    `host`: milliseconds until a call returns; `ms`: until its work is done; `wait`: where a step first waits for the
    device, "" if none does; `peak`: MiB at most; and what `_gaps` returns.
    """
    forget_peak(device)
    for n in range(WARM_UP):
        run.step(batches[n % 4])
    wait(device)
    found = {"wait": _first_wait(run, batches, 3 if small else 30), **_gaps(run, batches, 2 if small else 10, device)}
    host, whole = milliseconds(partial(run.step, batches[0]), device, 3 if small else 20)
    return {**found, "host": host, "ms": whole, "peak": mebibytes(device)}


def _first_wait(run: Run, batches: list[Any], steps: int) -> str:
    """Return where a step first waits for the device, "" if none does."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        for n in range(steps):
            run.step(batches[n % 4])
    except RuntimeError as error:
        places = traceback.extract_tb(error.__traceback__)
        return f"{str(error)[:100]} at " + " < ".join(f"{p.filename}:{p.lineno}" for p in reversed(places[-6:]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _trace(work: Callable[[], object], device: str) -> tuple[list[Any], list[Any]]:
    """Return what the device did in `work`, without the names that phases have there, and the calls by name."""
    wait(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        wait(device)
    done = [e for e in seen.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return done, list(seen.key_averages())


def _gaps(run: Run, batches: list[Any], steps: int, device: str) -> dict[str, Any]:
    """Return what the profiler sees of a step.

    `kernels`, copies and fills included, and `launches`, the host's calls for them; the milliseconds from the first to
    the last of them, those idle between, and those the host waited; the five that took longest.
    """

    def work() -> None:
        for n in range(steps):
            run.step(batches[n % 4])

    done, calls = _trace(work, device)
    waited = {e.key: round(e.cpu_time_total / 1e3 / steps, 4) for e in calls if "Synchronize" in e.key}
    given = sum(e.count for e in calls if e.key.startswith("cu") and any(part in e.key for part in LAUNCHES))
    spans = sorted((e.time_range.start, e.time_range.end) for e in done) or [(0.0, 0.0)]
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0]
    return {
        "kernels": round(len(done) / steps, 1),
        "launches": round(given / steps, 1),
        "host_waits_ms": waited,
        "device_ms": round(whole / 1e3 / steps, 4),
        "idle_ms": round((whole - busy) / 1e3 / steps, 4),
        "longest_ms": {name[:80]: round(us / 1e3 / steps, 4) for name, us in _by_name(done)[:5]},
    }


def _by_name(done: list[Any]) -> list[tuple[str, float]]:
    """Return the microseconds of kernels by name, the longest first."""
    times: dict[str, float] = {}
    for event in done:
        times[event.name] = times.get(event.name, 0.0) + event.time_range.end - event.time_range.start
    return sorted(times.items(), key=lambda item: -item[1])


def _child(name: str, device: str, small: bool, **environment: str) -> dict[str, Any]:
    """Run a function of `BLOCKS` or `PARTS` in a process of its own; return what it has reported."""
    words = [sys.executable, "-m", "benchmarks.gpu_blocks", name, "--device", device, *(["--small"] if small else [])]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(words[2:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found |= json.loads(line.removeprefix(MARK))
    return found


def _tried(work: Callable[[], Any]) -> tuple[Any, str]:
    """Return what `work` returns and ""; None and its error if it raises."""
    try:
        return work(), ""
    except Exception as error:  # of torch, of the driver, of a library; it is reported
        return None, f"{type(error).__name__}: {str(error)[:400]}"


def _losses(step: Callable[[Any], Any], batches: Sequence[Any], steps: int) -> list[float]:
    """Return the losses of so many steps; `step` takes a batch and returns a loss or a result."""
    found = []
    for n in range(steps):
        result = step(batches[n % len(batches)])
        found.append(getattr(result, "loss", result).detach().float().clone())  # memory of graphs is used again
    return torch.stack(found).tolist()


def _apart(some: list[float], others: list[float]) -> float:
    """Return the largest relative difference; infinite where one is not finite."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))
    return float(f"{worst:.3g}") if math.isfinite(worst) else math.inf


# ------------------------------------------------------------------ blocks that check


def environment(device: str, small: bool) -> None:
    """The machine.

    Versions, card, driver, compilers, free memory. A driver from 545 (CUDA 12.3) on loads modules inside a capture;
    Triton needs a C compiler. `kernels` has the reason if Triton's cannot run.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,mig.mode.current", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except OSError as error:
        driver = str(error)
    report(machine=machine(), commit=commit(), driver=driver)
    report(cuda=torch.version.cuda, compilers=[name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)])
    for name in ("triton", "transformer-engine", "pytest", "pytest-xdist"):
        try:
            report(**{name: version(name)})
        except PackageNotFoundError:
            report(**{name: "absent"})
    free, whole = torch.cuda.mem_get_info(device)
    report(devices=torch.cuda.device_count(), memory_free=free, memory=whole, rated=rated(device))
    report(kernels=load_kernels(device))


def failed_capture(device: str, small: bool) -> None:
    """A capture that fails.

    By a loss that waits, and by one for which memory is short. It must leave nothing: the default stream, generators
    that draw, memory given back (bytes reserved before and after), a step that is captured once its loss is mended.
    """
    for cause in ("a wait", "out of memory"):
        _fail_capture(device, cause, 1 << (10 if small else 26))


def _fail_capture(device: str, cause: str, size: int) -> None:
    faulty, calls = [True], [0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        large, calls[0] = torch.ones(size, device=device), calls[0] + 1
        loss = square(model, x) + 0 * large.sum()
        if faulty[0] and cause == "a wait":
            loss.item()
        elif faulty[0] and calls[0] > WARM_UPS:
            torch.empty(ENOUGH, dtype=torch.uint8, device=device)
        return loss

    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device)
    step, x = train_step(model, loss, cuda_graph=True), torch.randn(8, 64, device=device)
    for _ in range(WARM_UPS):
        step(x)
    forget_peak(device)
    before = torch.cuda.memory_reserved(device)
    _, raised = _tried(lambda: step(x))
    report(**{f"{cause}, raised": raised})
    assert raised, f"a step was captured in spite of {cause}"
    forget_peak(device)
    after = torch.cuda.memory_reserved(device)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device), "another stream is current"
    F.dropout(torch.ones(8, device=device))  # raises where the generator still draws for a capture
    faulty[0] = False
    for _ in range(WARM_UP):
        assert step(x).host().updated
    graphs: Any = step._graphs
    report(**{cause: {"reserved": [before, after], "captures": graphs.captures, "replays": graphs.replays}})
    assert graphs.replays, "the step was not captured again"
    assert after <= before + (1 << 27), "memory was not given back"


def replay_without_memory(device: str, small: bool) -> None:
    """A black box whose replay of a bad step runs out of memory.

    The step is skipped and training goes on; the report says what the box made of it.
    """
    bad, calls = [False], [0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls[0] += bad[0]
        if calls[0] > 1:  # the first call with a bad batch is the step's
            torch.empty(ENOUGH, dtype=torch.uint8, device=device)
        return square(model, x)

    step, x = train_step(net(device), loss), torch.randn(8, 64, device=device)
    step(x)
    bad[0] = True
    assert step(x * math.inf).host().skipped, "the bad step was applied"
    _, raised = _tried(step.explain)
    report(explained=raised, calls_in_replays=calls[0] - 1)
    assert raised and calls[0] > 1, "nothing was replayed"
    bad[0], calls[0] = False, 0
    assert step(x).host().updated, "training does not go on"


def side_stream(device: str, small: bool) -> None:
    """Training on a side stream.

    Losses of eager and captured steps beside those on the default stream: `apart`, the largest relative difference, is
    0 up to the choice of kernels; what reads a tensor before another stream has written it differs by more.
    """
    batches = [torch.randn(256, 64, device=device) for _ in range(4)]
    for label in ("eager", "captured"):
        curves = {}
        for where in ("default", "side"):
            step, stream = train_step(net(device), cuda_graph=label == "captured"), torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream) if where == "side" else nullcontext():
                curves[where] = _losses(step, batches, 12)
            torch.cuda.current_stream(device).wait_stream(stream)
        apart = _apart(curves["side"], curves["default"])
        report(**{label: {"apart": apart, "last": curves["side"][-1]}})
        assert apart < 1e-3, f"{label}: losses on a side stream differ by {apart}"


def default_device(device: str, small: bool) -> None:
    """Training where torch.set_default_device names the device, and no call does.

    Eager, captured, in fp16 and with a state that is saved and loaded; `losses` fall.
    """
    torch.set_default_device(device)
    try:
        options: dict[str, dict[str, Any]] = {"bf16": {}, "captured": {"cuda_graph": True}}
        options["fp16"] = {"policy": hs.Policy.of("mixed", dtype="fp16")}
        options["pure"] = {"policy": hs.Policy.of("pure", dtype="bf16")}
        for label, named in options.items():
            torch.manual_seed(0)
            step, x = train_step(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), **named), torch.randn(8, 64)
            curve = _losses(step, [x], WARM_UP)
            step.load_state_dict(step.state_dict())
            curve += _losses(step, [x], 2)
            report(**{label: {"losses": [curve[0], curve[-1]]}})
            assert curve[-1] < curve[0] and x.device.type == torch.device(device).type
    finally:
        torch.set_default_device(None)


def two_devices(device: str, small: bool) -> None:
    """A model on the second device while the first is current.

    `losses` fall; `updated_by` is halfstep's operators.
    """
    there = torch.cuda.device_count() > 1
    report(two_devices=_child("train", f"{device}:1", small) if there else "not here: there is one")


def no_compiler(device: str, small: bool) -> None:
    """A step without C compiler and with empty caches.

    `losses` fall; `updated_by` has the reason if operators of torch make the updates.
    """
    with tempfile.TemporaryDirectory() as folder:
        empty = {"PATH": folder, "CC": "", "CXX": "", "TRITON_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
        report(without_compiler=_child("train", device, small, **empty))


def train(device: str, small: bool) -> None:
    """Some steps, whose losses fall; a part of other blocks."""
    step, x = train_step(net(device)), torch.ones(8, 64, device=device)
    curve = _losses(step, [x], 6)
    report(losses=curve, updated_by=step.generic or "operators of halfstep")
    assert curve[-1] < curve[0]


def two_ranks(device: str, small: bool) -> None:
    """Two ranks with a device each, over NCCL; one rank where there is one device.

    DistributedDataParallel and hs.shard: the backend (gloo on a CPU), the device and the losses of rank 0, which fall;
    after training all ranks have equal weights.
    """
    count = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda n: _child("rank", device, small, RANK=str(n), **given), range(count)))
    report(**{f"{count} ranks": found[0]})


def rank(device: str, small: bool) -> None:
    """One process of `two_ranks`."""
    number, backend = int(os.environ["RANK"]), "gloo" if device == "cpu" else "nccl"
    torch.cuda.set_device(number)
    dist.init_process_group(backend)
    try:
        for way in ("ddp", "sharded"):
            model = net(device)
            if way == "ddp":
                step = train_step(DistributedDataParallel(hs.prepare(model, policy=MIXED)), policy=None, clip_norm=1.0)
            else:
                hs.shard(model, MIXED)
                step = train_step(model, policy=None, clip_norm=1.0)
            x = torch.randn(32, 64, generator=torch.Generator("cpu").manual_seed(number)).to(device)
            curve = _losses(step, [x], 4 if small else 20)
            weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
            mine = torch.cat([weight.flatten().float() for weight in weights])
            both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(both, mine)
            place = str(next(model.parameters()).device)
            report(**{way: {"backend": dist.get_backend(), "device": place, "losses": [curve[0], curve[-1]]}})
            assert curve[-1] < curve[0] and all(torch.equal(mine, other) for other in both)
    finally:
        dist.destroy_process_group()


def engine(device: str, small: bool) -> None:
    """Transformer Engine's layers in a step, where it is installed.

    Losses under torch.amp and under `mixed` are near. The same in its fp8, which not every card has.
    """
    te, lack = _tried(lambda: importlib.import_module("transformer_engine.pytorch"))
    report(transformer_engine=lack or "here")
    x = torch.randn(64, 256, device=device)

    def layers() -> nn.Module:
        return nn.Sequential(te.Linear(256, 256), nn.GELU(), te.Linear(256, 256))

    for fp8 in (False, True) if te else ():

        def loss(model: nn.Module, x: Tensor, fp8: bool = fp8) -> Tensor:
            with te.fp8_autocast(enabled=fp8):
                return square(model, x)

        def curve(label: str, loss_fn: Callable[..., Tensor] = loss) -> list[float]:
            case = replace(GPT124M, model=layers, loss_fn=loss_fn)
            return _losses(started(case, device, label).step, [(x,)], 6)

        (theirs, lack), (ours, error) = (_tried(partial(curve, label)) for label in (AMP, "mixed"))
        report(**{f"fp8={fp8}": {AMP: lack or theirs, "mixed": error or ours}})
        assert lack or (ours and _apart(ours, theirs) < 0.05), "Transformer Engine trains under torch.amp only"


def reruns(device: str, small: bool) -> None:
    """The same training twice: bits that differ.

    `losses` and `weights`: how many of the numbers differ between two runs of ten steps. 0 is expected where torch.amp
    has 0 (attention's backward pass adds in any order on some cards).
    """
    case = gpt("bf16", small=small, layers=2)
    batches, differing = batches_of(case, device), {}
    for label in (AMP, "mixed", "mixed, captured", "pure"):
        runs = []
        for _ in range(2):
            run = started(case, device, label)
            curve = torch.tensor(_losses(run.step, batches, 10))
            runs.append([curve, *(p.detach().clone() for p in run.model.parameters())])
            del run
            gc.collect()
        first, *weights = [int((a != b).sum()) for a, b in zip(*runs, strict=True)]
        differing[label] = first + sum(weights)
        report(**{label: {"losses": first, "weights": sum(weights)}})
    wrong = [label for label, number in differing.items() if number and not differing[AMP]]
    assert not wrong, f"two equal runs differ: {wrong}"


def large(device: str, small: bool) -> None:
    """Tensors of more than 2^31 elements, some 30 GiB.

    Norm, update and counts of exponents of one, and the losses and gradients of the last rows of logits, are those of
    parts taken alone: an index of 32 bits would read or write elsewhere.
    """
    assert not (lack := load_kernels(device)), lack
    part = 1 << (6 if small else 20)
    count = 8 * part if small else (1 << 31) + part
    ends = (slice(0, part), slice(count - part, count))
    torch.manual_seed(0)
    gradient = torch.full((count,), 2**-10, dtype=torch.bfloat16, device=device)
    for end in ends:
        gradient[end] = torch.randn(part, device=device)
    norm = float(ops.norms([gradient]))
    expected = math.sqrt(sum(float(gradient[end].float().square().sum()) for end in ends) + (count - 2 * part) * 2**-20)
    assert abs(norm - expected) < 1e-4 * expected, f"the norm is {norm}, not {expected}"
    rows, parts = reference.rows(1, device), reference.rows(1, device)
    ops.exponents_(rows, [gradient])
    for half in (gradient[: count // 2], gradient[count // 2 :]):
        ops.exponents_(parts, [half])
    assert torch.equal(rows, parts), "exponents are counted otherwise"
    report(elements=count, norm=norm)
    weight, rest = (torch.zeros(count, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int16))
    states = [torch.zeros(count, device=device) for _ in range(2)]
    of_ends = [[t[end].clone() for end in ends] for t in (weight, rest, *states, gradient)]
    factor, bad = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)

    def update(lists: list[list[Tensor]]) -> None:
        steps = [torch.zeros((), device=device) for _ in lists[0]]
        options = (0.9, 0.999, 1e-8, 0.01, True, False)
        ops.UPDATES["adam"](*lists[:4], steps, lists[4], factor, bad, None, 0, "split", None, 1e-2, *options)

    update([[weight], [rest], [states[0]], [states[1]], [gradient]])
    update(of_ends)
    for whole, those in zip((weight, rest, *states), of_ends[:4], strict=True):
        assert all(torch.equal(whole[end], one) for end, one in zip(ends, those, strict=True)), "the update differs"
    report(update="equal")
    del weight, rest, states, gradient, of_ends, whole, those
    forget_peak(device)
    classes = 64 if small else 50257
    logits = torch.randn(count // classes + 8, classes, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.randint(0, classes, (len(logits),), device=device)
    last = logits.detach()[-8:].clone().requires_grad_()
    with hs.autocast(device, policy=MIXED):
        loss = F.cross_entropy(logits, target, reduction="none")
        alone = F.cross_entropy(last, target[-8:], reduction="none")
    loss.sum().backward()
    alone.sum().backward()
    assert logits.grad is not None and last.grad is not None
    assert torch.equal(loss[-8:], alone) and torch.equal(logits.grad[-8:], last.grad), "the last rows differ"
    report(logits=logits.numel(), losses="equal", peak=mebibytes(device))


# ------------------------------------------------------------------ blocks that measure


def steps(device: str, small: bool) -> None:
    """Steps of a GPT-2 with 124M at batch 4 x 512, of a LeNet-5 and of 148 tiny tensors, beside torch.amp's.

    `row` says what is measured. No wait and no idle time, also with a scheduler; ms, host and peak at most torch.amp's;
    a captured step has few launches; a monitor at every step adds little. `of_rated`: 6 operations a parameter and
    token, as a share of the card's rate.
    """
    failed = []
    for name, case, labels in (
        ("GPT-2 bf16", gpt("bf16", small=small), (*FORMS, "mixed, scheduler", "mixed, monitor")),
        ("GPT-2 fp16", gpt("fp16", small=small), ("mixed", "mixed, captured", "mixed, captured, scheduler")),
        ("LeNet-5 bf16", replace(LENET, batch=images(2, 1, 32)) if small else LENET, (*FORMS, "pure, captured")),
        ("tiny bf16", CHAINS[0 if small else 1], FORMS),
    ):
        batches = batches_of(case, device)
        for label in (AMP, *labels):
            run = started(case, device, label)
            found = row(run, batches, device, small=small)
            operations = 6 * sum(p.numel() for p in run.model.parameters()) * batches[0][0].numel()
            share = of_rated(operations, found["ms"] / 1e3, device, roof=1)
            found["of_rated"] = share if "GPT" in name else None
            report(**{f"{name}, {label}": found})
            failed += [f"{name}, {label}"] if label != AMP and found["wait"] else []
            del run
    assert not failed, f"a step waits for the device: {failed}"


def channels_last(device: str, small: bool) -> None:
    """Steps of a ResNet-18 whose images and weights are contiguous, and channels_last.

    `row` says what is measured; `stays`: the share of 4-dimensional weights that are channels_last afterwards. Losses
    are near torch.amp's (`apart`), channels_last is faster, and as fast as torch.amp's.
    """
    case = replace(LENET, batch=images(2, 3, 16) if small else images(128, 3, 64))
    for layout in (torch.contiguous_format, torch.channels_last):

        def model(layout: torch.memory_format = layout) -> nn.Module:
            return models.ResNet18(8 if small else 64).to(memory_format=layout)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks it

        there = replace(case, model=model)
        batches: list[Batch] = [(x.to(memory_format=layout), y) for x, y in batches_of(case, device)]
        curves = {}
        for label in (AMP, "mixed", "mixed, captured", "pure"):
            run = started(there, device, label)
            curves[label] = _losses(run.step, batches, 6)
            found = row(run, batches, device, small=small)
            kernels = [p for p in run.model.parameters() if p.dim() == 4]
            found["stays"] = sum(p.is_contiguous(memory_format=torch.channels_last) for p in kernels) / len(kernels)
            found["apart"] = _apart(curves[label], curves[AMP])
            report(**{f"{str(layout).removeprefix('torch.')}, {label}": found})
            del run
            assert found["apart"] < 0.1, f"{label}: losses differ from torch.amp's by {found['apart']}"


def first_step(device: str, small: bool) -> None:
    """The first steps of a process, in milliseconds.

    `torch.amp` has CUDA, cuBLAS and attention to load. `mixed` follows in the same process: what it takes beyond a
    later step is its own stall, with an empty cache of Triton's (cold) and with a full one (warm).
    """
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            report(**{cache: _child("first_of_a_process", device, small, TRITON_CACHE_DIR=folder)})


def first_of_a_process(device: str, small: bool) -> None:
    """One process of `first_step`."""
    case = gpt("bf16", small=small)
    batches = batches_of(case, device)
    for label in (AMP, "mixed", "mixed, captured", "O2"):
        run, taken = started(case, device, label), []
        for n in range(WARM_UP):
            taken += [milliseconds(partial(run.step, batches[n % 4]), device, 1)[1]]
        report(**{label: taken})
        del run


def kernels(device: str, small: bool) -> None:
    """Kernels of halfstep, by replays of graphs.

    Microseconds of the device for an operator and GB/s; shares of a copy's speed and of the card's rated one, the roof
    of them all: above 0.85 of a copy. `kernels`: microseconds of each by the profiler; `longest_of_rated`: the share of
    the kernel that moves the bytes.
    """
    shapes = gpu_kernels.shapes(gpt("bf16", small=small).model)
    rows, classes = (16, (10, 11)) if small else (8192, (1000, 32000, 50257, 50304, 128256))
    for works in (gpu_kernels.updates(device, shapes), gpu_kernels.losses(device, rows, *classes)):
        for work in works:
            found = gpu_kernels.measured(work, device, rounds=2 if small else gpu_kernels.ROUNDS)
            times = _by_name(_trace(work.call, device)[0])
            found["kernels"] = {name[:60]: round(us, 2) for name, us in times}
            found["longest_of_rated"] = of_rated(work.bytes, times[0][1] / 1e6, device) if times else None
            report(**{work.name: found})


REGIONS: Mapping[str, Callable[[str], Any]] = {
    AMP: lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "mixed": lambda device: hs.autocast(device, policy=MIXED),
}


def losses(device: str, small: bool) -> None:
    """Cross entropy and its backward pass, by replays of graphs, in a region of torch.amp and in one of `mixed`.

    Milliseconds, and MiB at most, of 8192 rows of logits: odd numbers of classes as fast as even ones. Of the head's
    product and its loss, 16384 x 768 x 50257, as a pair and in one: also the share of the card's rated operations.
    """

    def measure(name: str, loss_fn: Callable[..., Tensor], given: list[Tensor], operations: int, *ways: str) -> None:
        *read, target = given
        for label in ways:

            def both(label: str = label) -> None:
                with REGIONS[label](device):
                    loss = loss_fn(*read, target)
                torch.autograd.grad(loss, read)

            both()
            forget_peak(device)
            both()
            peak, taken = mebibytes(device), seconds(both, device, rounds=2 if small else 8)
            share = of_rated(operations, taken, device, roof=1)
            report(**{f"{name}, {label}": {"ms": round(1e3 * taken, 4), "peak": peak, "of_rated": share}})

    def low(*shape: int) -> Tensor:
        return (0.02 * torch.randn(shape, device=device)).bfloat16().requires_grad_()

    rows = 16 if small else 8192
    for classes in (10, 11) if small else (1000, 32000, 50257, 50304, 128256):
        target = torch.randint(0, classes, (rows,), device=device)
        measure(f"{rows} x {classes}", F.cross_entropy, [low(rows, classes), target], 0, *REGIONS)
    rows, width, classes = (32, 16, 64) if small else (16384, 768, 50257)
    target, operations = torch.randint(0, classes, (rows,), device=device), 6 * rows * width * classes
    given = [low(rows, width), low(classes, width).detach().float().requires_grad_(), target]
    measure("pair", lambda x, w, y: F.cross_entropy(F.linear(x, w), y), given, operations, *REGIONS)
    measure("linear_cross_entropy", hs.linear_cross_entropy, given, operations, "mixed")


def memory(device: str, small: bool) -> None:
    """The most memory, in MiB, of 20 micro-batches of 64 MiB in windows of 8, one of them bad.

    No batches are held beyond the window; the bad window is skipped and training goes on.
    """
    accumulate, width = 8, 1 << (6 if small else 20)

    def batch(n: int) -> Tensor:
        x = torch.full((16, width), 1e-3, device=device)
        return x * math.inf if n == 11 else x

    for label, box in (("hs", True), ("hs, no black box", False), (AMP, None)):
        torch.manual_seed(0)
        model = nn.Linear(width, 1).to(device)
        adam = torch.optim.AdamW(model.parameters(), 1e-4)
        forget_peak(device)
        skipped = 0
        if box is None:
            for n in range(20):
                with torch.autocast(device, dtype=torch.bfloat16):
                    value = square(model, batch(n)) / accumulate
                value.backward()
                if n % accumulate == accumulate - 1:
                    adam.step()
                    adam.zero_grad()
        else:
            train = hs.TrainStep(model, adam, square, policy=MIXED, accumulate=accumulate, blackbox=box)
            for n in range(20):
                result = train(batch(n))
                skipped += n == 15 and result.host().skipped
            assert skipped == 1, "the bad window was applied"
            train.flush()
            assert all(bool(p.isfinite().all()) for p in model.parameters())
        report(**{f"peak, {label}": {"MiB": mebibytes(device), "batch_MiB": 16 * width * 4 / 2**20}})


def compiled(device: str, small: bool) -> None:
    """Compiled steps of a GPT-2 of four layers beside the eager one and torch.amp's compiled forward pass.

    `row` says what is measured; `compiling`: seconds of the first twelve steps. Losses are those of eager training up
    to rounding (`apart`); no copies of weights are in the graph.
    """
    case = gpt("bf16", small=small, layers=4)
    batches, options = batches_of(case, device), {"backend": "aot_eager"} if small else {"mode": "reduce-overhead"}
    ways: dict[str, Callable[[], Run]] = {
        "eager": lambda: started(case, device, "mixed"),
        "compile=True": lambda: policy(case, seeded(case, device), "mixed", compile=options if small else True),
        "torch.amp": lambda: amp(case, seeded(case, device), compile=None if small else "default"),
        "reduce-overhead": lambda: policy(case, seeded(case, device), "mixed", compile=options),
    }
    curves: dict[str, list[float]] = {}
    for label, way in ways.items():
        torch._dynamo.reset()
        run = way()
        begun = time.perf_counter()
        curves[label] = _losses(run.step, batches, 3 if small else 12)
        apart, taken = _apart(curves[label], curves["eager"]), round(time.perf_counter() - begun, 1)
        report(**{label: {**row(run, batches, device, small=small), "apart": apart, "compiling": taken}})
        assert apart < 0.05, f"{label}: losses differ from eager ones by {apart}"


BLOCKS: Mapping[str, Callable[[str, bool], None]] = {
    function.__name__: function
    for function in (
        *(environment, failed_capture, replay_without_memory, side_stream, default_device, two_devices, no_compiler),
        *(two_ranks, engine, reruns, large, steps, channels_last, first_step, kernels, losses, memory, compiled),
    )
}
PARTS: Mapping[str, Callable[[str, bool], None]] = {
    function.__name__: function for function in (train, rank, first_of_a_process)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*BLOCKS, *PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    run = {**BLOCKS, **PARTS}[chosen.name]
    if torch.device(chosen.device).type == "cpu":
        from benchmarks.gpu_dry import stand_ins

        with stand_ins(sys.modules[__name__]):
            run(chosen.device, chosen.small)
    elif torch.cuda.is_available():
        run(chosen.device, chosen.small)
    else:
        raise SystemExit("gpu_blocks: torch sees no CUDA device here")


if __name__ == "__main__":
    main()
