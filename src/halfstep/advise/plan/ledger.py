"""Ledger: every block of memory that a traced step allocates and frees, and what several devices add and send.

A block's end is noticed when its storage dies. From the list of events the sums of each part are computed at any point
of the step, once it is known what each block was for.

Note [ddp]: DistributedDataParallel's reducer is C++ and needs numbers, so it is not traced: its buckets are allocated
beside the gradients, as many bytes as these have, and its messages are computed. `fully_shard` is Python, and is traced
itself, over torch's group "fake", which sends nothing: a collective returns at once, and its output keeps what it had.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from halfstep.formats import DTYPES
from halfstep.policy import Policy
from halfstep.schema import packaged_toml
from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.operators import schema_of
from halfstep.trees import tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORDS = packaged_toml("advise/plan/words.toml")

PARTS = tuple(WORDS["parts"])
"""What memory is for; the file says what each part is."""

PHASES = ("forward", "backward", "update")


class PlanError(hs.HalfstepError, RuntimeError):
    """A step that cannot be planned: it needs values, which a plan has none of, or its arguments do not fit."""


@dataclass(slots=True)
class Block:
    """One block of memory."""

    bytes: int  # as the device's allocator hands it out
    dtype: torch.dtype  # of the first tensor in it
    module: str  # dotted name of the module whose operator made it
    operator: str
    phase: str  # when it was made: "setup", or one of `PHASES`
    part: str = ""  # one of `PARTS`; "" until known
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a phase of a step."""

    event: int  # how many events came before
    operators: int  # how many operators came before
    step: int  # its number, from 0; -1 before the first
    phase: str  # "setup", or one of `PHASES`


