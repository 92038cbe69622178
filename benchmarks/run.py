"""Side by side with torch.amp: paired ratios in one process, JSON with the machine's description.

    python benchmarks/run.py --json benchmarks/results/cpu.json

Every timing is the median of paired ratios: candidate and baseline run in turns, in an order shuffled each round, and
an A/A pair (the baseline twice) runs in the same rounds, so a difference finer than A/A is not reported as one.
Baselines are torch.amp at its best: fused optimizer, set_to_none, clip_grad_norm_, GradScaler only with fp16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.tasks import machine
from halfstep.tasks.gpt import GPT
from halfstep.tasks.lenet import LeNet5

BF16, HALF = torch.bfloat16, torch.float16
Step = Callable[[], Any]


# ----------------------------------------------------------------------------------------------- models


def gpt_case(*, batch: int = 8, length: int = 128, vocabulary: int = 4096, width: int = 256, layers: int = 4) -> Any:
    """The GPT of the measured facts: d=256, 4 layers, 4 heads, V=4096."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        torch.manual_seed(0)
        model = GPT(vocabulary=vocabulary, width=width, layers=layers, heads=4, length=length)
        x, y = (torch.randint(0, vocabulary, (batch, length)) for _ in "xy")

        def loss(m: nn.Module) -> Tensor:
            logits = m(x)
            return F.cross_entropy(logits.view(-1, vocabulary), y.view(-1))

        return model, loss

    return make


def lenet_case() -> Any:
    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        torch.manual_seed(0)
        model = LeNet5()
        x, y = torch.randn(64, 1, 32, 32), torch.randint(0, 10, (64,))
        return model, lambda m: F.cross_entropy(m(x), y)

    return make


def mlp_case() -> Any:
    """21M parameters, batch 32: the weights are the work."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
        x, y = torch.randn(32, 1024), torch.randint(0, 10, (32,))
        return model, lambda m: F.cross_entropy(m(x), y)

    return make


# ----------------------------------------------------------------------------------------------- steps


def fp32_step(make: Any) -> Step:
    return _loop(make, None)


def amp_step(make: Any, dtype: torch.dtype) -> Step:
    return _loop(make, dtype)


def _loop(make: Any, dtype: torch.dtype | None) -> Step:
    model, loss_fn = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is HALF)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            loss = loss_fn(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def half_step(make: Any, policy: hs.Policy) -> Step:
    model, loss_fn = make()
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), lambda m: loss_fn(m), policy=policy, clip_norm=1.0
    )
    return step


# ----------------------------------------------------------------------------------------------- measuring


def paired(steps: dict[str, Step], baseline: str, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Run every step once a round in shuffled order; return medians of ratios to `baseline` and their A/A error."""
    order = [*steps, "A/A"]
    run = {**steps, "A/A": steps[baseline]}
    times: dict[str, list[float]] = {name: [] for name in order}
    shuffle = random.Random(seed)
    for name in order:
        run[name]()
        run[name]()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            run[name]()
            times[name].append(time.perf_counter() - start)
    result: dict[str, Any] = {"baseline": baseline, "rounds": rounds}
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(taken, times[baseline], strict=True))
        result[name] = {
            "ms": round(1e3 * statistics.median(taken), 4),
            "ratio": round(statistics.median(ratios), 4),
            "ratio_quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[3 * len(ratios) // 4], 4)],
        }
    return result


def region_entry() -> dict[str, Any]:
    """Microseconds to make, enter and leave a region; ratios of paired blocks of 2,000."""
    mixed = hs.Policy.of("mixed", dtype="bf16")

    def ours() -> None:
        with hs.autocast("cpu", dtype=BF16):
            pass

    def ruled() -> None:
        with hs.autocast("cpu", policy=mixed):
            pass

    def theirs() -> None:
        with torch.autocast("cpu", dtype=BF16):
            pass

    def block(call: Callable[[], None]) -> Step:
        def many() -> None:
            for _ in range(2000):
                call()

        return many

    result = paired(
        {"torch.autocast": block(theirs), "torch": block(ours), "mixed": block(ruled)}, "torch.autocast", 40
    )
    for name in ("torch.autocast", "torch", "mixed", "A/A"):
        result[name]["us"] = round(result[name].pop("ms") / 2, 3)
    return result


def saved_bytes(make: Any, run: Callable[[nn.Module, Callable[[nn.Module], Tensor]], Tensor]) -> int:
    """Bytes of unique storages kept for backward over one forward, parameters excluded."""
    model, loss_fn = make()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run(model, loss_fn)
    total = sum(n for n, _ in kept.values())
    loss.backward()
    return total


