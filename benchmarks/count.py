"""``python -m benchmarks.count``: casts, bytes, launches and syncs of a step, torch.amp's and every preset's.

Runs on fake CUDA tensors: the operators, formats and optimizers of a GPU, on a machine without one. Steps clip the
gradient norm and use fused AdamW; torch.amp is GradScaler (fp16), unscale_, clip_grad_norm_ and fused AdamW.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from benchmarks.stamp import write
from halfstep.compat.megengine.hub import resnet18
from halfstep.formats import DTYPES
from halfstep.tasks.gpt import GPT
from halfstep.testing.counter import count_step
from halfstep.testing.counts import MIB, Counts
from halfstep.testing.fake_cuda import LOADED, FakeCudaError, fake_cuda, run_python

LOW_FORMATS = ("fp16", "bf16")
POLICIES = ("torch", "O1", "mixed", "O2", "pure")
LIMIT = "limit"
"""Low weights, forward, backward and a fused optimizer without clipping: nothing is cast, and no fp32 weight exists."""

GPT_5M: Mapping[str, int] = {"vocabulary": 4096, "width": 256, "layers": 4, "heads": 4, "length": 128}
"""A decoder of 5.29M parameters in 53 tensors."""


def small_resnet18(width: int = 64, classes: int = 100) -> nn.Module:
    """Return a ResNet-18 with a stem for small pictures: 11.2M parameters in 62 tensors."""
    network: Any = resnet18(classes, width=width)
    network.conv1, network.maxpool = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.Identity()
    return cast(nn.Module, network)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype, tuple[int, ...]]] = {
    "gpt": (lambda: GPT(**GPT_5M), (8, 128), torch.long, (8, 128)),
    "resnet18": (small_resnet18, (32, 3, 32, 32), torch.float32, (32,)),
}
"""Name -> the model, the shape and format of its inputs, and the shape of its targets."""


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def count_program(model: str, program: str, *, clip: bool = True) -> Counts:
    """Count a step of one of `MODELS`; inside ``with fake_cuda():``."""
    name, _, form = program.partition(":")
    if model not in MODELS or form not in LOW_FORMATS:
        raise SystemExit(f"{model} {program}: expected one of {', '.join(MODELS)} and NAME:fp16 or NAME:bf16")
    make, shape, kind, targets = MODELS[model]
    with torch.device("cuda"):
        made, x, y = make(), torch.empty(shape, dtype=kind), torch.empty(targets, dtype=torch.long)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)
    if name == "torch.amp":
        return count_step(_torch_amp(made, optimizer, DTYPES[form], clip=clip), x, y)
    if name == LIMIT:
        low = _lowered(made, DTYPES[form])
        optimizer = torch.optim.AdamW(low.parameters(), lr=1e-3, fused=True)
        x = x.to(DTYPES[form]) if x.is_floating_point() else x
        return count_step(_torch_amp(low, optimizer, torch.float32, clip=False), x, y)
    policy = hs.Policy.of(name, dtype=form)
    return count_step(hs.TrainStep(made, optimizer, loss_fn, policy=policy, clip_norm=1.0 if clip else None), x, y)


def _torch_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, clip: bool
) -> Callable[[Tensor, Tensor], None]:
    """Return a step written for torch.amp, as in its documentation; in fp32 without autocast."""
    region = torch.autocast("cuda", dtype=dtype) if dtype is not torch.float32 else nullcontext()
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with region:
            loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give `model` low parameters (fake ones cannot be converted in place); buffers stay."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype))
    return model


HEAD = (
    "program", "casts", "weight", "down", "up", "cast MiB", "MiB", "B/param: tail", "casts of weights",
    "launches in tail", "kernels", "syncs", "saved MiB",
)  # fmt: skip


def cells(name: str, counts: Counts) -> tuple[str, ...]:
    """Return the row of a program in the table."""
    up = counts.casts("up") + counts.casts("gradient")
    return (
        name,
        *(str(n) for n in (counts.casts(), counts.casts("weight"), counts.casts("down"), up)),
        f"{counts.cast_bytes() / MIB:.1f}",
        f"{counts.bytes() / MIB:.1f}",
        f"{counts.tail_bytes_per_parameter:.1f}",
        f"{counts.weight_bytes_per_parameter:.1f}",
        *(str(n) for n in (counts.launches("tail"), counts.kernels("tail"), counts.syncs_in())),
        f"{counts.saved / MIB:.1f}",
    )


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.count", description=__doc__)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="again for more; default: all")
    parser.add_argument("--program", action="append", help="torch.amp:fp16, pure:bf16, limit:fp16; default: all")
    parser.add_argument("--no-clip", action="store_true", help="without clipping of the gradient norm")
    parser.add_argument("--detail", action="store_true", help="what each program does, operator by operator")
    parser.add_argument("--json", type=Path, help="write the totals to this file; with --detail the rows too")
    options = parser.parse_args(words)
    if LOADED not in os.environ:
        try:
            return run_python(["-m", "benchmarks.count", *words]).returncode
        except FakeCudaError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.count", *words]),
        "torch": torch.__version__,
        "device": "fake CUDA tensors, compute capability 9.0",
        "clip_norm": not options.no_clip,
        "models": {},
    }
    programs = [f"{name}:{form}" for form in LOW_FORMATS for name in ("torch.amp", *POLICIES, LIMIT)]
    for model in options.model or MODELS:
        made = {}
        print(f"\n{model}\n| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
        for program in options.program or programs:
            with fake_cuda():
                counts = made[program] = count_program(model, program, clip=not options.no_clip)
            print(f"| {' | '.join(cells(program, counts))} |", flush=True)
        if options.detail:
            for program, counts in made.items():
                print(f"\n{model} {program}\n{counts}")
        report["models"][model] = {
            program: {"summary": counts.summary(), **(dataclasses.asdict(counts) if options.detail else {})}
            for program, counts in made.items()
        }
    if options.json is not None:
        write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
