"""Tables that multi-tensor kernels read first: where the tensors of a list are, and which program works on which part.

One table assigns a part of a tensor to each program, and depends on sizes alone; the other holds the addresses, which
can change in every step but seldom do. Both are made on the host, copied without a wait, and cached.

Note [capture]: a CUDA graph replays its copies and kernels with the addresses they had. A table made during a capture
is therefore copied by the graph itself, from pinned memory: a few KB a capture. Such memory cannot be allocated during
a capture, so a reserve is allocated at the first step. Like every kernel the operators must have run once before, with
as many tensors of the same formats. A table copied before the capture is used as it is, because a capture begins with
an idle device. What a graph uses is kept for good, or, in `tables_of`, until the first capture after the graph is gone:
before, a replay that reads it may be under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from halfstep.accelerators import capturing

FAITHFUL: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum stay two roundings, as they are in the reference."""

KINDS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int16: "int16",
    None: "none",
}

ALIGNMENT = 16
"""Bytes of the widest load a thread makes; tensors of a block or more that begin elsewhere get their own launch."""

REMEMBERED = 1 << 18
"""Words of addresses kept for later steps (2 MiB on the device); gradients that move in every step fill them."""

LAYOUTS = 64
"""Layouts kept; a step needs two or three for each group of its optimizers."""

RESERVE = 1 << 16
"""Words of pinned memory (512 KiB) reserved for captures, or eight times the largest table so far, if that is more."""

SMALL = 1 << 22
"""Up to so many elements a program works on one block, to fill the device; beyond, on `LOOPS`."""

LOOPS = 8


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current one. Nothing to do on CPU (the interpreter) or one GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class Copied:
    """A table on a device."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.words = values.numel()
        self.stream: torch.cuda.Stream | None = None
        if device.type != "cuda":
            self.tensor = values.to(device)
            return
        if torch.cuda.is_current_stream_capturing():
            captures = _captures()
            host = captures.take(self.words)
            host.copy_(values.flatten())
            self.tensor = host.to(device, non_blocking=True).view(values.shape)
            captures.now += (host, self.tensor)
            return
        _captures().hold(self.words)
        self.tensor = values.pin_memory().to(device, non_blocking=True)
        self.stream = torch.cuda.current_stream(device)
        self.copied = torch.cuda.Event()
        self.copied.record(self.stream)

    def here(self) -> Tensor:
        """Return the table, for kernels on the current stream."""
        if self.stream is None:
            return self.tensor
        if torch.cuda.is_current_stream_capturing():
            _captures().now.append(self.tensor)
        elif (stream := torch.cuda.current_stream(self.tensor.device)) != self.stream:
            stream.wait_event(self.copied)
            self.tensor.record_stream(stream)
        return self.tensor


class Captures:
    """What captures of CUDA graphs use: pinned words for tables made meanwhile, and the tables that graphs read.

    Tables of a capture outside of `tables_of` are kept for good.
    """

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.int64, device="cpu")
        self.now: list[Tensor] = []
        self.graphs: list[tuple[ref[object], list[Tensor]]] = []

    def hold(self, words: int) -> None:
        """Make sure that some tables of `words` words can be made during a capture."""
        if self.free.numel() < max(RESERVE // 2, 8 * words):
            self.free = torch.empty(max(RESERVE, 16 * words), dtype=torch.int64, device="cpu", pin_memory=True)

    def take(self, words: int) -> Tensor:
        """Return `words` of the pinned ones."""
        if self.free.numel() < words:
            raise RuntimeError(
                f"a table of {words} words is needed while a CUDA graph is captured, and {self.free.numel()} words of "
                "pinned memory are left; make a step with the same tensors before the capture"
            )
        taken, self.free = self.free[:words], self.free[words:]
        return taken


_captures = cache(Captures)


@contextmanager
def tables_of(graph: object, device: torch.device) -> Iterator[None]:
    """Keep the tables that a capture inside uses as long as `graph`; free those of graphs that are gone."""
    captures = _captures()
    captures.graphs = [(one, of) for one, of in captures.graphs if one() is not None or of[-1].device != device]
    before, captures.now = captures.now, []
    try:
        yield
    finally:
        if captures.now:
            captures.graphs.append((ref(graph), captures.now))
        captures.now = before


class Launch(NamedTuple):
    """Programs for tensors of the same formats."""

    dtypes: tuple[torch.dtype | None, ...]  # of each list; None for one that is empty
    aligned: bool  # whether all tensors of a block or more begin at a multiple of `ALIGNMENT` bytes
    first: int  # the first program, counted over all launches
    programs: int


class Layout(NamedTuple):
    """All that does not depend on where tensors are. They are columns of tables, in the order of their launches."""

    chunks: Copied  # (programs, 2) int64: which column, and which chunk of it, a program works on
    ends: Copied  # (tensors + 1,) int64: number of programs for the columns before each
    chunk: int  # elements of a chunk
    programs: int  # of all launches together
    launches: list[Launch]  # those that have programs
    order: Tensor  # (tensors,) int64, on the host: which tensor of a list is in each column
    facts: Tensor  # (2, tensors) int64, on the host: numbers of elements, and what tensors are called


class TableCache:
    """The tables used last."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Hashable, tuple[Copied, Layout]] = OrderedDict()
        self.layouts: OrderedDict[Hashable, Layout] = OrderedDict()
        self.words = 0

    def keep(self, key: Hashable, known: tuple[Copied, Layout]) -> None:
        """Remember a table; drop those used longest ago, down to `REMEMBERED` words and `LAYOUTS` layouts."""
        self.rows[key] = known
        self.words += known[0].words
        while self.words > REMEMBERED and len(self.rows) > 1:
            self.words -= self.rows.popitem(last=False)[1][0].words
        while len(self.layouts) > LAYOUTS:
            self.layouts.popitem(last=False)


