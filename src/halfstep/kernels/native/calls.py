"""The operators on CPU: functions of `kernels.cpp`, called with the addresses and sizes of tensors.

Also `peek` and `number`: single values in host memory, read by their address and not by torch, whose own reads count as
waits for the device.

Note [one runtime]: two OpenMP runtimes in a process are two pools of threads that wait for each other in busy loops.
So the kernels are linked with none: they are given the entry of the runtime that torch itself calls, found the way the
dynamic linker has found it for torch (global symbols first, then what libtorch depends on).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from struct import Struct, pack, pack_into
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.kernels.native.compiler import Unavailable
from halfstep.kernels.ops import FORMS
from halfstep.kernels.optimizers import COUNTERS, SPECS, STATES, OptimizerSpec

Tensors: TypeAlias = Sequence[Tensor]
Lists: TypeAlias = Sequence[Tensors]

ALONE = {"update": 100_000, "norms": 400_000, "exponents": 50_000, "loss": 30_000}
"""Up to so many elements the calling thread works alone: waking the others (5 us and more) costs what it gains."""

CPU = torch.device("cpu")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 3, torch.float64: 4}
FORM_CODES = {form: code for code, form in enumerate(FORMS)}
NUMBER_CODES = {torch.float16: "e", torch.float32: "f", torch.float64: "d"}

# applied with `map`, so that a call makes no Python frames per tensor
_address, _size, _dtype, _type = Tensor.data_ptr, Tensor.numel, attrgetter("dtype"), TYPES.__getitem__


def peek(flag: Tensor) -> bool:
    """Return whether one element in host memory is not zero."""
    return any(ctypes.string_at(flag.data_ptr(), flag.element_size()))


def number(value: Tensor) -> float:
    """Return one number; of a plain tensor in host memory without torch, of any other by waiting for its device."""
    if type(value) is not Tensor or value.device.type != "cpu" or value.dtype not in NUMBER_CODES:
        return float(value)
    found = struct.unpack(NUMBER_CODES[value.dtype], ctypes.string_at(value.data_ptr(), value.element_size()))
    return float(found[0])


def _threads() -> tuple[int, int, int]:
    """Return the addresses of the entries of torch's OpenMP runtime: note [one runtime]; 0 means one thread."""
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    libtorch = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    for name in (None, str(libtorch)):
        try:
            library = ctypes.CDLL(name)
            entries = [ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0 for entry in names]
        except (OSError, AttributeError):
            continue
        return entries[0], entries[1], entries[2]
    if sys.platform == "darwin":
        return 0, 0, 0  # LLVM's runtime need not have this entry there
    raise Unavailable("torch's OpenMP runtime was not found, so the kernels could not use torch's threads")


