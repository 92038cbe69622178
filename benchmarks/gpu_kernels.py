"""Bytes a second of the tail's CUDA kernels beside those of a copy, on the parameters of a GPT with 124M.

    python benchmarks/gpu_kernels.py [--json FILE]

Each operator is repeated, in turns with a copy of as many bytes as it moves, and the median of the paired ratios is
reported: 1.0 means that it runs at the speed of a copy, which is as fast as memory allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.stamp import write
from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.tasks import machine

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS, WIDTH, VOCABULARY, CONTEXT = 12, 768, 50_304, 1024
WARM, ROUNDS = 5, 30


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a GPT-2 small with tied embeddings."""
    block = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    block += [(WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
    return [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *block * LAYERS, (WIDTH,), (WIDTH,)]


def size(*lists: list[Tensor]) -> int:
    """Return bytes."""
    return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)


def cases(device: str, of: list[tuple[int, ...]]) -> dict[str, tuple[Callable[[], object], int]]:
    """Return name -> (what to run on parameters of shapes `of`, bytes it reads and writes)."""

    def like(dtype: torch.dtype, scale: float = 1e-2) -> list[Tensor]:
        return [(scale * torch.rand(shape, device=device)).to(dtype) for shape in of]

    gradients, weights, none = like(BF16), like(BF16), list[Tensor]()
    wide, rest = like(FP32), [torch.zeros(shape, dtype=torch.int16, device=device) for shape in of]
    first, second, low_first, low_second = like(FP32), like(FP32), like(BF16), like(BF16)
    steps = [torch.zeros((), device=device) for _ in gradients]
    factor, bad = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    draws = torch.tensor([1, 2], device=device)

    def adam(form: str, value: list[Tensor], beside: list[Tensor], a: list[Tensor], b: list[Tensor]) -> None:
        given = (gradients, factor, bad, draws, 0, form, None, 1e-4)
        ops.UPDATES["adam"](value, beside, a, b, steps, *given, 0.9, 0.999, 1e-8, 0.01, True, False)

    def sgd() -> None:
        ops.UPDATES["sgd"](
            weights, none, first, gradients, factor, bad, None, 0, "plain", None, 1e-4, 0.9, 0.0, False, False
        )

    def lion() -> None:
        given = (gradients, factor, bad, None, 0, "split", None, 1e-4)
        ops.UPDATES["lion"](weights, rest, first, *given, 0.9, 0.99, 0.01, False)

    read = size(gradients)
    return {
        "norms, bf16": (lambda: ops.norms(gradients), read),
        "adam, master": (
            lambda: adam("copy", wide, weights, first, second),
            read + 2 * size(wide, first, second) + size(weights),
        ),
        "adam, split": (
            lambda: adam("split", weights, rest, first, second),
            read + 2 * size(weights, rest, first, second),
        ),
        "adam, stochastic": (
            lambda: adam("stochastic", weights, none, low_first, low_second),
            read + 2 * size(weights, low_first, low_second),
        ),
        "sgd, bf16": (sgd, read + 2 * size(weights, first)),
        "lion, split": (lion, read + 2 * size(weights, rest, first)),
    }


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the device's time for one `run`."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    stream = torch.cuda.current_stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def measured(device: str, of: list[tuple[int, ...]], rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """Return the speed of each kernel on parameters of shapes `of`."""
    if reason := load_kernels(device):
        raise SystemExit(f"these are kernels for {device}, and {reason}")
    numbers = {}
    for name, (run, moved) in cases(device, of).items():
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        copy = partial(torch.empty_like(source).copy_, source)
        pairs = [(seconds(run, device), seconds(copy, device)) for _ in range(WARM + rounds)][WARM:]
        speed = statistics.median(moved / mine for mine, _ in pairs)
        ratio = statistics.median(mine / other for mine, other in pairs)
        numbers[name] = {"bytes": moved, "bytes_per_second": speed, "time_over_copy": ratio}
    return numbers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    chosen = parser.parse_args()
    numbers = measured("cuda", shapes())
    for name, row in numbers.items():
        fast, ratio = row["bytes_per_second"] / 1e12, row["time_over_copy"]
        print(f"{name:18} {row['bytes'] / 1e6:8.0f} MB {fast:6.2f} TB/s   {ratio:.2f} of a copy's time")
    if chosen.json:
        write(chosen.json, {"machine": machine(), "kernels": numbers})


if __name__ == "__main__":
    main()
