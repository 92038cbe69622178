"""Train in a gloo group and count the memory that this rank has in use: what plans for several devices are held to."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.tasks.gpt import GPT
from tests.distributed.counted import Collectives

VOCABULARY, LENGTH, ROWS = 509, 64, 8  # of a device; a prime vocabulary makes ranks pad
STEPS = 3


def model() -> GPT:
    """Return a GPT of 13 million parameters, beside which the objects of Python weigh little."""
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, width=512, layers=4, heads=4, length=LENGTH)


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


class Malloc(ctypes.Structure):
    """What glibc's mallinfo2 returns: bytes, of which those in blocks of their own and those in use are read."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def in_use() -> int:
    """Return the bytes that malloc has handed out to all threads: gloo frees in threads of its own."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Malloc
    found = ask()
    return int(found.hblkhd + found.uordblks)


class Highest(TorchDispatchMode):
    """A context that looks at the memory in use after every operator.

    Attributes:
        bytes: the most.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, in_use())
        return result


def counted(rank: int, way: str, name: str) -> dict[str, Any]:
    """Return bytes between steps, at the highest point of a step after the first, and the collectives of a step."""
    warnings.filterwarnings("ignore", category=UserWarning)
    trained(way, name, STEPS)  # kernels compile and caches fill, whose memory is not a step's
    gc.collect()
    before = in_use()
    step, data = trained(way, name, STEPS)
    gc.collect()
    persistent = in_use() - before
    with Highest() as highest:
        step(*data)
    with Collectives() as found:
        step(*data)
    return {"persistent": persistent, "peak": highest.bytes - before, "seen": found.seen}


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
        step(*data)
    dist.barrier()
    return step, data
