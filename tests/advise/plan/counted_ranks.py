"""Train in a gloo group and count every allocation of this rank: what a plan for several devices is compared with."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.tasks.gpt import GPT
from tests.distributed.counted import Collectives

VOCABULARY, LENGTH, ROWS = 509, 64, 8  # of a device; a prime vocabulary makes ranks pad
MARK = 7_654_321  # bytes of a block that marks a place in the list of allocations
STEPS = 3


def model() -> GPT:
    """Return a GPT of 3.4 million parameters."""
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, width=256, layers=4, heads=4, length=LENGTH)


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and their targets."""
    return torch.zeros(ROWS, LENGTH, dtype=torch.int64), torch.ones(ROWS, LENGTH, dtype=torch.int64)


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(tokens).flatten(0, 1).clone(), targets.flatten())  # fully_shard warns of views


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def policy(name: str) -> hs.Policy:
    """Return the policy of a name such as ``pure:reduce=fp32``, in bf16."""
    preset, _, more = name.partition(":")
    fields = dict(pair.split("=") for pair in more.split(",") if pair)
    return hs.Policy.of(preset, dtype="bf16", **cast(Any, fields))


def counted(rank: int, way: str, name: str) -> dict[str, Any]:
    """Return bytes before each step, at the highest point of each, at the end, and the collectives of another step."""
    warnings.filterwarnings("ignore", category=UserWarning)
    trained(way, name, STEPS)  # kernels compile and caches fill, whose memory is not a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = trained(way, name, STEPS)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    begins: list[int] = []  # bytes before each step
    tops: list[int] = []
    total = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        total += event.nbytes()
        if event.nbytes() == MARK:
            begins.append(total - MARK)
            tops.append(0)
        elif tops:
            tops[-1] = max(tops[-1], total)
    step, data = kept
    with Collectives() as found:
        step(*data)
    return {"begins": begins, "tops": tops, "end": total, "seen": found.seen}


def steady(found: dict[str, Any]) -> tuple[int, int]:
    """Return bytes between steps and at the highest point of a step, of what `counted` returns.

    Frees in gloo's threads are not counted, so that counts rise by what these free in a step: the same in each as a
    rule. Of the steps after the first, the one with the fewest bytes left of the one before is taken.
    """
    begins, tops = found["begins"], found["tops"]
    lost = begins[-1] - begins[-2]  # in a step
    return begins[1] - lost, min(top - begin for begin, top in zip(begins[1:], tops[1:], strict=True)) + begins[
        1
    ] - lost


def trained(way: str, name: str, steps: int) -> tuple[hs.TrainStep, tuple[Tensor, Tensor]]:
    """Train `steps` steps; return the step and its batch."""
    data = batch()
    net: nn.Module = model()
    wanted = policy(name)
    if way == "fsdp2":
        hs.shard(net, wanted)
        made = optimizer(net)
    else:
        made = optimizer(net)
        hs.prepare(net, made, policy=wanted)
        net = DistributedDataParallel(net)
    step = hs.TrainStep(net, made, loss_fn, policy=wanted, blackbox=False)
    for _ in range(steps):
        torch.empty(MARK, dtype=torch.uint8)
        step(*data)
    dist.barrier()
    return step, data