_tables = cache(TableCache)


def plan_walk(lists: Sequence[Sequence[Tensor]], block: int, start: int = 0) -> tuple[Tensor, Layout]:
    """Return how kernels walk over `lists`, with the same tables as before if nothing has moved.

    The first is (lists + 2, tensors) int64: addresses, 0 for an empty list; numbers of elements; what tensors are
    called.
    """
    places = tuple([t.data_ptr() for tensors in lists for t in tensors])
    formats = tuple([t.dtype for tensors in lists for t in tensors])
    sizes = tuple([t.numel() for t in lists[-1]])
    device = lists[0][0].device
    key = (device, places, formats, sizes, tuple(map(len, lists)), block, start)
    memory = _tables()
    known = memory.rows.get(key)
    if known is None:
        known = _rows(lists, key)
        if not capturing(device.type):  # else only the graph's replays copy them
            memory.keep(key, known)
    else:
        memory.rows.move_to_end(key)
    rows, layout = known
    return rows.here(), layout


def _rows(lists: Sequence[Sequence[Tensor]], walk: tuple[Any, ...]) -> tuple[Copied, Layout]:
    device, places, _, sizes, _, block, start = walk
    formats: list[Sequence[torch.dtype | None]]  # of each list; None for the tensors that an empty one does not have
    formats = [[t.dtype for t in tensors] or [None] * len(sizes) for tensors in lists]
    addresses = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, len(sizes))
    odd = tuple((addresses % ALIGNMENT).any(0).tolist())
    key = (tuple(zip(*formats, strict=True)), sizes, odd, device, block, start)
    memory = _tables()
    layout = memory.layouts.get(key)
    if layout is None:
        layout = _layout(*key)
        if not capturing(device.type):
            memory.layouts[key] = layout
    else:
        memory.layouts.move_to_end(key)
    rows = torch.zeros(len(lists) + 2, len(sizes), dtype=torch.int64, device="cpu")
    rows[[n for n, some in enumerate(lists) if some]] = addresses[:, layout.order]
    rows[len(lists) :] = layout.facts
    return Copied(rows, device), layout


def _layout(
    formats: Sequence[tuple[torch.dtype | None, ...]],
    sizes: tuple[int, ...],
    odd: tuple[bool, ...],
    device: torch.device,
    block: int,
    start: int,
) -> Layout:
    """Sort tensors into launches and cut them into chunks."""
    kinds: dict[tuple[tuple[torch.dtype | None, ...], bool], list[int]] = {}
    for position, size in enumerate(sizes):
        aligned = size < block or not odd[position]
        kinds.setdefault((formats[position], aligned), []).append(position)
    order = torch.tensor(list(chain.from_iterable(kinds.values())), device="cpu")
    elements = torch.tensor(sizes, dtype=torch.int64, device="cpu")[order]
    chunk = block if sum(sizes) <= SMALL else LOOPS * block
    counts = (elements + chunk - 1) // chunk
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    columns = torch.arange(len(sizes), device="cpu").repeat_interleave(counts)
    parts = torch.arange(len(columns), device="cpu") - ends[columns]
    launches, before = [], 0
    for (dtypes, aligned), positions in kinds.items():
        first, last = int(ends[before]), int(ends[before + len(positions)])
        if last > first:
            launches.append(Launch(dtypes, aligned, first, last - first))
        before += len(positions)
    chunks, facts = torch.stack((columns, parts), 1), torch.stack((elements, order + start))
    return Layout(Copied(chunks, device), Copied(ends, device), chunk, len(columns), launches, order, facts)
