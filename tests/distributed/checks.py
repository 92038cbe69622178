"""What is checked of every strategy, each a function to be run in a process group: parity, equal ranks, collectives.

`parity` compares with one process on the same global batch, `overflows` trains with random overflow on random ranks,
`added` counts what a step sends beside the loop of torch alone. They return plain data; `tests/distributed` asserts on
it and `benchmarks/scale.py` writes it down.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import halfstep as hs
from tests.distributed.counted import Collectives
from tests.distributed.strategies import STRATEGIES, Batch, alone, batches, build, plain, whole

__all__ = ["added", "deviation", "overflows", "parity", "reference"]

Weights = dict[str, Tensor]


def deviation(found: Weights, wanted: Weights, start: Weights) -> float:
    """Return the distance of two sets of weights over the distance that training has moved them, 0.0 if bit-equal."""
    if all(torch.equal(found[name], wanted[name]) for name in wanted):
        return 0.0
    apart, moved = (
        float(sum((one[name].double() - other[name].double()).square().sum() for name in wanted)) ** 0.5
        for one, other in ((found, wanted), (wanted, start))
    )
    return float(apart / moved)


def parts_of(name: str, number: int, ranks: int) -> list[Batch]:
    """Return global batch `number` as the micro-batches of one process, in the order in which ranks have them."""
    strategy = STRATEGIES[name]
    count = strategy.part(0, ranks)[1]
    split = [list(batches(number, 0, strategy.accumulate, (i, count))) for i in range(count)]
    return [micro_batch for together in zip(*split, strict=True) for micro_batch in together]


# ------------------------------------------------------------------ parity


def parity(rank: int, name: str, policy: str, updates: int) -> dict[str, Any]:
    """Train by halfstep and by torch alone; return both weights, an error's text for what raised."""
    strategy, ranks = STRATEGIES[name], dist.get_world_size()
    part = strategy.part(rank, ranks)
    step = build(name, policy, blackbox=False)
    losses = [
        float(step(*batch).loss) for number in range(updates) for batch in batches(number, 0, strategy.accumulate, part)
    ]
    found: dict[str, Any] = {"weights": whole(step.model), "losses": losses}
    try:
        loop = plain(name, policy)
        for number in range(updates):
            loop(list(batches(number, 0, strategy.accumulate, part)))
        found["torch"] = whole(loop.model)
    except (RuntimeError, TypeError) as error:  # torch's own limits, the same on all ranks
        found["torch"] = f"{type(error).__name__}: {error}"
    return found


def reference(name: str, policy: str, ranks: int, updates: int) -> dict[str, Weights]:
    """Return what one process makes of the same global batches: by halfstep, by torch, and the weights before."""
    count = STRATEGIES[name].part(0, ranks)[1]
    step, loop = alone(name, policy, count, blackbox=False), plain(name, policy, parts=count)
    start = whole(loop.model)
    for number in range(updates):
        together = parts_of(name, number, ranks)
        for batch in together:
            step(*batch)
        loop(together)
    return {"weights": whole(step.model), "torch": whole(loop.model), "start": start}


# ------------------------------------------------------------------ random overflow


def overflows(rank: int, name: str, policy: str, updates: int, share: float = 0.1) -> dict[str, Any]:
    """Train with losses that are not finite in random micro-batches of random ranks.

    Args:
        rank: this one.
        name: of the strategy.
        policy: as `strategies.policy` takes it.
        updates: how many.
        share: of the updates in which at least one rank overflows.

    Returns:
        "expected": which updates have an overflow on some rank; "skipped" and "scales": what this rank did;
        "weights": whether this rank's are those of rank 0, bit for bit; "finite": whether they are finite.
    """
    strategy, ranks = STRATEGIES[name], dist.get_world_size()
    part = strategy.part(rank, ranks)
    # a scale that moves often, and so shows whether it moves on all ranks
    scaler = hs.GradScaler("cpu", init_scale=2.0**10, growth_interval=8) if ":fp16" in policy else None
    step = build(name, policy, blackbox=False, scaler=scaler)
    chance = random.Random(0)  # the same on all ranks
    expected, skipped, scales = [], [], []
    for number in range(updates):
        bad = chance.random() < share
        faulty = {(chance.randrange(ranks), chance.randrange(strategy.accumulate)) for _ in range(chance.randint(1, 2))}
        for i, (index, target, factor) in enumerate(batches(number, 0, strategy.accumulate, part)):
            result = step(index, target, factor * (float("inf") if bad and (rank, i) in faulty else 1.0))
        expected.append(bad)
        skipped.append(bool(result.skipped))
        scales.append(float(result.scale))
    flat = torch.cat([value.float().flatten() for value in whole(step.model).values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    return {
        "expected": expected,
        "skipped": skipped,
        "scales": scales,
        "weights": torch.equal(first, flat),
        "finite": bool(flat.isfinite().all()),
    }


# ------------------------------------------------------------------ collectives

SETTLED = 4  # updates before the counted ones: DDP rebuilds its buckets
Seen = list[tuple[str, int]]


def added(rank: int, name: str, policy: str) -> dict[str, Seen | str]:
    """Return the collectives of an update: (operator, bytes that this rank puts in).

    Returns:
        "good" and "bad": of halfstep's step, applied and not; "torch" and "torch bad": of the loop of torch alone, or
        the error it raises; "passes": of torch's forward and backward passes alone.
    """
    strategy = STRATEGIES[name]
    part = strategy.part(rank, dist.get_world_size())

    def updates(run: Callable[[list[Batch]], object]) -> tuple[Seen, Seen]:
        seen = []
        for number in range(SETTLED + 2):
            factor = float("inf") if number == SETTLED + 1 else 1.0
            with Collectives() as collectives:
                run(list(batches(number, 0, strategy.accumulate, part, factor)))
            seen.append(collectives.seen)
        return seen[-2], seen[-1]

    step = build(name, policy, blackbox=False)
    good, bad = updates(lambda micro_batches: [step(*batch) for batch in micro_batches])
    found: dict[str, Seen | str] = {"good": good, "bad": bad, "passes": updates(plain(name, policy).passes)[0]}
    try:
        found["torch"], found["torch bad"] = updates(plain(name, policy))
    except (RuntimeError, TypeError) as error:
        found["torch"] = found["torch bad"] = f"{type(error).__name__}: {error}"
    return found
