"""Time of the CUDA kernels, beside a copy's and beside what the card is rated for.

Work is captured in a CUDA graph several times over, and replays are timed by events: the host, whose call of an
operator can take ten times as long as its kernels, has no part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.kernels import ops
from halfstep.kernels.choose import gradient_into, load_kernels, row_sums
from halfstep.kernels.optimizers import SPECS
from halfstep.kernels.reference import exponents
from halfstep.kernels.reference.cross_entropy import shares
from halfstep.step.graphs import RECORDERS

BF16, FP32, INT16 = torch.bfloat16, torch.float32, torch.int16
CALLS, WARM, ROUNDS = 5, 3, 15

RATED = {
    "H100 80GB HBM3": (3.35e12, 989e12),  # of the SXM form; nvidia.com/en-us/data-center/h100
    "H200": (4.8e12, 989e12),  # nvidia.com/en-us/data-center/h200
    "A100-SXM4-80GB": (2.04e12, 312e12),  # nvidia.com/en-us/data-center/a100
}
"""Part of a card's name -> bytes a second of its memory, dense bf16 operations a second: the two roofs."""

NUMBERS = {
    **{"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9, "momentum_decay": 4e-3},
    **{"decoupled": True, "nesterov": False, "maximize": False},
}
"""Options of the optimizers."""


class Work(NamedTuple):
    """What is timed: a call, and the bytes that it must read and write."""

    name: str
    call: Callable[[], object]
    bytes: int


def rated(device: str) -> tuple[float, float] | None:
    """Return the card's row of `RATED`; None for a card that has none."""
    return next((row for part, row in RATED.items() if part in torch.cuda.get_device_name(device)), None)


def shapes(make: Callable[[], nn.Module]) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in make().parameters()]


def size(*lists: list[Tensor]) -> int:
    """Return bytes."""
    return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)


def updates(device: str, of: list[tuple[int, ...]]) -> Iterator[Work]:
    """Yield the norms, the counts of exponents and the updates of parameters of shapes `of`.

    Adam in every form of note [forms] in `kernels.ops`, the other optimizers in one.
    """

    def like(dtype: torch.dtype) -> list[Tensor]:
        return [(1e-2 * torch.rand(shape, device=device)).to(dtype) for shape in of]

    gradients, low, wide = like(BF16), like(BF16), like(FP32)
    rest, lost, none = [torch.zeros_like(t, dtype=INT16) for t in low], like(BF16), list[Tensor]()
    counts = exponents.rows(len(of), device)
    yield Work("norms", lambda: ops.norms(gradients), size(gradients))
    yield Work("exponents", lambda: ops.exponents_(counts, gradients), size(gradients))
    factor, bad = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    draws = torch.tensor([1, 2], device=device)
    forms = {
        "plain": (wide, none),
        "copy": (wide, low),
        "split": (low, rest),
        "kahan": (low, lost),
        "stochastic": (low, none),
    }
    for spec in SPECS:
        for form in forms if spec.name == "adam" else ("split",):
            value, beside = forms[form]
            states = [like(BF16 if form == "stochastic" else FP32) for _ in spec.states]
            counters = [[torch.full((), first, device=device) for _ in of] for first in spec.counters.values()]
            given = (gradients, factor, bad, draws, 0, form, None, 1e-4)
            options = [NUMBERS[name] for name in spec.options]
            call = partial(ops.UPDATES[spec.name], value, beside, *states, *counters, *given, *options)
            written = 1 if form == "copy" else 2  # a copy is not read
            yield Work(
                f"{spec.name}, {form}", call, size(gradients) + 2 * size(value, *states) + written * size(beside)
            )


def losses(device: str, rows: int, *classes: int) -> Iterator[Work]:
    """Yield the forward and the backward pass of cross entropy for numbers of classes."""
    for count in classes:
        logits = torch.randn(rows, count, device=device, dtype=BF16)
        target = torch.randint(0, count, (rows,), device=device)
        given = shares(torch.ones(rows, device=device), target, None, -100, 0.0, count)
        sums, out = row_sums(logits, target, None), torch.empty_like(logits)
        yield Work(f"losses, {count}", partial(row_sums, logits, target, None), size([logits]))
        yield Work(f"slope, {count}", partial(gradient_into, out, logits, given, sums.lse), 2 * size([logits]))


def replayed(call: Callable[[], object], device: str) -> Callable[[], float]:
    """Capture `call` in a graph, `CALLS` times; return what replays it and returns the device's seconds for one."""
    recorder = RECORDERS[torch.device(device).type](torch.device(device))
    for _ in range(2):
        recorder.warm(call)

    def several() -> None:
        for _ in range(CALLS):
            call()

    replay, _ = recorder.capture(several, ())

    def timed() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / CALLS

    return timed


def seconds(call: Callable[[], object], device: str, *, rounds: int = ROUNDS) -> float:
    """Return the device's median time for `call`."""
    timed = replayed(call, device)
    return statistics.median([timed() for _ in range(WARM + rounds)][WARM:])


def measured(work: Work, device: str, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return microseconds and GB/s of `work`, and its shares of a copy's speed and of the card's rated one.

    A copy of as many bytes is timed in turns with it.
    """
    assert not (lack := load_kernels(device)), lack
    source = torch.empty(work.bytes // 2, dtype=torch.uint8, device=device)
    own = replayed(work.call, device)
    copy = replayed(partial(torch.empty_like(source).copy_, source), device)
    pairs = [(own(), copy()) for _ in range(WARM + rounds)][WARM:]
    taken = statistics.median(mine for mine, _ in pairs)
    return {
        "us": round(1e6 * taken, 2),
        "GB/s": round(work.bytes / taken / 1e9, 1),
        "of_copy": round(statistics.median(other / mine for mine, other in pairs), 3),
        "of_rated": of_rated(work.bytes, taken, device),
    }


def of_rated(amount: int, taken: float, device: str, *, roof: int = 0) -> float | None:
    """Return the share of the rated bytes a second, of operations with roof=1; None for a card that `RATED` lacks."""
    roofs = rated(device)
    return None if roofs is None else round(amount / taken / roofs[roof], 3)