class Kernels:
    """The operators as methods; arguments and results are those of the schemas in `kernels.ops`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        text, number, address = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
        double, single = ctypes.c_double, ctypes.c_float
        read, check = (address, text, number, text), (address, text, address, address, address)

        def function(name: str, *types: Any) -> Any:
            found = getattr(library, f"halfstep_{name}")
            found.argtypes, found.restype = types, None
            return found

        self._runtime = _threads()
        self._norms, self._exponents = function("norms", *read), function("exponents", *read)
        self._both, self._check = function("read", *read, *check), function("check_norms", address, number, *check)
        rule = ctypes.c_bool, double, double, number, single, single
        self._advance = function("advance", *[address] * 4, *rule)
        self._row_sums = function("row_sums", *[address] * 3, text, address, address, number)
        self._slope = function("slope", text, *[address] * 6, number, address, number)
        self._updates = {spec.name: function(spec.name, text, text) for spec in SPECS}
        self._pack_job = {spec.name: Struct(f"12q{1 + len(spec.options)}d").pack for spec in SPECS}

    def _read(self, function: Any, work: str, out: Tensor, columns: Columns) -> None:
        threads = torch.get_num_threads() if columns.elements > ALONE[work] else 1
        function(out.data_ptr(), columns.packed, len(columns.sizes), pack("4q", threads, *self._runtime))

    def norms(self, gradients: Tensors) -> Tensor:
        """Carry out `ops.norms`."""
        norms = torch.empty(len(gradients), dtype=torch.float32, device=CPU)
        self._read(self._norms, "norms", norms, Columns(gradients))
        return norms

    def check(
        self, gradients: Columns, divisor: Tensor | None, clip_norm: float | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Carry out `ops.norms` and `ops.check_norms` of the tensors put into columns last, in one call."""
        count = len(gradients.sizes)
        norms = torch.empty(count, dtype=torch.float32, device=CPU)
        norm, factor, bad = norms.new_empty(()), norms.new_empty(()), torch.empty((), dtype=torch.bool, device=CPU)
        threads = torch.get_num_threads() if gradients.elements > ALONE["norms"] else 1
        clip = None if clip_norm is None else pack("f", clip_norm)
        at = None if divisor is None else divisor.data_ptr()
        out = norm.data_ptr(), bad.data_ptr(), factor.data_ptr()
        self._both(norms.data_ptr(), gradients.packed, count, pack("4q", threads, *self._runtime), at, clip, *out)
        return norms, norm, bad, factor

    def norm(self, gradients: Columns) -> float:
        """Return the 2-norm of the tensors put into columns last, all together; on the host, without a tensor."""
        count = len(gradients.sizes)
        out = ctypes.create_string_buffer(12 + 4 * count)
        at = ctypes.addressof(out)
        threads = torch.get_num_threads() if gradients.elements > ALONE["norms"] else 1
        runtime = pack("4q", threads, *self._runtime)
        self._both(at + 12, gradients.packed, count, runtime, None, None, at, at + 4, at + 8)
        found: float = struct.unpack_from("f", out)[0]
        return found

    def exponents_(self, rows: Tensor, tensors: Tensors) -> None:
        """Carry out `ops.exponents_`."""
        if len(rows) != len(tensors) or not rows.is_contiguous():
            raise ValueError(f"{len(tensors)} tensors need as many rows, contiguous; got {tuple(rows.shape)}")
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        self._read(self._exponents, "exponents", rows, Columns(dense))

    def row_sums_(self, *given: Any) -> None:
        """Carry out `ops.row_sums_`."""
        *sums, logits, target, by_class, first = given
        target, by_class = target.contiguous(), None if by_class is None else by_class.contiguous()
        shares = None if by_class is None else by_class.data_ptr()
        self._row_sums(*map(_address, sums), self._logits(logits), target.data_ptr(), shares, first)

    def logits_gradient(self, logits: Tensor, *given: Any, out: Tensor) -> None:
        """Carry out `ops.logits_gradient`."""
        *tensors, first = given
        dense = [None if t is None else t.contiguous() for t in tensors]
        addresses = [None if t is None else t.data_ptr() for t in dense]
        self._slope(self._logits(logits), *addresses, first, out.data_ptr(), out.stride(0))

    def _logits(self, logits: Tensor) -> bytes:
        threads = torch.get_num_threads() if logits.numel() > ALONE["loss"] else 1
        table = (*logits.shape, logits.stride(0), TYPES[logits.dtype], logits.data_ptr())
        return pack("9q", *table, threads, *self._runtime)

    def check_norms(
        self, norms: Tensor, divisor: Tensor | None, clip_norm: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Carry out `ops.check_norms`."""
        norms = norms.contiguous()
        norm, bad, factor = norms.new_empty(()), norms.new_empty((), dtype=torch.bool), norms.new_empty(())
        clip = None if clip_norm is None else pack("f", clip_norm)
        at = None if divisor is None else divisor.data_ptr()
        self._check(norms.data_ptr(), norms.numel(), at, clip, norm.data_ptr(), bad.data_ptr(), factor.data_ptr())
        return norm, bad, factor

    def advance_(self, scale: Tensor, good: Tensor, total: Tensor, alarm: Tensor, found: Tensor, *rule: float) -> None:
        """Carry out `ops.advance_`; `rule` are its numbers, growth to ceiling."""
        self._advance(scale.data_ptr(), good.data_ptr(), total.data_ptr(), alarm.data_ptr(), peek(found), *rule)

    def update(self, spec: OptimizerSpec, weights: Tensors, beside: Tensors, *given: Any) -> None:
        """Carry out the update operator of a spec; `given` are its arguments from the first state on."""
        states, counters = given[: len(spec.states)], given[len(spec.states) : len(spec.states) + len(spec.counters)]
        gradients, *common = given[len(states) + len(counters) :]
        self.update_packed(spec.name, Packed(weights, beside, states, counters, gradients), *common)

    def update_packed(
        self,
        name: str,
        tensors: Packed,
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        *options: Any,
    ) -> None:
        """Carry out the update of a spec, given by its name, on tensors that are packed."""
        if draws is None and (form == "stochastic" or tensors.chance):
            raise ValueError("bf16 is rounded stochastically here, which needs `draws`: (seed, count), int64")
        threads = torch.get_num_threads() if tensors.elements > ALONE["update"] else 1
        wide = rate is not None and rate.dtype is torch.float64
        head = tensors.count, threads, *self._runtime, FORM_CODES[form], start, wide
        addresses = [0 if t is None else t.data_ptr() for t in (factor, bad, draws, rate)]
        job = self._pack_job[name](*head, *addresses, lr, *options)
        self._updates[name](job, tensors.packed)


def _words(values: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(pack(f"{len(values)}q", *values), 8 * len(values))


class Columns:
    """Sizes, types and addresses of tensors, as `norms.h` and `exponents.h` read them."""

    __slots__ = ("_dtypes", "addresses", "elements", "packed", "sizes")

    def __init__(self, tensors: Tensors) -> None:
        self.sizes, self._dtypes = [*map(_size, tensors)], [*map(_dtype, tensors)]
        self.addresses = [*map(_address, tensors)]
        self.elements = sum(self.sizes)
        self.packed = _words((*self.sizes, *map(_type, self._dtypes), *self.addresses))

    def take(self, tensors: Tensors) -> bool:
        """Put in the addresses of tensors of the same sizes and types; return False if they are not."""
        if [*map(_size, tensors)] != self.sizes or [*map(_dtype, tensors)] != self._dtypes:
            return False
        self.addresses = [*map(_address, tensors)]
        pack_into(f"{len(tensors)}q", self.packed, 16 * len(tensors), *self.addresses)
        return True


class Packed:
    """The tensors of an update as `updates.h` reads them: the columns of `Parameter`.

    `chance`: whether states are bf16, and so rounded stochastically.
    """

    __slots__ = ("chance", "count", "elements", "packed")

    def __init__(self, weights: Tensors, beside: Tensors, states: Lists, counters: Lists, gradients: Tensors) -> None:
        sizes = [*map(_size, weights)]
        if sizes != [*map(_size, gradients)]:
            raise ValueError(f"gradients and weights differ in size: {[*map(_size, gradients)]} and {sizes}")
        absent, columns = [0] * len(weights), list(sizes)
        states = (*states, *[()] * (STATES - len(states)))
        counters = (*counters, *[()] * (COUNTERS - len(counters)))
        for tensors in (weights, beside, *states, gradients):
            columns += map(_type, map(_dtype, tensors)) if tensors else absent
        for tensors in (weights, beside, *states, *counters, gradients):
            columns += map(_address, tensors) if tensors else absent
        self.count, self.elements = len(weights), sum(sizes)
        self.chance = any(some and some[0].dtype is torch.bfloat16 for some in states)
        self.packed = _words(columns)

    def take(self, columns: Columns, chosen: Sequence[int]) -> None:
        """Put in the addresses of other gradients: those of `columns` at the places `chosen`."""
        if len(chosen) == len(columns.sizes):  # all of them, in their order
            end, of = ctypes.addressof(self.packed) + len(self.packed), ctypes.addressof(columns.packed)
            ctypes.memmove(end - 8 * self.count, of + 16 * self.count, 8 * self.count)
        else:
            addresses = [columns.addresses[n] for n in chosen]
            pack_into(f"{self.count}q", self.packed, len(self.packed) - 8 * self.count, *addresses)
