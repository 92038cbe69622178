"""Side by side with torch.amp: paired ratios in one process, JSON with the machine's description.

    python benchmarks/run.py --json benchmarks/results/cpu.json

Every timing is the median of paired ratios: candidates and baseline run in turns, in an order shuffled each round, and
an A/A pair (the baseline twice) runs in the same rounds, so a difference finer than A/A is not taken for one. Baselines
are torch.amp at its best: fused optimizer, set_to_none, clip_grad_norm_, GradScaler only with fp16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.tasks import Task, machine
from halfstep.tasks.candidates import candidates
from halfstep.tasks.gpt import GPT
from halfstep.tasks.lenet import LeNet5
from halfstep.tasks.loops import Loop, make_loop
from halfstep.tasks.measure import SavedForBackward, paired_ratio, state_bytes
from halfstep.tasks.resnet import ResNet

BF16 = torch.bfloat16
AMP = "torch.amp bf16"
EMPTY_MODE = "torch.amp:bf16 under an empty function mode"
Call = Callable[[], Any]


# ------------------------------------------------------------------ cases


def case(name: str, model: Callable[[], nn.Module], inputs: Tensor, targets: Tensor) -> Task:
    """A task of one fixed batch: speed does not depend on what is learned."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x).flatten(0, -2), y.flatten())

    return Task(
        name=name,
        model=model,
        batches=lambda seed, step: (inputs, targets),
        loss_fn=loss,
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4),
        metric=lambda net: 0.0,
        margin=1.0,
        clip_norm=1.0,
    )


def gpt(length: int = 128, vocabulary: int = 4096) -> Task:
    """4 layers of 256, 4 heads, batch 8: the GPT of the committed facts."""
    x, y = (torch.randint(0, vocabulary, (8, length)) for _ in "xy")
    return case("gpt", lambda: GPT(vocabulary=vocabulary, width=256, layers=4, heads=4, length=length), x, y)


def lenet() -> Task:
    """LeNet-5 on 64 images."""
    return case("lenet5", LeNet5, torch.randn(64, 1, 32, 32), torch.randint(0, 10, (64,)))


def mlp() -> Task:
    """21M parameters, batch 32: the weights are the work."""

    def model() -> nn.Module:
        wide = nn.Linear(4096, 4096)
        return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), wide, nn.ReLU(), nn.Linear(4096, 10))

    return case("mlp21m", model, torch.randn(32, 1024), torch.randint(0, 10, (32,)))


def resnet() -> Task:
    """The residual network of the comparison: nine BatchNorms, 64 images of 8 x 8."""
    return case("resnet", ResNet, torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))


class PassesThrough(TorchFunctionMode):
    """Does nothing: what torch takes for any function mode at all, and so the floor of a policy with rules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def under_an_empty_mode(task: Task) -> Task:
    """Return `task` with its forward pass under a mode that does nothing."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with PassesThrough():
            return task.loss_fn(net, x, y)  # type: ignore[no-any-return]

    return replace(task, loss_fn=loss)


def loop_of(task: Task, label: str) -> Loop:
    """Return a training loop of `label` with its own model."""
    if label == EMPTY_MODE:
        return loop_of(under_an_empty_mode(task), AMP)
    candidate = next(c for c in candidates([label], "cpu") if c.label.replace(" ", ":") == label.replace(" ", ":"))
    torch.manual_seed(0)
    return make_loop(candidate, task, task.model(), 1000)


def step_of(task: Task, label: str) -> Call:
    """One training step of `label` on the task's batch, ready to be called."""
    loop = loop_of(task, label)
    batch = task.batches(0, 0)
    return lambda: loop(batch)


# ------------------------------------------------------------------ measuring


def paired(calls: dict[str, Call], baseline: str, rounds: int) -> dict[str, Any]:
    """Run every call once a round in shuffled order; medians of ratios to `baseline`, with the A/A pair beside them."""
    run = {**calls, "A/A": calls[baseline]}
    order, shuffle = [*run], random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(3):
        for call in run.values():
            call()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            run[name]()
            times[name].append(time.perf_counter() - start)
    return {
        "baseline": baseline,
        "rounds": rounds,
        "rows": {
            name: {"ms": 1e3 * statistics.median(taken), **asdict(paired_ratio(taken, times[baseline]))}
            for name, taken in times.items()
        },
    }


