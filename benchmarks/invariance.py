"""Which operators give the same bits for any number of threads, and for a sample in any batch, on a CPU.

    python -m benchmarks.invariance --json benchmarks/results/invariance.json

*again*: two calls. *threads*: 1 thread beside 2 and 4. *batch*: the first rows alone, beside them in a larger batch. A
cell is yes if every size of `SIZES` gave the same bits, forward and backward to the input.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.markdown import table
from benchmarks.stamp import write
from halfstep.tasks import machine
from halfstep.tasks.machine import threads_of_torch

__all__ = ["OPERATORS", "found", "invariance_table"]

SIZES = ((4, 64), (17, 96), (64, 256))
"""(samples, features); of attention, (samples, tokens)."""

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUESTIONS = ("again", "threads", "batch")


def _weight(features: int, outputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(features)
    values = torch.randn(outputs, features, generator=generator) / math.sqrt(features)
    return values.to(dtype)


def _attention(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (-1, 1)).expand(-1, -1, 32).unsqueeze(1)  # (samples, 1, tokens, 32)
    scale = _weight(32, 3, x.dtype)
    return F.scaled_dot_product_attention(q * scale[0], q * scale[1], q * scale[2], is_causal=True)


OPERATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, _weight(x.shape[-1], 80, x.dtype)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x * 4, -1),
    "attention": _attention,
}


def _bits(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = run(x)
    weights = torch.linspace(0.5, 1.5, result[0].numel(), dtype=result.dtype).view_as(result[0])
    (result * weights).float().sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


def _same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def found(op: str, form: str) -> dict[str, bool]:
    """Return for each question whether the bits of an operator in a format stayed the same."""
    run, answers = OPERATORS[op], dict.fromkeys(QUESTIONS, True)
    for rows, features in SIZES:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, features, generator=generator).to(FORMATS[form])
        with threads_of_torch(1):
            one = _bits(run, x)
            answers["again"] &= _same(one, _bits(run, x))
            for part in (1, 2, 3, rows // 2):
                few = _bits(run, x[:part])
                answers["batch"] &= _same(few, (one[0][:part], one[1][:part]))
        for threads in (2, 4):
            with threads_of_torch(threads):
                answers["threads"] &= _same(one, _bits(run, x))
    return answers


def invariance_table(report: Mapping[str, Any]) -> str:
    """Return a row for each operator and format."""
    words = {True: "yes", False: "no"}
    rows = [[row["op"], row["format"], *(words[row[question]] for question in QUESTIONS)] for row in report["rows"]]
    return table(["operator", "format", "two calls", "1, 2 and 4 threads", "alone and in a batch"], rows)


def main() -> None:
    """Ask every question of every operator and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [{"op": op, "format": form, **found(op, form)} for op in OPERATORS for form in FORMATS]
    write(given.json, {"command": "make bench-invariance", "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