class Ledger:
    """Blocks and events; `granule` is the bytes to whose multiples the allocator rounds."""

    def __init__(self, granule: int = 1) -> None:
        self.blocks: list[Block] = []  # in the order of their allocation
        self.events: list[int] = []  # n: block n was allocated; ~n: it was freed
        self.times: list[int] = []  # number of operators run before each event
        self.marks: list[Mark] = []  # where phases begin
        self.operators = 0  # number of operators run so far
        self.granule = granule
        self._living: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address of a storage -> its block, its end

    def mark(self, step: int, phase: str) -> None:
        """Begin a phase."""
        self.marks.append(Mark(len(self.events), self.operators, step, phase))

    def note(self, tensor: Tensor, module: str, operator: str, phase: str) -> Block | None:
        """Note a tensor; return its block if it is new."""
        storage = tensor.untyped_storage()
        key, number = storage_key(storage), len(self.blocks)
        if key in self._living:
            return None
        self._living[key] = number, weakref.ref(storage, lambda _: self._died(key, number))
        self.blocks.append(Block(self._rounded(storage.nbytes()), tensor.dtype, module, operator, phase))
        self._event(number)
        return self.blocks[-1]

    def passing(self, bytes: int, dtype: torch.dtype, module: str, operator: str, phase: str) -> None:
        """Note memory that an operator's kernel takes and gives back while it runs."""
        number = len(self.blocks)
        self.blocks.append(Block(self._rounded(bytes), dtype, module, operator, phase, "temporaries", alive=False))
        self._event(number)
        self._event(~number)

    def of(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor; None for one that is not in memory that was noted."""
        found = self._living.get(storage_key(tensor.untyped_storage()))
        return None if found is None else self.blocks[found[0]]

    def resized(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor may have another size now: as a new block instead of the old one."""
        storage = tensor.untyped_storage()
        key, old = storage_key(storage), self.of(tensor)
        if old is None or old.bytes == self._rounded(storage.nbytes()):
            return
        self._died(key, self._living[key][0])
        self.note(tensor, old.module, old.operator, old.phase)

    def live(self) -> Iterator[Block]:
        """Yield the blocks that are alive."""
        return (self.blocks[number] for number, _ in self._living.values())

    def _rounded(self, bytes: int) -> int:
        return -(-bytes // self.granule) * self.granule

    def _event(self, number: int) -> None:
        self.events.append(number)
        self.times.append(self.operators)

    def _died(self, key: int, number: int) -> None:
        if self._living.get(key, (-1,))[0] == number:
            del self._living[key]
            self.blocks[number].alive = False
            self._event(~number)


NAMES: Mapping[str, str] = {  # operator of torch.distributed -> the collective it is
    **dict.fromkeys(("_allgather_base_", "allgather_", "all_gather_into_tensor"), "all-gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), "reduce-scatter"),
    **dict.fromkeys(("allreduce_", "all_reduce"), "all-reduce"),
    "broadcast_": "broadcast",
}

SPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})

FIRST, CAP = 2**20, 25 * 2**20  # bytes of DistributedDataParallel's first bucket and of the others: torch's defaults

DDP = "(DistributedDataParallel)"  # in the place of a module's name


@contextmanager
def fake_ranks(devices: int, device_type: str, replicas: int = 1) -> Iterator[DeviceMesh]:
    """Pass for rank 0 of `devices` in this process, and give the mesh of all; rank 0 has the largest parts.

    With `replicas` it has two dimensions, the outer one of that size.
    """
    if not dist.is_available():
        raise PlanError("this torch was built without torch.distributed; plan for one device")
    if dist.is_initialized():
        raise PlanError(
            "a plan of a sharded model needs a process group of its own, and this process has one; call hs.plan "
            "before torch.distributed.init_process_group, or in another process"
        )
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise PlanError(f"this torch cannot pass for several ranks ({error}); plan for one device") from error
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        shape = (devices,) if replicas == 1 else (replicas, devices // replicas)
        yield init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Collectives of one kind in a step.

    What a device sends follows from a ring, what NCCL does for large messages: each of n devices passes on n - 1 parts
    of the result ("bus bandwidth" in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """

    collective: str  # "all-gather", "reduce-scatter", "all-reduce" or "broadcast"
    number: int  # how many
    put_in: int  # bytes that a device gives to them
    ring: int  # bytes that a device sends, if they run in a ring


def sent(seen: Iterable[tuple[str, int]], devices: int, replicas: int = 1) -> tuple[Sent, ...]:
    """Return the collectives of a step by kind; `seen`: (operator or collective, bytes that a device puts in).

    With `replicas`, gradients are summed over these, and everything else over the devices of one.
    """
    kinds: dict[str, list[int]] = {}
    for operator, size in seen:
        kinds.setdefault(NAMES.get(operator, operator), []).append(size)
    return tuple(
        Sent(collective=kind, number=len(sizes), put_in=sum(sizes), ring=sum(_ring(kind, s, group) for s in sizes))
        for kind, sizes in kinds.items()
        for group in [replicas if replicas > 1 and kind == "all-reduce" else devices // replicas]
    )


def _ring(kind: str, size: int, devices: int) -> int:
    if kind == "all-gather":  # of which it puts in its part
        return (devices - 1) * size
    rounds = {"all-reduce": 2, "reduce-scatter": 1}.get(kind)  # an all-gather follows the reduce-scatter in the first
    return size if rounds is None else math.ceil(rounds * (devices - 1) * size / devices)


def collective(func: Any, args: tuple[Any, ...]) -> tuple[str, int] | None:
    """Return (name, bytes that this rank puts in) of an operator that is a collective; None of any other."""
    name = schema_of(func).name.partition("::")[2]
    if func.namespace not in SPACES or name not in NAMES:
        return None
    names = [argument.name for argument in schema_of(func).arguments]
    place = next((n for n, argument in enumerate(names[: len(args)]) if argument.startswith("input")), 0)
    return name, sum(tensor.nbytes for tensor in tensors(args[place]))


class Ddp:
    """What DDP with torch's defaults keeps and sends for a prepared model under a resolved policy.

    Under ``reduce="low"`` a bucket is sent as a low copy. What DDP does not average, ``reduce="fp32"`` and
    ``grads="fp32"`` of low parameters, `hs.TrainStep` averages after the backward pass: gradients in the format of the
    sum, their copy in one piece, and fp32 gradients in the place of low ones.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        low, lowered = DTYPES.get(policy.dtype, torch.float32), policy.params == "low"
        sends_low = policy.reduce == "low"
        wide = low if sends_low else torch.float32
        own = lowered and (policy.grads == "fp32" or policy.reduce == "fp32")
        self.stored: Counter[torch.dtype] = Counter()  # format -> bytes of its buckets, which stay, as gradients have
        for parameter in trained:
            self.stored[parameter.dtype] += parameter.nbytes
        self.seen: list[tuple[str, int]] = []  # (collective, bytes that a device puts in), in order
        if own:
            buckets = _buckets([_bytes(p, wide) for p in trained], CAP)
            self.seen.append(("all-reduce", 4 * len(trained)))  # which gradients there are, as int32
            grown = sum(_bytes(p, wide) for p in trained) - self.stored.total()
            self.sending = max(0, grown) + 2 * max(buckets, default=0)
        else:
            backwards = trained[::-1]  # gradients arrive from the last layer on
            buckets = [  # of one stored format each, whatever is sent
                size // kind.itemsize * (wide if sends_low else kind).itemsize
                for kind in self.stored
                for size in _buckets([_bytes(p, kind) for p in backwards if p.dtype is kind], FIRST, CAP)
            ]
            self.sending = max(buckets, default=0) if sends_low and any(p.dtype is not low for p in trained) else 0
        self.format = wide  # of the `sending` bytes made to send gradients when the last bucket is sent
        self.seen += [("all-reduce", size) for size in buckets]
        if buffers := sum(b.nbytes for b in model.buffers()):
            self.seen.append(("broadcast", buffers))

    def allocate(self, ledger: Ledger, device: str) -> None:
        """Make the buckets, which live as long as this object."""
        self._buckets = [torch.empty(n // kind.itemsize, dtype=kind, device=device) for kind, n in self.stored.items()]
        for bucket in self._buckets:
            block = ledger.of(bucket)
            assert block is not None  # the tracer has noted it
            block.part, block.module = "communication", DDP

    def average(self, ledger: Ledger) -> None:
        """Note what is made between backward pass and update to send gradients in another format."""
        if self.sending:
            ledger.passing(self.sending, self.format, DDP, "average", "update")


def _bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * dtype.itemsize


def _buckets(sizes: Sequence[int], *caps: int) -> list[int]:
    """Return the bytes of buckets that are sent when a gradient reaches the cap: the first one, then the last."""
    found: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= caps[min(len(found), len(caps) - 1)]:
            found.append(filled)
            filled = 0
    return [*found, filled] if filled else found