def steps(task: Task, baseline: str, labels: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Paired step times of `labels` against `baseline`."""
    print(f"{task.name}: {', '.join(labels)} ...", file=sys.stderr, flush=True)
    return paired({label: step_of(task, label) for label in (baseline, *labels)}, baseline, rounds)


def region_entry(rounds: int) -> dict[str, Any]:
    """Time to make, enter and leave a region: blocks of 1,000, so milliseconds a block are microseconds an entry."""

    def theirs() -> None:
        with torch.autocast("cpu", dtype=BF16):
            pass

    def ours() -> None:
        with hs.autocast("cpu", dtype=BF16):
            pass

    def ruled() -> None:
        with hs.autocast(policy="mixed"):
            pass

    def block(call: Call) -> Call:
        def many() -> None:
            for _ in range(1000):
                call()

        return many

    calls = {"torch.autocast": block(theirs), "hs.autocast": block(ours), "hs.autocast(policy='mixed')": block(ruled)}
    return paired(calls, "torch.autocast", rounds)


def norms(rounds: int) -> dict[str, Any]:
    """Three ways to a low layer_norm of an fp32 stream, 2048 x 256, forward and backward."""
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((2048, 256), (256,), (256,)))
    ones = torch.ones(2048, 256, dtype=BF16)

    def backward(out: Tensor) -> None:
        out.backward(ones)
        x.grad = w.grad = b.grad = None

    calls: dict[str, Call] = {
        "fp32 norm, cast after it": lambda: backward(F.layer_norm(x, (256,), w, b).to(BF16)),
        "all arguments low": lambda: backward(F.layer_norm(x.to(BF16), (256,), w.to(BF16), b.to(BF16))),
        "low input, fp32 weights": lambda: backward(F.layer_norm(x.to(BF16), (256,), w, b)),
    }
    return paired(calls, "fp32 norm, cast after it", rounds)


def saved() -> dict[str, Any]:
    """Bytes kept between forward and backward, GPT with 8 x 256 tokens; cross_entropy inside the region."""
    task = gpt(length=256)
    taken = {}
    for label in (AMP, "fp32", "torch:bf16", "O1:bf16", "mixed:bf16", "O2:bf16", "pure:bf16"):
        loop = loop_of(task, label)
        with SavedForBackward(loop.model) as kept:
            loop(task.batches(0, 0))
        taken[label.removesuffix(":bf16")] = kept.bytes
    return {label: {"bytes": n, "ratio": n / taken[AMP]} for label, n in taken.items()}


def allocated(call: Call) -> int:
    """Return the most bytes that `call` held at one time beyond what was there before: every allocation counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def bytes_per_parameter() -> dict[str, Any]:
    """Bytes a parameter of the MLP with AdamW (activations are some 1 % of it): between steps, and the peak in one."""
    task = mlp()
    count = sum(p.numel() for p in task.model().parameters())
    found = {}
    for label in ("fp32", AMP, "torch:bf16", "O1:bf16", "mixed:bf16", "O2:bf16", "pure:bf16"):
        loop = loop_of(task, label)
        for _ in range(2):
            loop(task.batches(0, 0))
        between = state_bytes(*loop.state())
        peak = between + allocated(lambda loop=loop: loop(task.batches(0, 0)))  # type: ignore[misc]
        found[label.removesuffix(":bf16")] = {"between steps": between / count, "peak": peak / count}
    return {"parameters": count, "rows": found}


class Casts(TorchDispatchMode):
    """Counts casts of more than one element between floating formats, and the bytes they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy":
            self.see(args[0], out)
        elif name == "aten::copy_":
            self.see(args[1], args[0])
        elif name == "aten::_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self.see(source, target)
        return out

    def see(self, source: Tensor, target: Tensor) -> None:
        if source.numel() > 1 and source.dtype != target.dtype and source.is_floating_point():
            self.count += 1
            self.bytes += source.numel() * (source.element_size() + target.element_size())


def casts() -> dict[str, Any]:
    """Casts of one GPT step, optimizer included."""
    result = {}
    for label in (AMP, "torch", "O1", "mixed", "O2", "pure"):
        step = step_of(gpt(), label if label == AMP else f"{label}:bf16")
        step()
        with Casts() as seen:
            step()
        result[label] = {"casts": seen.count, "MB": seen.bytes / 2**20}
    return result


def native_fp16(emulated_ms: dict[str, float]) -> dict[str, Any]:
    """torch.amp's own fp16 kernels on this CPU: two steps are enough."""
    print("gpt: torch.amp in fp16, two steps ...", file=sys.stderr, flush=True)
    step = step_of(gpt(), "torch.amp:fp16")
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - start))
    times = {label: min(taken) / ms for label, ms in emulated_ms.items()}
    return {"torch.amp fp16 ms": min(taken), "steps": 2, "times as long as": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that everything runs")
    options = parser.parse_args()

    def rounds(full: int) -> int:
        return max(2, full // 20) if options.quick else full

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.manual_seed(0)
    low = ("torch:bf16", "O1:bf16", "mixed:bf16", "O2:bf16", "pure:bf16")
    half = ("torch:fp16", "mixed:fp16", "O2:fp16")
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "region_entry": region_entry(rounds(120)),
        "norms": norms(rounds(160)),
        "lenet5_bf16": steps(lenet(), AMP.replace(" ", ":"), (*low, EMPTY_MODE), rounds(300)),
        "resnet_bf16": steps(resnet(), AMP.replace(" ", ":"), (*low, EMPTY_MODE), rounds(200)),
        "gpt_bf16": steps(gpt(), AMP.replace(" ", ":"), low, rounds(60)),
        "mlp21m_bf16": steps(mlp(), AMP.replace(" ", ":"), ("mixed:bf16", "O2:bf16", "pure:bf16"), rounds(60)),
        "lenet5_fp16": steps(lenet(), "fp32", half, rounds(120)),
        "resnet_fp16": steps(resnet(), "fp32", half, rounds(100)),
        "gpt_fp16": steps(gpt(), "fp32", half, rounds(32)),
    }
    rows = report["gpt_fp16"]["rows"]
    report["gpt_fp16_native"] = native_fp16({label: rows[label]["ms"] for label in half})
    report["saved_for_backward"] = saved()
    report["bytes_per_parameter"] = bytes_per_parameter()
    report["casts_per_step"] = casts()
    text = json.dumps(report, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
