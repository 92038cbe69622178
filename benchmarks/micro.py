"""What is too small to be a case: entering a region, three ways to a low layer_norm, torch.amp from many starts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import halfstep as hs
from benchmarks.cases import LENET, SMALL_RESNET, Case, gpt_case
from benchmarks.curves import STEPS, deviation
from benchmarks.loops import Run, amp, fp32
from benchmarks.turns import Step, Track, in_turns, ratio

BF16 = torch.bfloat16
BLOCK = 1000  # entries timed together, so that a millisecond of the block is a microsecond of an entry
DONE = torch.zeros(())


def paired(calls: Mapping[str, Callable[[], Any]], baseline: str, rounds: int) -> dict[str, Any]:
    """Run calls in turns; medians and ratios to `baseline`, with the baseline a second time as A/A."""

    def step(call: Callable[[], Any]) -> Step:
        def run(batch: tuple[Tensor, ...]) -> Tensor:
            call()
            return DONE

        return run

    steps = {name: step(call) for name, call in {**calls, "A/A": calls[baseline]}.items()}
    tracks = {name: Track() for name in steps}
    in_turns(steps, lambda number: (), {name: Track() for name in steps}, "cpu", rounds=range(3), rare={})
    in_turns(steps, lambda number: (), tracks, "cpu", rounds=range(rounds), rare={})
    rows = {
        name: {"ms": 1e3 * statistics.median(t.seconds.values()), **asdict(ratio(t, tracks[baseline]))}
        for name, t in tracks.items()
    }
    return {"baseline": baseline, "rounds": rounds, "rows": rows}


def region_entry(rounds: int) -> dict[str, Any]:
    """Time to make, enter and leave a region."""

    def theirs() -> None:
        with torch.autocast("cpu", dtype=BF16):
            pass

    def ours() -> None:
        with hs.autocast("cpu", dtype=BF16):
            pass

    def ruled() -> None:
        with hs.autocast(policy="mixed"):
            pass

    def block(call: Callable[[], None]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(BLOCK):
                call()

        return many

    calls = {"torch.autocast": theirs, "hs.autocast": ours, "hs.autocast(policy='mixed')": ruled}
    return paired({name: block(call) for name, call in calls.items()}, "torch.autocast", rounds)


def norms(rounds: int) -> dict[str, Any]:
    """Three ways to a low layer_norm of an fp32 stream, 2048 x 256, forward and backward."""
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((2048, 256), (256,), (256,)))
    ones = torch.ones(2048, 256, dtype=BF16)

    def backward(out: Tensor) -> None:
        out.backward(ones)
        x.grad = w.grad = b.grad = None

    calls: dict[str, Callable[[], Any]] = {
        "fp32 norm, cast after it": lambda: backward(F.layer_norm(x, (256,), w, b).to(BF16)),
        "all arguments low": lambda: backward(F.layer_norm(x.to(BF16), (256,), w.to(BF16), b.to(BF16))),
        "low input, fp32 weights": lambda: backward(F.layer_norm(x.to(BF16), (256,), w, b)),
    }
    return paired(calls, "fp32 norm, cast after it", rounds)


SPREAD_CASES = (LENET, SMALL_RESNET, gpt_case("gpt_small", "GPT, d = 128", 128, 4, 64))


def spread(starts: int, steps: int = STEPS) -> dict[str, Any]:
    """Return torch.amp's deviation from fp32 from several starts, by case: what `curves.FACTOR` comes from."""

    def losses(case: Case, make: Callable[[Case, torch.nn.Module], Run], seed: int) -> list[float]:
        torch.manual_seed(seed)
        run = make(case, case.model())
        return [float(run.step(case.batch(number))) for number in range(steps)]

    return {
        case.title: [deviation(losses(case, amp, seed), losses(case, fp32, seed)) for seed in range(starts)]
        for case in SPREAD_CASES
    }