def saved() -> dict[str, Any]:
    make = gpt_case(length=256)

    def amp(model: nn.Module, loss_fn: Callable[[nn.Module], Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return loss_fn(model)

    result = {"torch.amp bf16": saved_bytes(make, amp)}
    for name in ("torch", "mixed", "O2"):

        def run(model: nn.Module, loss_fn: Callable[[nn.Module], Tensor], name: str = name) -> Tensor:
            bound = hs.prepare(model, policy=hs.Policy.of(name, dtype="bf16", outputs="keep"))
            with (
                torch.autocast("cpu", dtype=BF16)
                if name == "torch"
                else hs.autocast("cpu", policy=hs.Policy.of("mixed", dtype="bf16"))
            ):
                return loss_fn(bound)

        result[name] = saved_bytes(make, run)
    return {name: {"bytes": n, "ratio": round(n / result["torch.amp bf16"], 4)} for name, n in result.items()}


class CastCounter(TorchDispatchMode):
    """Counts full-size casts between floating formats."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.casts = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy":
            self._count(args[0], out)
        elif name == "aten::copy_":
            self._count(args[1], args[0])
        elif name == "aten::_foreach_copy_":
            for source, target in zip(args[1], args[0], strict=True):
                self._count(source, target)
        return out

    def _count(self, source: Tensor, target: Tensor) -> None:
        if source.numel() > 1 and source.dtype != target.dtype and source.is_floating_point():
            self.casts += 1
            self.bytes += source.numel() * (source.element_size() + target.element_size())


def casts() -> dict[str, Any]:
    result = {}
    make = gpt_case()
    steps = {"torch.amp bf16": amp_step(make, BF16)}
    steps |= {n: half_step(make, hs.Policy.of(n, dtype="bf16")) for n in ("torch", "mixed", "O2")}
    for name, step in steps.items():
        step()
        with CastCounter() as counter:
            step()
        result[name] = {"casts": counter.casts, "MB": round(counter.bytes / 2**20, 2)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that everything runs")
    options = parser.parse_args()
    few = 0.05 if options.quick else 1.0

    def rounds(n: int) -> int:
        return max(2, int(n * few))

    def policies(*names: str, dtype: str = "bf16") -> dict[str, hs.Policy]:
        return {n: hs.Policy.of(n, dtype=dtype) for n in names}

    report: dict[str, Any] = {"machine": machine(), "command": "python " + " ".join(sys.argv)}
    print("region entry ...", flush=True)
    report["region_entry"] = region_entry()
    for label, make, n in (("lenet5", lenet_case(), 400), ("gpt", gpt_case(), 60)):
        print(label, "...", flush=True)
        steps = {"torch.amp bf16": amp_step(make, BF16)}
        steps |= {name: half_step(make, p) for name, p in policies("torch", "O1", "mixed", "O2").items()}
        report[label] = paired(steps, "torch.amp bf16", rounds(n))
    print("mlp ...", flush=True)
    make = mlp_case()
    steps = {"torch.amp bf16": amp_step(make, BF16), "O2": half_step(make, hs.Policy.of("O2", dtype="bf16"))}
    report["mlp21m"] = paired(steps, "torch.amp bf16", rounds(60))
    print("emulated fp16 ...", flush=True)
    for label, make, n in (("gpt_fp16", gpt_case(), 30), ("lenet5_fp16", lenet_case(), 200)):
        steps = {"fp32": fp32_step(make)}
        steps |= {f"{n}:fp16": half_step(make, p) for n, p in policies("torch", "mixed", "O2", dtype="fp16").items()}
        report[label] = paired(steps, "fp32", rounds(n))
    print("torch.amp fp16 on the gpt, two steps ...", flush=True)
    native = amp_step(gpt_case(), HALF)
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        native()
        taken.append(time.perf_counter() - start)
    report["gpt_fp16"]["torch.amp fp16"] = {"ms": round(1e3 * min(taken), 1), "steps": 2}
    for name in ("torch:fp16", "mixed:fp16"):
        report["gpt_fp16"][name]["times_faster_than_torch_amp"] = round(
            1e3 * min(taken) / report["gpt_fp16"][name]["ms"], 1
        )
    print("bytes saved for backward, casts ...", flush=True)
    report["saved_for_backward"] = saved()
    report["casts_per_step"] = casts()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
