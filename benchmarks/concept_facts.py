"""What the concept pictures draw, measured: gradients of a task, the casts of a step, a loss scale that moves.

    python -m benchmarks.concept_facts --json benchmarks/results/concepts.json

The step is counted on fake CUDA tensors, where operators and formats are those of a GPU (docs/counting.md); nothing is
timed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from benchmarks.stamp import write
from halfstep.formats import format_of
from halfstep.lens import ExponentSketch
from halfstep.policy import ScaleRule
from halfstep.tasks.gpt import gpt_task
from halfstep.testing import count_step, fake_cuda
from halfstep.testing.fake_cuda import LOADED, run_python

TRAINED = 20  # steps of the gpt task before its gradients are sketched
PRESETS = ("mixed", "O2")
RULE = ScaleRule(init=2.0**14, interval=10, floor=1.0)  # moves within a picture; the default interval is 2000
STEPS = 125
BROKEN = range(70, 90)  # these batches contain inf


# ------------------------------------------------------------------ gradients


def gradients() -> dict[str, Any]:
    """Return the exponents of the gpt task's gradients in fp32, of one step."""
    torch.manual_seed(0)
    task = gpt_task()
    model = task.model()
    optimizer = task.optimizer(model)
    step = hs.TrainStep(model, optimizer, task.loss_fn, policy="O0")
    for place in range(TRAINED):
        step(*task.batches(0, place))
    audit = hs.audit(model, [task.batches(0, TRAINED)], task.loss_fn, hs.Policy.of("O0"), optimizer)
    found: dict[str, Any] = {"task": task.name, "about": task.about, "step": TRAINED + 1}
    for role in ("weight gradient", "activation gradient"):
        sketch = ExponentSketch()
        for row in audit.filter(role=role).rows:
            if row.op != "cross_entropy":  # the loss and its gradient, which is 1, stay in fp32
                sketch.merge_(row.sketch)
        found[role] = {
            "exponents": sorted(sketch.exponents.items()),
            "zeros": sketch.zeros,
            "zero in fp16": sketch.underflow("fp16")[0],
            "zero in fp16, scaled by 2^16": sketch.underflow("fp16", 2.0**16)[0],
            "beyond fp16, scaled by 2^16": sketch.overflow("fp16", 2.0**16)[1],
        }
    return found


# ------------------------------------------------------------------ a step


class Block(nn.Module):
    """Two products with a norm and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64) -> (batch, 16)."""
        return self.second(F.gelu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def step_of(preset: str) -> dict[str, Any]:
    """Return formats and casts of a step of `Block` under `preset` in fp16; inside ``with fake_cuda():``."""
    step, model, batch = _made(preset)
    counts = count_step(step, *batch)
    casts: dict[str, dict[str, int]] = {}
    for row in counts.rows:
        if row.casts:
            kinds = casts.setdefault(row.phase, {})
            kinds[row.kind] = kinds.get(row.kind, 0) + row.casts
    tail = [row.operator.rpartition("::")[2] for row in counts.rows if row.phase == "tail"]
    step, model, batch = _made(preset)  # hooks observe another one than is counted
    formats: dict[str, Any] = {"weights": {n: _format(p) for n, p in model.named_parameters()}}
    forward, backward, weights = (formats.setdefault(name, {}) for name in ("forward", "backward", "gradients"))

    def observe(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            forward[name] = _format(output)
            output.register_hook(lambda gradient: backward.update({name: _format(gradient)}))

        return hook

    for name, module in model.named_children():
        module.register_forward_hook(observe(name))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: weights.update({name: _format(gradient)}))
    result = step(*batch)
    formats["loss"] = _format(result.loss)
    formats["stepped"] = sorted({_format(value) for value in _stepped(step)})
    return {"formats": formats, "casts": casts, "all casts": counts.casts(), "bytes": counts.cast_bytes(), "tail": tail}


def _made(preset: str) -> tuple[hs.TrainStep, nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("cuda"):
        model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    policy = hs.Policy.of(preset, dtype="fp16")
    step = hs.TrainStep(
        model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y), policy=policy, clip_norm=1.0
    )
    x = torch.empty(32, 64, device="cuda")
    return step, model, (x, torch.zeros(32, dtype=torch.long, device="cuda"))


def _stepped(step: hs.TrainStep) -> list[Tensor]:
    """Return the fp32 values that the optimizer steps: masters where there are any."""
    return [value for state in step.optimizer.state.values() for name, value in state.items() if name == "exp_avg"]


def _format(tensor: Tensor) -> str:
    return format_of(tensor.dtype).name


# ------------------------------------------------------------------ a scale


def scale_run() -> dict[str, Any]:
    """Return the scale before each step of a run in fp16 and which steps were skipped."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(8, 4)
    policy = hs.Policy.of("mixed", dtype="fp16", scale=RULE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = hs.TrainStep(
        model, optimizer, lambda model, x: model(x).float().square().mean(), policy=policy, blackbox=False
    )
    scales, skipped = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in range(STEPS):
            x = torch.randn(16, 8, generator=generator)
            x[0, 0] = float("inf") if place in BROKEN else x[0, 0]
            result = step(x).host()
            scales.append(result.scale)
            skipped.append(result.skipped)
        warned = [str(warning.message) for warning in caught if "scale" in str(warning.message)]
    numbers = {name: getattr(RULE, name) for name in ("init", "growth", "backoff", "interval", "floor")}
    broken = [BROKEN.start, BROKEN.stop - 1]
    return {"rule": numbers, "broken": broken, "scales": scales, "skipped": skipped, "warnings": len(warned)}


# ------------------------------------------------------------------ the file


def steps() -> dict[str, Any]:
    """Return `step_of` for each preset; the process has the fake CUDA device."""
    found = {}
    for preset in PRESETS:
        with fake_cuda():
            found[preset] = step_of(preset)
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concept_facts", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--steps", action="store_true", help="the counted steps alone")
    options = parser.parse_args(words)
    if LOADED not in os.environ:
        return run_python(["-m", "benchmarks.concept_facts", *words]).returncode
    torch.set_num_threads(1)
    report: dict[str, Any] = {"steps": steps()}
    if not options.steps:
        report |= {"gradients": gradients(), "scale": scale_run()}
        report |= {
            "torch": torch.__version__,
            "command": shlex.join(["python", "-m", "benchmarks.concept_facts", *words]),
        }
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
