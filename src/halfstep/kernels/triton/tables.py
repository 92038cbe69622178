"""What multi-tensor kernels read before they read anything else: where the tensors of a list are, and who does what.

A kernel is launched once for whole lists of tensors. It gets two tables: one says which tensor, and which part of it, a
program works on, and depends on sizes alone; the other holds the addresses, which may be others in every step, as
gradients come and go, but seldom are. Both are made on the host, copied without a wait (from pinned memory, which
torch's allocator takes back when the copy is done), and remembered.

Note [capture]: a CUDA graph replays its copies and kernels with the addresses they had. A table made during a capture
is therefore copied by the graph itself, from pinned memory that is kept for good: a few KB a capture. Such memory
cannot be had from the driver during a capture, so a reserve is held from the first step on. Like every kernel the
operators must have run once before, with as many tensors of the same formats. A table copied before the capture is
used as it is, for a capture begins with a synchronisation (torch.cuda.graph sees to it); what a graph uses is never
forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Launch", "Plan", "plan"]

ALIGNMENT = 16
"""Bytes of the widest load a thread makes; tensors of a block or more that begin elsewhere get their own launch."""

REMEMBERED = 1 << 20
"""Words of tables kept for later steps: 8 MiB on the device. Gradients with new addresses in every step fill it."""

RESERVE = 1 << 16
"""Words of pinned memory (512 KiB) held for captures, or eight times the largest table so far, if that is more."""

SMALL = 1 << 22
"""Up to so many elements a program works on one block, to fill the device; beyond, on `LOOPS`."""

LOOPS = 8

# ------------------------------------------------------------------ from host to device


class Copied:
    """A table on a device.

    Args:
        values: on the host.
        device: where it is wanted; if that is CUDA, nothing waits.
    """

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.words = values.numel()
        self.stream: torch.cuda.Stream | None = None
        if device.type != "cuda":
            self.tensor = values.to(device)
            return
        if torch.cuda.is_current_stream_capturing():
            host = _reserve().take(self.words)
            host.copy_(values.flatten())
            self.tensor = host.to(device, non_blocking=True).view(values.shape)
            _kept().extend((host, self.tensor))
            return
        _reserve().hold(self.words)
        self.tensor = values.pin_memory().to(device, non_blocking=True)
        self.stream = torch.cuda.current_stream(device)
        self.copied = torch.cuda.Event()
        self.copied.record(self.stream)

    def here(self) -> Tensor:
        """Return the table, for kernels on the current stream."""
        if self.stream is None:
            return self.tensor
        if torch.cuda.is_current_stream_capturing():
            _kept().append(self.tensor)
        elif (stream := torch.cuda.current_stream(self.tensor.device)) != self.stream:
            stream.wait_event(self.copied)
            self.tensor.record_stream(stream)
        return self.tensor


class Reserve:
    """Pinned words for tables that are made while a CUDA graph is captured; they are never given back."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.int64)

    def hold(self, words: int) -> None:
        """See to it that some tables of `words` words can be made during a capture."""
        if self.free.numel() < max(RESERVE // 2, 8 * words):
            self.free = torch.empty(max(RESERVE, 16 * words), dtype=torch.int64, pin_memory=True)

    def take(self, words: int) -> Tensor:
        """Return `words` of them."""
        if self.free.numel() < words:
            raise RuntimeError(
                f"a table of {words} words is needed while a CUDA graph is captured, and {self.free.numel()} words of "
                "pinned memory are left; make a step with the same tensors before the capture"
            )
        taken, self.free = self.free[:words], self.free[words:]
        return taken


@cache
def _reserve() -> Reserve:
    return Reserve()


@cache
def _kept() -> list[Tensor]:
    """Return the tables that CUDA graphs use; they stay, since nobody says when a graph goes."""
    return []


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ------------------------------------------------------------------ who does what


class Layout(NamedTuple):
    """Which program works on what, for tensors of given sizes.

    Attributes:
        chunks: (programs, 2) int64: which tensor, and which chunk of it.
        ends: (tensors + 1,) int64: number of programs of the tensors before each.
        counts: the same, on the host.
        chunk: elements of a chunk.
    """

    chunks: Copied
    ends: Copied
    counts: list[int]
    chunk: int


class Launch(NamedTuple):
    """Programs for tensors of the same formats.

    Attributes:
        dtypes: of each list; None for one that is empty.
        aligned: whether all tensors of a block or more begin at a multiple of `ALIGNMENT` bytes.
        first: the first program, counted over all launches.
        programs: how many.
    """

    dtypes: tuple[torch.dtype | None, ...]
    aligned: bool
    first: int
    programs: int


class Plan(NamedTuple):
    """How kernels walk over lists of tensors. Tensors are columns, in the order of their launches.

    Attributes:
        rows: (lists + 2, tensors) int64: addresses, 0 for an empty list; numbers of elements; what tensors are called.
        chunks: see `Layout`.
        ends: see `Layout`.
        chunk: elements of a chunk.
        programs: of all launches together.
        launches: those that have programs.
    """

    rows: Tensor
    chunks: Tensor
    ends: Tensor
    chunk: int
    programs: int
    launches: list[Launch]


class _Known(NamedTuple):
    rows: Copied
    layout: Layout
    launches: list[Launch]


class Memory:
    """The plans made last, and the layouts they share."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Hashable, _Known] = OrderedDict()
        self.layouts: OrderedDict[Hashable, Layout] = OrderedDict()

    def forget(self) -> None:
        """Drop what was used longest ago, down to `REMEMBERED` words."""
        words = sum(known.rows.words for known in self.plans.values())
        while words > REMEMBERED and len(self.plans) > 1:
            words -= self.plans.popitem(last=False)[1].rows.words
        words = sum(layout.chunks.words for layout in self.layouts.values())
        while words > REMEMBERED and len(self.layouts) > 1:
            words -= self.layouts.popitem(last=False)[1].chunks.words


@cache
def _memory() -> Memory:
    return Memory()


def plan(lists: Sequence[Sequence[Tensor]], block: int, start: int = 0) -> Plan:
    """Return how kernels walk over `lists`, the same plan as before if nothing has moved.

    Args:
        lists: tensors of one device; each list is as long as the first or empty. The last gives the sizes.
        block: elements a program works on at a time.
        start: what the first tensor is called; the others count on.
    """
    sizes = tuple(t.numel() for t in lists[-1])
    places = tuple([t.data_ptr() for tensors in lists for t in tensors])
    formats = tuple([t.dtype for tensors in lists for t in tensors])
    device = lists[0][0].device
    key = (device, places, formats, sizes, tuple(map(len, lists)), block, start)
    plans = _memory().plans
    known = plans.get(key)
    if known is None:
        known = _plan(lists, sizes, device, block, start)
        if not _capturing(device):  # else only the graph's replays copy it
            plans[key] = known
            _memory().forget()
    else:
        plans.move_to_end(key)
    layout = known.layout
    return Plan(
        known.rows.here(), layout.chunks.here(), layout.ends.here(), layout.chunk, layout.counts[-1], known.launches
    )


def _plan(
    lists: Sequence[Sequence[Tensor]], sizes: tuple[int, ...], device: torch.device, block: int, start: int
) -> _Known:
    kinds: dict[tuple[tuple[torch.dtype | None, ...], bool], list[int]] = {}
    for position in range(len(sizes)):
        here = [tensors[position] if tensors else None for tensors in lists]
        aligned = sizes[position] < block or not any(t is not None and t.data_ptr() % ALIGNMENT for t in here)
        kinds.setdefault((tuple(None if t is None else t.dtype for t in here), aligned), []).append(position)
    order = list(chain.from_iterable(kinds.values()))
    layout = _layout(tuple(sizes[i] for i in order), block, device)
    launches, before = [], 0
    for (dtypes, aligned), positions in kinds.items():
        first, last = layout.counts[before], layout.counts[before + len(positions)]
        if last > first:
            launches.append(Launch(dtypes, aligned, first, last - first))
        before += len(positions)
    rows = [[tensors[i].data_ptr() for i in order] if tensors else [0] * len(order) for tensors in lists]
    rows += [[sizes[i] for i in order], [start + i for i in order]]
    return _Known(Copied(torch.tensor(rows, dtype=torch.int64), device), layout, launches)


def _layout(sizes: tuple[int, ...], block: int, device: torch.device) -> Layout:
    layouts = _memory().layouts
    known = layouts.get((sizes, block, device))
    if known is not None:
        layouts.move_to_end((sizes, block, device))
        return known
    chunk = block if sum(sizes) <= SMALL else LOOPS * block
    counts = torch.tensor([-(-size // chunk) for size in sizes])
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    tensors = torch.arange(len(sizes)).repeat_interleave(counts)
    parts = torch.arange(len(tensors)) - ends[tensors]
    made = Layout(Copied(torch.stack((tensors, parts), 1), device), Copied(ends, device), ends.tolist(), chunk)
    if not _capturing(device):
        layouts[sizes, block, device] = made
    return made
